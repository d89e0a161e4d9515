"""The problem of text in, text out: an encoder-decoder fills in the spans that were cut out of rows."""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, Column, TextBatch
from routed.models import ENCODER_DECODERS, flops_per_row
from routed.models.t5 import READ
from routed.tasks.text import SHARED, SOURCES, SPANS, Corpus, bigram_loss
from routed.training.language import language_part
from routed.training.text_problem import TextKind

COLUMNS = {
    "eval/bigram": Column(
        "loss of a bigram model (nats per token)",
        "Loss of a smoothed model that sees only the token before: an arm that is not better has learned"
        " nothing that needs a network.",
        AT_LEAST_0,
    ),
    "eval/floor": Column(
        "least loss that is possible (nats per token)",
        "Entropy of the language that generated the text: no model does better on average.",
        AT_LEAST_0,
    ),
    "eval/floor_blind": Column(
        "least loss without the dialect (nats per token)",
        "The least loss of a model that is not told which dialect a row is in.",
        AT_LEAST_0,
    ),
}


def bigram_and_floors(corpus: Corpus, config: ConfigDict, rows: TextBatch) -> dict[str, float]:
    """Returns the loss of a bigram model, and the least losses that are possible where the source declares them."""
    floors = SOURCES[config.data.name].floors
    return {"bigram": bigram_loss(corpus, config), **({} if floors is None else floors(config.data, rows))}


ENCODER_DECODER = language_part(
    TextKind(
        SPANS,
        READ,
        ENCODER_DECODERS,
        flops_per_row,
        reads=tuple(SHARED),
        references=bigram_and_floors,
        columns=COLUMNS,
    )
)
