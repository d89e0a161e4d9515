"""What the problem of samples reports, and how it is shown."""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, SHARE, Column
from routed.metrics import patches, regret, router, specialists
from routed.models import SAMPLE_MODELS
from routed.tasks import TASKS
from routed.training.task_losses import TASK_LOSSES

#: How the problem's columns are shown; losses of classes have no trivial scale.
COLUMNS = {
    "test/loss": Column("top-1 test loss (1 = trivial)", log=True, bounds=AT_LEAST_0),
    "test/accuracy": Column("test accuracy", bounds=SHARE, higher_is_better=True),
    "test/accuracy_all": Column("test accuracy where experts\ntake all patches", bounds=SHARE, higher_is_better=True),
    "test/loss_soft": Column("soft test loss (1 = trivial)", log=True, bounds=AT_LEAST_0),
    "test/excess": Column("excess over Bayes (1 = trivial)", log=True),
    "test/bayes": Column("loss of the Bayes predictor (1 = trivial)", log=True, bounds=AT_LEAST_0),
    "train/loss": Column("training loss, as trained (1 = trivial)", log=True, bounds=AT_LEAST_0),
    "train/dispatch_entropy": Column(
        "dispatch entropy H(cluster | expert),\ntraining samples (nats)", bounds=AT_LEAST_0
    ),
    "router/entropy_token_train": Column("entropy of a gate,\ntraining samples (nats)", bounds=AT_LEAST_0),
    "router/entropy_asked": Column("entropy that a gate was asked for,\ntraining samples (nats)", bounds=AT_LEAST_0),
    "train/steps": Column("steps until the run stopped", bounds=AT_LEAST_0),
    "train/stopped": Column("share of runs that stopped", bounds=SHARE),
    "train/experts": Column("experts computed per training token", log=True, bounds=AT_LEAST_0),
    "train/rate_scale": Column("multiplier of all rates", log=True, bounds=AT_LEAST_0),
}
LABELLED = {
    "train/loss": Column("training loss (nats per sample)", log=True, bounds=AT_LEAST_0),
    "test/loss": Column("test loss (nats per sample)", log=True, bounds=AT_LEAST_0),
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
