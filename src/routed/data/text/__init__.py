"""Text in many languages for an encoder-decoder: T5's span corruption over grain, of rows of one language each."""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.data.text import corpus as _corpus
from routed.data.text.bigram import bigram_loss
from routed.data.text.corpus import Corpus
from routed.data.text.sources import SOURCES
from routed.data.text.spans import lengths
from routed.data.text.stream import batch_function, batches, validation
from routed.data.text.tokens import Tokenizer, decode, encode

__all__ = [
    "SOURCES",
    "Corpus",
    "Tokenizer",
    "batch_function",
    "batches",
    "bigram_loss",
    "decode",
    "encode",
    "lengths",
    "load",
    "validation",
]


def load(config: ConfigDict) -> Corpus:
    """The tokenised corpus of `config.data`, from the cache where it is there (see `corpus.load`)."""
    return _corpus.load(config.data)
