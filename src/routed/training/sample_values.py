"""A look at the samples of a user's task, before anything is compiled for them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from routed.contracts import Batch, UserError
from routed.settings.tree import node_of
from routed.tasks import TASKS, Task, worlds
from routed.training.program import streams

#: The most training samples that are looked at.
LOOKED_AT = 1024


def check_values(config: ConfigDict) -> None:
    """Refuses a user's task whose samples do not fit its declaration, or are not finite.

    Looks at the test samples and the first training samples of the base seed.

    Raises:
      UserError: names the task, what it makes, and what it declares.
    """
    task, data = TASKS[config.data.name], node_of(config).data
    if task.draw.__module__.startswith("routed."):
        return
    training = min(config.data.samples, LOOKED_AT)

    def draw() -> tuple[Any, Batch, Batch]:
        world = worlds.draw_world(task, streams(config.seed, config)["world"], data, training)
        world = world._replace(shared=task.shared(config.data))
        return world, worlds.test_batch(task, world, data), task.batch(world, world.train, data)

    (world, *batches), name = jax.jit(draw)(), f"data.name={config.data.name!r}"
    for samples, batch in zip(("test samples", "training samples"), batches, strict=True):
        _check_batch(f"{name}: its {samples}", task, config.data, batch)
    best = None if task.bayes is None else task.bayes(world, batches[0], data)
    if best is not None and best.shape != batches[0].y.shape:
        raise UserError(f"{name}: its bayes returns {[*best.shape]}: must be {[*batches[0].y.shape]}, as y is")


def _check_batch(of: str, task: Task, data: Any, batch: Batch) -> None:
    """Refuses a batch whose shapes and labels are not those that the task declares."""
    x, y = batch.x, batch.y
    numbers = math.prod(x.shape[batch.cluster.ndim :]) + (0 if batch.side is None else batch.side.shape[-1])
    if x.shape[: batch.cluster.ndim] != batch.cluster.shape or numbers != task.dims(data):
        raise UserError(f"{of} have x {list(x.shape)}: {numbers} numbers each, but `dims` says {task.dims(data)}")
    if y.shape != (len(x), task.outputs(data)):
        raise UserError(f"{of} have y {list(y.shape)}: must be {[len(x), task.outputs(data)]}, as `outputs` says")
    if len(y) > 1 and task.targets[data.target] == "vector" and not np.ptp(y, axis=0).any():
        raise UserError(f"{of} have one y for all: a loss is relative to the variance of y, which is 0")
    if not jnp.issubdtype(batch.cluster.dtype, jnp.integer):
        raise UserError(f"{of} have clusters of type {batch.cluster.dtype}: must be integers")
    low, high, labels = int(batch.cluster.min()), int(batch.cluster.max()), task.labels(data)
    if low < 0 or high >= labels:
        raise UserError(f"{of} have clusters {low} to {high}: must be 0 to {labels - 1}, as `labels` says")
    for name, values in (("x", x), ("y", y), ("side", batch.side)):
        if values is not None and not (finite := np.isfinite(values).reshape(len(values), -1).all(1)).all():
            count, first = int((~finite).sum()), int(finite.argmin())
            raise UserError(f"{of} have values of {name} that are not finite: {count:,} samples, the first is {first}")
