"""The problem of samples as a part: its columns, settings, and what a trace needs of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, Column
from routed.metrics.router import PROBE
from routed.models import SAMPLE_MODELS
from routed.settings.setting import Setting, at_least
from routed.settings.tree import node_of
from routed.tasks import TASKS, worlds
from routed.training import probes
from routed.training.problem import ProblemPart
from routed.training.program import streams
from routed.training.sample_checks import check, positions_of
from routed.training.sample_cost import cost
from routed.training.sample_problem import SampleProblem, build
from routed.training.task_losses import TASK_LOSSES

#: The losses of samples with classes, which have no trivial scale.
IN_NATS = {
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
    """Returns the columns of a config: those of all probes, of its task and of its model."""
    columns = probes.columns_of(SampleProblem) | (IN_NATS if TASK_LOSSES[config.loss].labelled else {})
    return columns | dict(TASKS[config.data.name].columns) | dict(SAMPLE_MODELS[config.model].columns)


def offline(config: ConfigDict, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the columns of a run that need its whole history, or the host."""
    return probes.finish(build(config, config.data.samples), history)


def traced(config: ConfigDict) -> dict[str, dict[str, Any]]:
    """Returns the clusters of the test tokens of the base seed, drawn again (`ProblemPart.traced`)."""
    task, data = TASKS[config.data.name], node_of(config).data
    world = worlds.draw_world(task, streams(config.seed, config)["world"], data, config.data.samples)
    world = world._replace(shared=task.shared(config.data))
    label = np.asarray(worlds.test_batch(task, world, data).label)[:PROBE]
    return {"choices": {"labels": {"cluster": label}, "sequence": np.arange(len(label)), "layers": ["0"]}}


SAMPLES = ProblemPart(
    build=build,
    data=TASKS,
    models=SAMPLE_MODELS,
    loss="test/loss",
    columns=columns_of,
    shared_arrays=lambda config: TASKS[config.data.name].shared(config.data),
    feed=lambda config, seed, rows=slice(None): lambda first, steps: (),
    feed_shape=lambda config, steps: (),
    offline=offline,
    traced=traced,
    positions=positions_of,
    digest=lambda config: TASKS[config.data.name].digest(config.data),
    about=lambda config: TASKS[config.data.name].about(config.data),
    cost=cost,
    fuse="LIBRARY_FUSION_TYPE_REDUCE",
    settings={"shuffles": Setting(32, "draws of the shuffled-router baseline at an evaluation; 0: none", at_least(0))},
    uses=("model", "loss", "optimizer.normalise"),
    reads=(
        "data.samples",
        "data.fresh",
        "data.full_batch",
        "data.epochs",
        "data.test_samples",
        "data.target",
        "data.target_dim",
    ),
    check=check,
)
