"""Probes of the router on test samples whose clusters are known, and churn between evaluations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from routed.metrics import agreement, entropies, router
from routed.models.single_layer import SITE, sharpness
from routed.training.probes import Evaluation, Probe
from routed.training.problem import Problem
from routed.training.sample_problem import SampleProblem

#: The column of a router's agreement with a grouping of the clusters, which a task names among its `columns`.
AMI_BY = "router/ami_by_"


def _clusters(evaluation: Evaluation) -> dict[str, Array]:
    """Returns entropies, load and agreement with clusters, and the arrays of choices and of clusters' sums."""
    gate = evaluation.gate
    assert gate is not None
    sums = router.cluster_sums(gate)
    columns = {f"router/{name}": value for name, value in router.cluster_columns(gate, sums).items()}
    return columns | {
        "choices": gate.choices[: router.PROBE],
        "counts": jnp.round(sums.assigned),
        "probs": sums.probs / sums.probs.sum(-1, keepdims=True),  # of choices a token may have none
    }


def _clusters_offline(problem: SampleProblem, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the agreement of choices with clusters (scikit-learn), and churn."""
    del problem
    moments = [agreement.agreement(counts) for counts in history["counts"]]
    columns = {name: np.array([moment[name] for moment in moments]) for name in moments[0]}
    return {f"router/{name}": values for name, values in (columns | agreement.churns(history["choices"])).items()}


def _shuffled(evaluation: Evaluation) -> dict[str, Array]:
    """Returns mean and deviation of the sparsity of the same weights on permuted input features."""
    problem, params, state, gate = evaluation.problem, evaluation.params, evaluation.state, evaluation.gate
    assert gate is not None

    def score(x):
        return problem.model.scores(params, state, SITE, x[None], evaluation.batch, evaluation.step)[0]

    key, draws = evaluation.inputs.keys["noise"], problem.config.shuffles
    values = entropies.shuffled_sparsity(score, evaluation.batch.tokens, gate.label, gate.labels, key, draws)
    return {"router/sparsity_shuffled": values.mean(), "router/sparsity_shuffled_std": values.std()}


def _groupings(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the sparsity for coarser clusters, and the arrays of their counts."""
    gate, columns = evaluation.gate, {}
    assert gate is not None
    sums = router.cluster_sums(gate)
    for name, members in evaluation.problem.task.groupings(evaluation.world, evaluation.inputs.config.data).items():
        columns[f"router/sparsity_by_{name}"] = entropies.split(members.T @ sums.probs, sums.token)["sparsity"]
        columns[f"counts_by_{name}"] = jnp.round(members.T @ sums.assigned)
    return columns


def _groupings_offline(problem: SampleProblem, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the agreement of choices with coarser clusters that do not overlap, which the task names."""
    groupings = [name.removeprefix(AMI_BY) for name in problem.task.columns if name.startswith(AMI_BY)]
    return {
        f"{AMI_BY}{name}": np.array([agreement.agreement(counts)["ami"] for counts in history[f"counts_by_{name}"]])
        for name in groupings
    }


def _weights(evaluation: Evaluation) -> dict[str, Array]:
    """Returns norms of the router's weights."""
    task, data = evaluation.problem.task, evaluation.inputs.config.data
    signal = None if task.signal is None else task.signal(data)
    columns = router.weight_columns(evaluation.params["router"], signal, sharpness(evaluation.state))
    return {f"router/{name}": value for name, value in columns.items()}


def _tokens_choose(problem: SampleProblem) -> bool:
    return problem.tokens_choose


#: The columns `router/`, of all problems: each computes those that it can.
COLUMNS = Probe(Problem, columns=router.COLUMNS)
CLUSTERS = Probe(SampleProblem, applies=_tokens_choose, evaluate=_clusters, offline=_clusters_offline)
SHUFFLED = Probe(
    SampleProblem, applies=lambda problem: problem.tokens_choose and problem.config.shuffles > 0, evaluate=_shuffled
)
GROUPINGS = Probe(SampleProblem, applies=_tokens_choose, evaluate=_groupings, offline=_groupings_offline)
WEIGHTS = Probe(SampleProblem, applies=_tokens_choose, evaluate=_weights)
