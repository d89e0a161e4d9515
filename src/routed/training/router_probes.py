"""Probes of the router on test samples whose clusters are known, and churn between evaluations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from routed.contracts import AT_LEAST_0, AT_LEAST_1, FROM_MINUS_1_TO_1, SHARE, Column
from routed.metrics import agreement, entropies, router
from routed.models.single_layer import SITE, sharpness
from routed.training.probes import Evaluation, Probe
from routed.training.problem import Problem
from routed.training.sample_problem import SampleProblem

#: The bounds of an effective number of experts.
ONE_TO_ALL: dict[str, float | str] = {"one expert": 1.0, "all experts": "experts.count"}

#: The column of a router's agreement with a grouping of the clusters, which a task names among its `columns`.
AMI_BY = "router/ami_by_"


def _clusters(evaluation: Evaluation) -> dict[str, Array]:
    """Returns entropies, load and agreement with clusters, and the arrays of choices and of clusters' sums."""
    gate = evaluation.gate
    sums = router.cluster_sums(gate)
    columns = {f"router/{name}": value for name, value in router.cluster_columns(gate, sums).items()}
    return columns | {
        "choices": gate.choices[: router.PROBE],
        "counts": jnp.round(sums.assigned),
        "probs": sums.probs / sums.probs.sum(-1, keepdims=True),  # of choices a token may have none
    }


def _clusters_offline(problem: SampleProblem, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the agreement of choices with clusters (scikit-learn), and churn."""
    moments = [agreement.agreement(counts) for counts in history["counts"]]
    columns = {name: np.array([moment[name] for moment in moments]) for name in moments[0]}
    return {f"router/{name}": values for name, values in (columns | agreement.churns(history["choices"])).items()}


def _shuffled(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the mean sparsity of the same weights on permuted input features."""
    problem, params, state, gate = evaluation.problem, evaluation.params, evaluation.state, evaluation.gate

    def score(x):
        return problem.model.scores(params, state, SITE, x[None], evaluation.batch, evaluation.step)[0]

    key, draws = evaluation.inputs.keys["noise"], problem.config.shuffles
    values = entropies.shuffled_sparsity(score, evaluation.batch.tokens, gate.label, gate.labels, key, draws)
    return {"router/sparsity_shuffled": values.mean()}


def _groupings(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the sparsity for coarser clusters, and the arrays of their counts."""
    gate, columns = evaluation.gate, {}
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
    params, sharp = evaluation.params["router"], sharpness(evaluation.state)
    columns = router.weight_columns(params, signal, task.dims(data), sharp)
    return {f"router/{name}": value for name, value in columns.items()}


def _tokens_choose(problem: SampleProblem) -> bool:
    return problem.tokens_choose


#: The columns `router/`, of all problems: each computes those that it can.
COLUMNS = Probe(
    Problem,
    columns={
        "router/sparsity": Column(
            "sparsity: effective experts per cluster",
            "Mean over clusters (of text: languages), by their tokens, of exp H(expert | cluster): how many experts"
            " share a cluster's tokens. 1: one expert each; E: routing ignores clusters.",
            AT_LEAST_1,
            log=True,
            references=ONE_TO_ALL,
        ),
        "router/sparsity_exp_mean": Column(
            "exp of the mean entropy of a cluster's experts",
            "exp of the mean over clusters of H(expert | cluster), beside the mean of exps.",
            AT_LEAST_1,
            log=True,
        ),
        "router/sparsity_shuffled": Column(
            "sparsity of the shuffled router",
            "The sparsity of the same weights when the input features are permuted: what a router without"
            " knowledge of the inputs shows. Mean of several permutations.",
            AT_LEAST_1,
            log=True,
            references=ONE_TO_ALL,
        ),
        "router/hard_sparsity": Column(
            "effective experts per cluster, hard choices",
            "Sparsity of the choices made, not of the probabilities: effective experts that a cluster's tokens go to.",
            AT_LEAST_1,
            log=True,
        ),
        "router/experts_used": Column(
            "experts used over all samples",
            "exp of the entropy of the mean probabilities: experts in effective use over all samples.",
            AT_LEAST_1,
            log=True,
        ),
        "router/signal_share": Column(
            "share of squared norm on\nthe informative dimensions",
            "Share of the squared norm of the router's first weights on dimensions that tell clusters apart.",
            SHARE,
            higher_is_better=True,
        ),
        "router/norm_ratio": Column(
            "norm ratio E|w|² / (E|w|)²",
            "Mean squared norm of the router's rows over the squared mean norm: 1 where all are equally long.",
            AT_LEAST_1,
        ),
        "router/norm_mean": Column(
            "mean norm of a router row", "Mean length of router rows, times what multiplies scores.", AT_LEAST_0
        ),
        "router/ami": Column(
            "adjusted mutual information\nof experts and clusters",
            "Specialisation: how much the chosen expert tells of the cluster, corrected for chance. 1:"
            " experts and clusters are the same partition; about 0: unrelated; below 0: less than chance.",
            FROM_MINUS_1_TO_1,
            higher_is_better=True,
        ),
        "router/homogeneity": Column(
            "homogeneity of experts (1 = one cluster each)",
            "1 - H(cluster | expert) / H(cluster): 1 where no expert mixes clusters. Not corrected for chance.",
            SHARE,
            higher_is_better=True,
        ),
        "router/dead": Column(
            "share of dead experts",
            "Share of experts with less than 1 % of a fair load (1 / E); undefined below 100 E tokens.",
            SHARE,
        ),
        "router/churn": Column(
            "churn in the last evaluation interval",
            "Share of the choices on a fixed set of tokens that are others than at the evaluation before.",
            SHARE,
        ),
        "router/churn_to_final": Column(
            "churn from here to the end", "Share of choices of fixed tokens that differ from those at the end.", SHARE
        ),
        "router/load_max": Column(
            "largest load (1 = balanced)",
            "E times the largest share of the assignments that one expert gets: 1 is balanced, E is collapse onto one.",
            AT_LEAST_1,
        ),
        "router/chosen": Column(
            "experts chosen per test token", "Mean number of experts that a token chooses (ReLU gates).", AT_LEAST_0
        ),
        "router/dropped": Column(
            "share of assignments dropped", "Share of assignments without a place in their expert's queue.", SHARE
        ),
        "router/entropy_token": Column(
            "entropy of a token's gate (nats)",
            "Mean over tokens of the entropy of the probabilities: 0 is a sharp gate, log E a uniform one.",
            AT_LEAST_0,
        ),
        "router/entropy_cluster": Column(
            "entropy of a cluster's experts (nats)", "Entropy of a cluster's mean probabilities.", AT_LEAST_0
        ),
        "router/entropy_load": Column(
            "entropy of the load (nats)",
            "Entropy of the mean probabilities over all tokens: log E where all experts are used equally.",
            AT_LEAST_0,
        ),
        "router/hard_entropy_load": Column(
            "entropy of the load of hard choices (nats)",
            "Entropy of the experts' shares: log E where balanced.",
            AT_LEAST_0,
        ),
        "router/all_clusters_with_specialists": Column(
            "share of runs in which\nevery cluster has specialists",
            "Share of runs in which every cluster has specialists: 90 % of its tokens go to experts 90 % of"
            " whose tokens are its own.",
            SHARE,
            higher_is_better=True,
        ),
        "router/clusters_with_specialists": Column(
            "share of clusters with specialists",
            "Share of the clusters 90 % of whose tokens go to experts 90 % of whose tokens are of that cluster.",
            SHARE,
            higher_is_better=True,
        ),
        "router/init_clusters_covered": Column(
            "share of runs in which rows from examples\nwould come from every cluster",
            "Share of runs in which E random examples would come from every cluster (coupon collector).",
            SHARE,
        ),
        "router/params_changed": Column(
            "share of runs whose router moved",
            "1 in a run whose router parameters differ from step 0 in any bit; a frozen arm has 0, or fails.",
            SHARE,
        ),
        "router/spurious_ratio": Column(
            "norm on the spurious dimensions\nover norm on the others",
            "Norm of the router's weights on dimensions that say nothing, over that on the others.",
            AT_LEAST_0,
            log=True,
        ),
        "router/dispatch_entropy": Column(
            "dispatch entropy H(cluster | expert),\ntest samples (nats)",
            "H(cluster | expert) over test samples: 0 where every expert serves one cluster.",
            AT_LEAST_0,
        ),
    },
)
CLUSTERS = Probe(SampleProblem, applies=_tokens_choose, evaluate=_clusters, offline=_clusters_offline)
SHUFFLED = Probe(
    SampleProblem, applies=lambda problem: problem.tokens_choose and problem.config.shuffles > 0, evaluate=_shuffled
)
GROUPINGS = Probe(SampleProblem, applies=_tokens_choose, evaluate=_groupings, offline=_groupings_offline)
WEIGHTS = Probe(SampleProblem, applies=_tokens_choose, evaluate=_weights)
