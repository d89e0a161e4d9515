"""The problem of text in, text out: an encoder-decoder that fills in the spans that were cut out of rows."""

from __future__ import annotations

from routed.contracts import AT_LEAST_0, Column
from routed.models import ENCODER_DECODERS, flops_per_row
from routed.models.t5 import READ
from routed.tasks.text import SHARED, SPANS
from routed.training.language import language_part

COLUMNS = {
    "eval/bigram": Column(
        "loss of a bigram model (nats per token)",
        bounds=AT_LEAST_0,
        definition="Loss of a smoothed model that sees only the token before: an arm that is not better has learned nothing that needs a network.",
    ),
    "eval/floor": Column(
        "least loss that is possible (nats per token)",
        bounds=AT_LEAST_0,
        definition="Entropy of the language that generated the text: no model does better on average.",
    ),
    "eval/floor_blind": Column(
        "least loss without the dialect (nats per token)",
        bounds=AT_LEAST_0,
        definition="The least loss of a model that is not told which dialect a row is in.",
    ),
}

ENCODER_DECODER = language_part(SPANS, READ, ENCODER_DECODERS, COLUMNS, flops_per_row, reads=tuple(SHARED))
