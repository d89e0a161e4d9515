"""Single experts (Chen et al. 2022, Section 5): an ensemble without a router, and a probe of each expert by itself.

The ensemble trains each expert of a mixture alone on every sample; evaluation takes the mean.

A task asks for the errors by the column `theory/own_error`, and for the hits by the array `groups` [experts] of its
`watch`: the cluster that an expert's initial filters favour.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.experts import EXPERTS
from routed.kernels.ragged import alone
from routed.metrics.load import DEAD_SHARE
from routed.metrics.router import PROBE
from routed.models.model import Model, ModelPart, Outputs
from routed.models.single_layer import SITE
from routed.settings.tree import node_of
from routed.tasks import TASKS
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
    if (groups := history.get("groups")) is None:
        return {}
    errors = [group_errors(groups[0], 1 - right) for right in history["alone"]]
    return dict(zip((OWN_ERROR, OTHER_ERROR), np.array(errors).T, strict=True))


def _hits(problem: SampleProblem, history: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the share of live experts that serve their group's cluster, and where the samples of groups go."""
    if (groups := history.get("groups")) is None:
        return {}
    rules = {"group_hit": group_hit, "group_share": group_share, "group_gap": group_gap}
    return {
        f"router/{name}": np.array([rule(groups[0], counts) for counts in history["counts"]])
        for name, rule in rules.items()
    }


def group_hit(groups: np.ndarray, counts: np.ndarray) -> float:
    """Returns the share of live experts whose largest cluster is the one in `groups` [E], from counts [C, E].

    Live experts have at least 1 % of a fair load.
    """
    load = counts.sum(0)
    live = load >= DEAD_SHARE * load.mean()
    return float((counts.argmax(0) == groups)[live].mean())


def group_errors(groups: np.ndarray, errors: Float[np.ndarray, "C E"]) -> tuple[float, float]:
    """Returns the mean error of experts on their cluster in `groups` [E], and of their least errors elsewhere."""
    favoured = _members(groups, len(errors))
    return float(errors[favoured].mean()), float(np.where(favoured, np.inf, errors).min(0).mean())


def group_share(groups: np.ndarray, counts: np.ndarray) -> float:
    """Returns the share of samples that go to an expert of their group [E], from counts [C, E] (Theorem 4.2)."""
    return float(counts[_members(groups, len(counts))].sum() / counts.sum())


def group_gap(groups: np.ndarray, counts: np.ndarray) -> float:
    """Returns the mean of max |n_km - n_kn| / n_k over m, n in M_k, of the groups with two experts or more.

    n_km counts the samples of cluster k that expert m gets. Lemma E.16 bounds the difference in every group. 0 if no
    group has two experts.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    gaps = [
        np.ptp(share[members])
        for share, members in zip(shares, _members(groups, len(counts)), strict=True)
        if members.sum() > 1
    ]
    return float(np.mean(gaps)) if gaps else 0.0


def _members(groups: np.ndarray, clusters: int) -> np.ndarray:
    """Returns True where an expert is in the group of a cluster [C, E]."""
    return np.arange(clusters)[:, None] == groups[None]


def _asks_for_errors(problem: SampleProblem) -> bool:
    """True for labelled samples of a task that asks for errors of single experts."""
    asked = problem.tokens_choose and problem.loss.labelled and OWN_ERROR in problem.task.columns
    return asked and problem.model.responses is not None


LONE_EXPERTS = Probe(SampleProblem, applies=_asks_for_errors, evaluate=_alone, offline=_errors)
GROUP_HIT = Probe(SampleProblem, applies=lambda problem: problem.tokens_choose, offline=_hits)


def ensemble(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds the ensemble of E experts.

    Predictions in training are the outputs of all members, one member after another [E B, O]. At evaluation they are
    [B, O]: of classes the logarithm of the members' mean probability, of signs the mean output. The latter is a sum
    over patches, as Theorem 4.1 has it, if a member's output is. Members differ in their initial weights only:
    expert e starts as expert e of the mixture. The loss is the mean over members, so a member's gradient is 1 / E of
    the gradient of a single model; normalised gradients (`optimizer.normalise`) undo the factor.
    """
    count, task = config.experts.count, TASKS[config.data.name]
    classes = task.targets[config.data.target] == "class"
    member = EXPERTS[config.experts.name].make(node_of(config).experts, task.outputs(config.data))

    def init(key, batch):
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))
        return {"router": {}, "experts": jax.vmap(lambda k: member.init(k, batch.tokens[:1])["params"])(keys)}, {}

    def apply(params, state, batch, rule, dispatch, key=None, step=0):

        def logits_of(member_params):
            return alone(lambda params, x: member.apply({"params": params}, x), member_params, batch.tokens)

        logits = jax.lax.map(logits_of, params["experts"])
        if key is not None:
            return Outputs(logits.reshape(-1, logits.shape[-1]), {}, state)
        if not classes:
            return Outputs(logits.mean(0), {}, state)
        mean = jax.nn.logsumexp(jax.nn.log_softmax(logits), axis=0) - jnp.log(count)
        return Outputs(mean, {}, state)

    return Model(init, apply)


#: All experts compute every sample, each expert with its own loss.
ENSEMBLE = ModelPart(
    ensemble,
    every=True,
    targets=("class", "sign"),
    uses=("experts.name",),
    reads=("experts.count", "experts.learning_rate"),
)
