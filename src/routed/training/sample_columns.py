"""What the problem of samples reports, and how it is shown."""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, SHARE, Column
from routed.metrics import patches, regret, router, specialists
from routed.models import SAMPLE_MODELS
from routed.tasks import TASKS
from routed.training.program_columns import PROGRAM
from routed.training.task_losses import TASK_LOSSES

#: How the problem's columns are shown; losses of classes have no trivial scale.
COLUMNS = {
    "test/loss": Column(
        "top-1 test loss (1 = trivial)",
        log=True,
        bounds=AT_LEAST_0,
        definition="Squared error on test samples as the arm is evaluated (top-1 unless the config says otherwise: one expert a token, weight 1), over the variance of the targets: 1 is what a constant prediction reaches, 0 is perfect.",
    ),
    "test/accuracy": Column(
        "test accuracy",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of test samples whose class is the predicted one.",
    ),
    "test/accuracy_all": Column(
        "test accuracy where experts\ntake all patches",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of test samples whose class is the predicted one when every expert is given all patches of a sample, not those that the router picks.",
    ),
    "test/loss_soft": Column(
        "soft test loss (1 = trivial)",
        log=True,
        bounds=AT_LEAST_0,
        definition="The same error when every expert answers and the router's probabilities weigh the answers: no penalty for the change from soft training to one expert.",
    ),
    "test/excess": Column(
        "excess over Bayes (1 = trivial)",
        log=True,
        definition="Test loss minus the loss of the Bayes predictor, over the variance of the targets: what a better model could still gain.",
    ),
    "test/bayes": Column(
        "loss of the Bayes predictor (1 = trivial)",
        log=True,
        bounds=AT_LEAST_0,
        definition="Loss of E[y | x], which the generator of the data knows: no model does better on average.",
    ),
    "train/loss": Column(
        "training loss, as trained\n(1 = trivial)",
        log=True,
        bounds=AT_LEAST_0,
        definition="Mean loss of the training batches since the last evaluation, by the rule that trains, over the variance of the targets.",
    ),
    "train/dispatch_entropy": Column(
        "dispatch entropy H(cluster | expert),\ntraining samples (nats)",
        bounds=AT_LEAST_0,
        definition="H(cluster | expert) over training samples: 0 where every expert serves one cluster, log of the number of clusters where experts are blind to them.",
    ),
    "router/entropy_token_train": Column(
        "entropy of a gate,\ntraining samples (nats)",
        bounds=AT_LEAST_0,
        definition="Mean over training samples of the entropy of a token's probabilities over experts (of patches: of an expert's over the patches of a sample): 0 is a sharp gate, the log of their number a uniform one.",
    ),
    "router/entropy_asked": Column(
        "entropy that a gate was asked for,\ntraining samples (nats)",
        bounds=AT_LEAST_0,
        definition="The per-token entropy that a matched gate was sharpened to: the source arm's final one.",
    ),
    "train/experts": Column(
        "experts computed per training token",
        log=True,
        bounds=AT_LEAST_0,
        definition="Experts that are computed for a training token: all of a soft mixture, k of a sparse one. What a step costs.",
    ),
} | PROGRAM
LABELLED = {
    "train/loss": Column(
        "training loss (nats per sample)",
        log=True,
        bounds=AT_LEAST_0,
        definition="Mean cross-entropy of the training batches since the last evaluation, by the rule that trains.",
    ),
    "test/loss": Column(
        "test loss (nats per sample)",
        log=True,
        bounds=AT_LEAST_0,
        definition="Mean cross-entropy on test samples as the arm is evaluated.",
    ),
}


def columns_of(config: ConfigDict) -> dict[str, Column]:
    """The columns of a config: its own, its task's and its model's."""
    further = {name: metric.column for name, metric in router.METRICS.items()}
    parts = TASKS[config.data.name].columns, SAMPLE_MODELS[config.model].columns
    labelled = LABELLED if TASK_LOSSES[config.loss].labelled else {}
    return (
        COLUMNS
        | labelled
        | patches.COLUMNS
        | router.COLUMNS
        | regret.COLUMNS
        | specialists.COLUMNS
        | dict(parts[0])
        | dict(parts[1])
        | further
    )
