"""The problem of text that is continued: a decoder alone predicts every token of a row from those before it, and is tested, too."""

from __future__ import annotations

import numpy as np

from routed.contracts import AT_LEAST_0, AT_LEAST_1, SHARE, Column
from routed.models import DECODERS, flops_of_decoder_row
from routed.models.decoder import READ
from routed.settings.setting import Setting, one_of
from routed.tasks.text import CONTINUED, DOCUMENTS, STREAM
from routed.training.language import language_part
from routed.training.language_columns import TEST_GATES

COLUMNS = {
    "eval/ngram": Column(
        "loss of an interpolated 5-gram model (nats per token)",
        bounds=AT_LEAST_0,
        definition="Loss on the held-out rows of a 5-gram model of the training text (of 17 million of its tokens at most), interpolated by Witten and Bell: an arm that is not better needs no network.",
    ),
    "test/loss": Column(
        "test loss (nats per token)",
        bounds=AT_LEAST_0,
        definition="Cross-entropy on the test rows, in nats for each token.",
    ),
    "test/accuracy": Column(
        "test token accuracy",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of the test tokens that the model ranks first.",
    ),
    "test/bits": Column(
        "bits per token, test,\nat the best validation so far",
        bounds=AT_LEAST_0,
        definition="Cross-entropy on the test rows in bits, of the model at the evaluation with the lowest validation loss so far.",
    ),
    "test/perplexity": Column(
        "perplexity, test,\nat the best validation so far",
        log=True,
        bounds=AT_LEAST_1,
        definition="exp of the cross-entropy on the test rows in nats, of the model at the evaluation with the lowest validation loss so far.",
    ),
} | TEST_GATES

#: What of `data` a row that is continued reads: nothing of spans.
READS = ("languages", "temperature", "tokens", "vocabulary", "input_length", "damaged", "eval_rows", "cache")


def at_best(history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """At each evaluation, what the test says of the model with the lowest validation loss until then: a token is a character, or a byte.

    Bits are nats / ln 2, perplexity is exp of them. Where no loss is a number nothing is said.
    """
    losses = np.where(np.isfinite(history["eval/loss"]), history["eval/loss"], np.inf)
    best = [int(losses[: last + 1].argmin()) for last in range(len(losses))]
    nats = history["test/loss"][best].astype(float)
    return {"test/bits": nats / np.log(2), "test/perplexity": np.exp(nats)}


SETTINGS = {
    "data.packing": Setting(
        STREAM,
        "stream: a decoder's rows are one text; documents: each ends with END, no token sees another document's, and none is predicted across",
        one_of((STREAM, DOCUMENTS)),
        omit_default_from_identity=True,
    )
}

DECODER = language_part(
    CONTINUED, READ, DECODERS, COLUMNS, flops_of_decoder_row, reads=READS, finished=at_best, settings=SETTINGS
)
