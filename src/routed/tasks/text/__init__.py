"""Text in many languages for an encoder-decoder: T5's span corruption over grain, of rows of one language each."""

from routed.tasks.text.bigram import bigram_loss
from routed.tasks.text.corpus import Corpus, load
from routed.tasks.text.sources import SHARED, SOURCES, TextSource
from routed.tasks.text.spans import lengths
from routed.tasks.text.stream import batch_function, batches, validation
from routed.tasks.text.tokenizers import Tokenizer, decode, encode

__all__ = [
    "SHARED",
    "SOURCES",
    "Corpus",
    "TextSource",
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
