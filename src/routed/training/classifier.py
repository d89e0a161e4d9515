"""The problem of texts with a class: a decoder, trained on text or not, learns the classes with a new head."""

from __future__ import annotations

import numpy as np
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, SHARE, Column, TextBatch
from routed.models import CLASSIFIERS, flops_of_classifier_row
from routed.models.decoder import READ
from routed.settings.setting import Setting
from routed.tasks.text import CLASSIFIED, LABELLED, Corpus
from routed.training.language import language_part
from routed.training.text_problem import TextKind

COLUMNS = {
    "train/loss": Column(
        "training loss (nats per text)",
        bounds=AT_LEAST_0,
        definition="Mean cross-entropy of the training batches since the last evaluation, in nats for each text.",
    ),
    "eval/loss": Column(
        "validation loss (nats per text)",
        bounds=AT_LEAST_0,
        definition="Cross-entropy on held-out texts, in nats for each text; all arms are asked about the same texts.",
    ),
    "eval/accuracy": Column(
        "validation accuracy",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of held-out texts whose class the model ranks first.",
    ),
    "eval/prior": Column(
        "loss of the classes' shares (nats per text)",
        bounds=AT_LEAST_0,
        definition="Loss on the held-out texts of who knows only how often each class is in training.",
    ),
    "test/loss": Column(
        "test loss (nats per text),\nat the best validation so far",
        bounds=AT_LEAST_0,
        definition="Cross-entropy on the test texts, in nats for each text, of the model at the evaluation with the"
        " lowest validation loss so far.",
    ),
    "test/accuracy": Column(
        "test accuracy,\nat the best validation so far",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of the test texts whose class the model ranks first, at the evaluation with the lowest"
        " validation loss so far.",
    ),
}

#: The pretrained models of a run, which the engine loads.
SETTINGS = {
    "initial.workdir": Setting(
        "", "a finished workdir whose models (checkpoint.final=true) runs begin with, by arm and seed; empty: untrained"
    ),
    "initial.arm": Setting("", "the arm there; empty: that of the same name"),
}

#: Settings of `data` that texts with a class read.
READS = ("tokens", "vocabulary", "input_length", "eval_rows", "cache")


def at_best(history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the test metrics of the model with the lowest validation loss so far, for each evaluation."""
    losses = np.where(np.isfinite(history["eval/loss"]), history["eval/loss"], np.inf)
    best = [int(losses[: last + 1].argmin()) for last in range(len(losses))]
    return {name: history[name][best] for name in ("test/loss", "test/accuracy")}


def class_prior(corpus: Corpus, config: ConfigDict, rows: TextBatch) -> dict[str, float]:
    """Returns the loss of predicting each class as often as it occurs in training."""
    counts = np.bincount(corpus.train[0][:, 0], minlength=len(config.data.labels))
    return {"prior": -np.log(counts / counts.sum())[np.asarray(rows.targets)].mean()}


CLASSIFIER = language_part(
    TextKind(
        CLASSIFIED,
        READ,
        CLASSIFIERS,
        flops_of_classifier_row,
        reads=READS,
        references=class_prior,
        columns=COLUMNS,
        finished=at_best,
        sources=LABELLED,
        settings=SETTINGS,
        # At the best validation: training soon overfits a small table, and the last validation compares how soon.
        compared="test/loss",
    )
)
