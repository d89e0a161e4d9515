"""Text in many languages, in rows of one language: with spans removed for an encoder-decoder, or contiguous."""

from routed.tasks.text.corpus import Corpus, load
from routed.tasks.text.ngram import bigram_loss, ngram_loss
from routed.tasks.text.sources import SHARED, SOURCES
from routed.tasks.text.stream import CONTINUED, DOCUMENTS, SPANS, STREAM, Form

__all__ = [
    "CONTINUED", "DOCUMENTS", "SHARED", "SOURCES", "SPANS", "STREAM", "Corpus", "Form", "bigram_loss", "load",
    "ngram_loss"
]  # fmt: skip
