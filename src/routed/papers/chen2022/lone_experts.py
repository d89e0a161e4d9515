"""Probe of single experts (Chen et al. 2022, Section 5): which clusters each expert serves and predicts by itself.

A task asks for the errors by the column `theory/own_error`, and for the hits by the array `groups` [experts] of its
`watch`: the cluster that an expert's initial filters favour.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from routed.metrics import agreement
from routed.metrics.router import PROBE
from routed.models.single_layer import SITE
from routed.training.probes import Evaluation, Probe
from routed.training.sample_problem import SampleProblem
from routed.training.task_losses import correct

#: Errors of experts on the cluster that their initial filters favour, and their least errors on another cluster.
OWN_ERROR, OTHER_ERROR = "theory/own_error", "theory/other_error"


def _alone(evaluation: Evaluation) -> dict[str, Float[Array, "C E"]]:
    """Returns the share of each cluster's samples that each expert alone predicts rightly."""
    problem, test = evaluation.problem, jax.tree.map(lambda a: a[:PROBE], evaluation.batch)
    outputs = problem.model.responses(evaluation.params, SITE, test.tokens[None])[0].swapaxes(0, 1)  # [E, T, O]
    right = jax.vmap(lambda prediction: correct(prediction, test.y))(outputs).astype(jnp.float32).T
    clusters = jax.nn.one_hot(test.label, problem.task.labels(evaluation.inputs.config.data))
    return {"alone": clusters.T @ right / jnp.maximum(clusters.sum(0)[:, None], 1)}


def _errors(problem: SampleProblem, history: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the mean error of experts on their own cluster, and on the best of the others."""
    del problem
    if (groups := history.get("groups")) is None:
        return {}
    errors = [agreement.group_errors(groups[0], 1 - right) for right in history["alone"]]
    return dict(zip((OWN_ERROR, OTHER_ERROR), np.array(errors).T, strict=True))


def _hits(problem: SampleProblem, history: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the share of live experts that serve the cluster which their initial filters favour."""
    del problem
    if (groups := history.get("groups")) is None:
        return {}
    return {"router/group_hit": np.array([agreement.group_hit(groups[0], counts) for counts in history["counts"]])}


def _asks_for_errors(problem: SampleProblem) -> bool:
    """True for labelled samples of a task that asks for errors of single experts."""
    asked = problem.tokens_choose and problem.loss.labelled and OWN_ERROR in problem.task.columns
    return asked and problem.model.responses is not None


LONE_EXPERTS = Probe(SampleProblem, applies=_asks_for_errors, evaluate=_alone, offline=_errors)
GROUP_HIT = Probe(SampleProblem, applies=lambda problem: problem.tokens_choose, offline=_hits)
