"""Text in many languages, in rows of one language: with spans removed for an encoder-decoder, or contiguous."""

from routed.tasks.text.bigram import bigram_loss
from routed.tasks.text.corpus import Corpus, load
from routed.tasks.text.ngram import ngram_loss
from routed.tasks.text.sources import SHARED, SOURCES, TextSource
from routed.tasks.text.spans import lengths
from routed.tasks.text.stream import (
    CONTINUED,
    DOCUMENTS,
    SPANS,
    STREAM,
    Form,
    batch_function,
    held_out,
    validation,
)
from routed.tasks.text.tokenizers import Tokenizer, decode, encode

__all__ = [
    "CONTINUED",
    "DOCUMENTS",
    "SHARED",
    "SOURCES",
    "SPANS",
    "STREAM",
    "Corpus",
    "Form",
    "TextSource",
    "Tokenizer",
    "batch_function",
    "bigram_loss",
    "decode",
    "encode",
    "held_out",
    "lengths",
    "load",
    "ngram_loss",
    "validation",
]
