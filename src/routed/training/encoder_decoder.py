"""The problem of text in, text out: an encoder-decoder that fills in the spans that were cut out of rows."""

from __future__ import annotations

from routed.contracts import AT_LEAST_0, Column
from routed.models import ENCODER_DECODERS, flops_per_row
from routed.models.t5 import READ
from routed.tasks.text import SHARED, SPANS
from routed.training.language import language_part

COLUMNS = {
    "eval/bigram": Column("loss of a bigram model (nats per token)", bounds=AT_LEAST_0),
    "eval/floor": Column("least loss that is possible (nats per token)", bounds=AT_LEAST_0),
    "eval/floor_blind": Column("least loss without the dialect (nats per token)", bounds=AT_LEAST_0),
}

ENCODER_DECODER = language_part(SPANS, READ, ENCODER_DECODERS, COLUMNS, flops_per_row, reads=tuple(SHARED))
