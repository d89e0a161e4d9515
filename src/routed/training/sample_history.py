"""What the whole history of a run on samples tells, beyond each evaluation: agreement with clusters, churn, experts alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.metrics import agreement
from routed.metrics.router import PROBE
from routed.models.single_layer import SITE
from routed.settings.tree import node_of
from routed.tasks import TASKS, worlds
from routed.tasks.task import Task
from routed.training.program import streams
from routed.training.task_losses import correct

#: The column of a router's agreement with a grouping of the clusters, which a task asks for among its `columns`.
AMI_BY = "router/ami_by_"
#: The column of how experts do by themselves on the cluster that their initial filters favour, for which a task asks likewise.
ALONE = "theory/own_error"


def offline(config: ConfigDict, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns that need several evaluations at once, or scikit-learn."""
    if "choices" not in history:
        return {}
    choices = history["choices"]
    columns = [agreement.agreement(counts) for counts in history["counts"]]
    found = {f"router/{name}": np.array([one[name] for one in columns]) for name in columns[0]}
    # Of coarser clusters, where the task says that none overlap, by naming it.
    for name in TASKS[config.data.name].columns:
        if name.startswith(AMI_BY):
            counts = history[f"counts_by_{name.removeprefix(AMI_BY)}"]
            found[name] = np.array([agreement.agreement(one)["ami"] for one in counts])
    churns = [agreement.churn(a, b) for a, b in zip(choices[1:], choices[:-1], strict=True)]
    found["router/churn"] = np.array([np.nan, *churns])
    found["router/churn_to_final"] = np.array([agreement.churn(one, choices[-1]) for one in choices])
    if "groups" in history:
        hits = [agreement.group_hit(history["groups"][0], counts) for counts in history["counts"]]
        found["router/group_hit"] = np.array(hits)
        if "alone" in history:
            errors = [agreement.group_errors(history["groups"][0], 1 - right) for right in history["alone"]]
            found[ALONE], found["theory/other_error"] = np.array(errors).T
    return found


def traced(config: ConfigDict) -> dict[str, dict[str, Any]]:
    """What is known of the test tokens of the array of choices: `ProblemPart.traced`. The test samples of the base seed, made again."""
    task, data = TASKS[config.data.name], node_of(config).data
    world = worlds.draw_world(task, streams(config.seed, config)["world"], data, config.data.samples)
    world = world._replace(shared=task.shared(config.data))
    label = np.asarray(worlds.test_batch(task, world, data).label)[:PROBE]
    return {"choices": {"labels": {"cluster": label}, "sequence": np.arange(len(label)), "layers": ["0"]}}


def alone(task: Task, responses: Callable[..., Array], params, test: Batch, data) -> Float[Array, "C E"]:
    """The share of each cluster's samples that each expert alone gets right."""
    each = responses(params, SITE, test.tokens[None])[0].swapaxes(0, 1)  # [E, T, O]
    right = jax.vmap(lambda one: correct(one, test.y))(each).astype(jnp.float32).T
    kinds = jax.nn.one_hot(test.label, task.labels(data))
    return kinds.T @ right / jnp.maximum(kinds.sum(0)[:, None], 1)
