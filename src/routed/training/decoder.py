"""The problem of text that is continued: a decoder alone predicts every token of a row from those before it."""

from __future__ import annotations

import numpy as np
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, AT_LEAST_1, SHARE, Column, TextBatch
from routed.models import DECODERS, flops_of_decoder_row
from routed.models.decoder import READ
from routed.settings.setting import Setting, one_of
from routed.tasks.text import CONTINUED, DOCUMENTS, STREAM, Corpus, ngram_loss
from routed.training.language import language_part
from routed.training.text_feed import counted_of
from routed.training.text_problem import TextKind

COLUMNS = {
    "eval/ngram": Column(
        "loss of an interpolated 5-gram model (nats per token)",
        "Loss on the held-out rows of a 5-gram model of the training text (of 17 million of its tokens"
        " at most), interpolated by Witten and Bell: an arm that is not better needs no network.",
        AT_LEAST_0,
    ),
    "test/loss": Column(
        "test loss (nats per token)", "Cross-entropy on the test rows, in nats for each token.", AT_LEAST_0
    ),
    "test/accuracy": Column(
        "test token accuracy", "Share of the test tokens that the model ranks first.", SHARE, higher_is_better=True
    ),
    "test/bits": Column(
        "bits per token, test,\nat the best validation so far",
        "Cross-entropy on the test rows in bits, of the model at the evaluation with the lowest"
        " validation loss so far.",
        AT_LEAST_0,
    ),
    "test/perplexity": Column(
        "perplexity, test,\nat the best validation so far",
        "exp of the cross-entropy on the test rows in nats, of the model at the evaluation with the"
        " lowest validation loss so far.",
        AT_LEAST_1,
        log=True,
    ),
}

#: Settings of `data` that rows of a decoder read: none of spans.
READS = ("languages", "temperature", "tokens", "vocabulary", "input_length", "damaged", "eval_rows", "cache")


def at_best(history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns bits and perplexity per test token of the model with the lowest validation loss so far.

    One value for each evaluation. Bits are nats / ln 2, perplexity is exp of nats; a token is a character, or a byte.
    """
    losses = np.where(np.isfinite(history["eval/loss"]), history["eval/loss"], np.inf)
    best = [int(losses[: last + 1].argmin()) for last in range(len(losses))]
    nats = history["test/loss"][best].astype(float)
    return {"test/bits": nats / np.log(2), "test/perplexity": np.exp(nats)}


SETTINGS = {
    "data.packing": Setting(
        STREAM,
        "stream: a decoder's rows are one text; documents: each ends with END, no token sees another document's,"
        " and none is predicted across",
        one_of((STREAM, DOCUMENTS)),
        omit_default_from_identity=True,
    )
}


def five_gram(corpus: Corpus, config: ConfigDict, rows: TextBatch) -> dict[str, float]:
    """Returns the loss of an interpolated 5-gram model of the training text."""
    texts = [cut[:, :-1].reshape(-1) for cut in corpus.train]
    weights = counted_of(CONTINUED, config, rows.inputs)
    counted = None if weights is None else np.asarray(weights, bool)
    loss = ngram_loss(texts, np.asarray(rows.inputs), np.asarray(rows.targets), corpus.vocabulary, counted=counted)
    return {"ngram": loss}


DECODER = language_part(
    TextKind(
        CONTINUED,
        READ,
        DECODERS,
        flops_of_decoder_row,
        reads=READS,
        references=five_gram,
        columns=COLUMNS,
        finished=at_best,
        settings=SETTINGS,
    )
)
