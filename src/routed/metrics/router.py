"""Metrics of one layer's router at an evaluation: the table of users' metrics, and the columns `router/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Scalar

from routed.contracts import AT_LEAST_0, AT_LEAST_1, AT_MOST_1, SHARE, Column, Routing, SoftRouting
from routed.contracts.ties import highest
from routed.metrics import agreement, entropies, load, weights


class MetricInputs(NamedTuple):
    """One layer's router on all tokens of an evaluation: test samples, or the validation rows of a text.

    `label` is the cluster of each token (of text its language), one of `labels`. `test` is the evaluated batch,
    `params` are the parameters of this layer's router. `real` is False for padding, whose choices are -1; None: there
    is no padding.
    """

    routing: Routing | SoftRouting
    probs: Float[Array, "T E"]
    choices: Int[Array, "T k"]
    label: Int[Array, " T"]
    labels: int
    test: Any
    params: Any
    real: Bool[Array, " T"] | None = None


class Metric(NamedTuple):
    """A column with one number for each layer that routes, and its computation."""

    value: Callable[[MetricInputs], Scalar]
    column: Column


#: name -> metric. The package fills it with none; a user's file adds to it, for samples and for text.
METRICS: dict[str, Metric] = {}

#: The bounds of an effective number of experts.
ONE_TO_ALL: dict[str, float | str] = {"one expert": 1.0, "all experts": "experts.count"}

#: The columns `router/` of any problem.
COLUMNS: dict[str, Column] = {
    "router/sparsity": Column(
        "sparsity: effective experts per cluster",
        log=True,
        bounds=AT_LEAST_1,
        references=ONE_TO_ALL,
        definition="Mean over clusters (of text: languages) of exp H(expert | cluster): how many experts share a"
        " cluster's tokens. 1: one expert each; E: routing ignores clusters.",
    ),
    "router/sparsity_exp_mean": Column(
        "exp of the mean entropy of a cluster's experts",
        log=True,
        bounds=AT_LEAST_1,
        definition="exp of the mean over clusters of H(expert | cluster), beside the mean of exps.",
    ),
    "router/sparsity_shuffled": Column(
        "sparsity of the shuffled router",
        log=True,
        bounds=AT_LEAST_1,
        references=ONE_TO_ALL,
        definition="The sparsity of the same weights when the input features are permuted: what a router without"
        " knowledge of the inputs shows. Mean of several permutations.",
    ),
    "router/sparsity_shuffled_std": Column(
        "deviation over shuffles of the router",
        bounds=AT_LEAST_0,
        definition="Standard deviation of that baseline over permutations.",
    ),
    "router/hard_sparsity": Column(
        "effective experts per cluster, hard choices",
        log=True,
        bounds=AT_LEAST_1,
        definition="Sparsity of the choices made, not of the probabilities: effective experts that a cluster's"
        " tokens go to.",
    ),
    "router/hard_sparsity_exp_mean": Column(
        "exp of the mean entropy, hard choices",
        log=True,
        bounds=AT_LEAST_1,
        definition="exp of the mean entropy of the choices of a cluster.",
    ),
    "router/experts_used": Column(
        "experts used over all samples",
        log=True,
        bounds=AT_LEAST_1,
        definition="exp of the entropy of the mean probabilities: experts in effective use over all samples.",
    ),
    "router/signal_share": Column(
        "share of squared norm on\nthe informative dimensions",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of the squared norm of the router's first weights on dimensions that tell clusters apart.",
    ),
    "router/norm_ratio": Column(
        "norm ratio E|w|² / (E|w|)²",
        bounds=AT_LEAST_1,
        definition="Mean squared norm of the router's rows over the squared mean norm: 1 where all are equally long.",
    ),
    "router/norm_mean": Column(
        "mean norm of a router row",
        bounds=AT_LEAST_0,
        definition="Mean length of the router's rows, times what multiplies its scores.",
    ),
    "router/ami": Column(
        "adjusted mutual information\nof experts and clusters",
        bounds=AT_MOST_1,
        higher_is_better=True,
        definition="Specialisation: how much the chosen expert tells of the cluster, corrected for chance. 1:"
        " experts and clusters are the same partition; about 0: unrelated; below 0: less than chance.",
    ),
    "router/homogeneity": Column(
        "homogeneity of experts (1 = one cluster each)",
        bounds=SHARE,
        higher_is_better=True,
        definition="1 - H(cluster | expert) / H(cluster): 1 where no expert mixes clusters. Not corrected for chance.",
    ),
    "router/dead": Column(
        "share of dead experts",
        bounds=SHARE,
        definition="Share of the experts that get less than 1 % of a fair load (1 / E) of at least 100 E tokens;"
        " undefined with fewer tokens.",
    ),
    "router/churn": Column(
        "churn in the last evaluation interval",
        bounds=SHARE,
        definition="Share of the choices on a fixed set of tokens that are others than at the evaluation before.",
    ),
    "router/churn_to_final": Column(
        "churn from here to the end",
        bounds=SHARE,
        definition="Share of the choices on a fixed set of tokens that are others than at the end of training.",
    ),
    "router/load_max": Column(
        "largest load (1 = balanced)",
        bounds=AT_LEAST_1,
        definition="E times the largest share of the assignments that one expert gets: 1 is balanced, E is collapse"
        " onto one.",
    ),
    "router/chosen": Column(
        "experts chosen per test token",
        bounds=AT_LEAST_0,
        definition="Experts that a test token chooses, where each may choose another number (ReLU gates).",
    ),
    "router/dropped": Column(
        "share of assignments dropped",
        bounds=SHARE,
        definition="Share of the assignments that found no place in their expert's queue.",
    ),
    "router/entropy_token": Column(
        "entropy of a token's gate (nats)",
        bounds=AT_LEAST_0,
        definition="Mean over tokens of the entropy of the probabilities: 0 is a sharp gate, log E a uniform one.",
    ),
    "router/entropy_cluster": Column(
        "entropy of a cluster's experts (nats)",
        bounds=AT_LEAST_0,
        definition="Mean over clusters of the entropy of a cluster's mean probabilities.",
    ),
    "router/entropy_load": Column(
        "entropy of the load (nats)",
        bounds=AT_LEAST_0,
        definition="Entropy of the mean probabilities over all tokens: log E where all experts are used equally.",
    ),
    "router/hard_entropy_token": Column(
        "entropy of a token's hard choices (nats)",
        bounds=AT_LEAST_0,
        definition="Entropy of the experts chosen for a token: 0 for top-1, log k for k of equal share.",
    ),
    "router/hard_entropy_cluster": Column(
        "entropy of a cluster's hard choices (nats)",
        bounds=AT_LEAST_0,
        definition="Mean over clusters of the entropy of the choices made for it.",
    ),
    "router/hard_entropy_load": Column(
        "entropy of the load of hard choices (nats)",
        bounds=AT_LEAST_0,
        definition="Entropy of the share of assignments of each expert: log E where balanced.",
    ),
    "router/all_clusters_with_specialists": Column(
        "share of runs in which\nevery cluster has specialists",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of runs in which every cluster has specialists: 90 % of its tokens go to experts 90 % of"
        " whose tokens are its own.",
    ),
    "router/clusters_with_specialists": Column(
        "share of clusters with specialists",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of the clusters 90 % of whose tokens go to experts 90 % of whose tokens are of that cluster.",
    ),
    "router/init_clusters_covered": Column(
        "share of runs in which rows from examples\nwould come from every cluster",
        bounds=SHARE,
        definition="Share of runs in which as many examples as experts, drawn at random, would come from every"
        " cluster (coupon collector).",
    ),
    "router/params_changed": Column(
        "share of runs whose router moved",
        bounds=SHARE,
        definition="1 in a run whose router parameters differ from step 0 in any bit: 0 for every frozen arm, or"
        " the run fails.",
    ),
    "router/spurious_ratio": Column(
        "norm on the spurious dimensions\nover norm on the others",
        log=True,
        bounds=AT_LEAST_0,
        definition="Norm of the router's weights on dimensions that say nothing, over that on the others.",
    ),
    "router/spurious_norm": Column(
        "norm on the spurious dimensions",
        log=True,
        bounds=AT_LEAST_0,
        definition="Norm of the router's weights on dimensions that say nothing.",
    ),
    "router/dispatch_entropy": Column(
        "dispatch entropy H(cluster | expert),\ntest samples (nats)",
        bounds=AT_LEAST_0,
        definition="H(cluster | expert) over test samples: 0 where every expert serves one cluster.",
    ),
}

#: Test tokens whose choices are kept at every evaluation, for churn.
PROBE = 1024


def chosen(routing: Routing | SoftRouting) -> Int[Array, "T k"]:
    """Returns the experts of each token; of soft routing the expert with the largest score.

    Lists of all experts hold -1 for experts that a token did not choose.
    """
    if isinstance(routing, SoftRouting):
        return highest(routing.scores, 1)
    counted = load.asked(routing)
    expert = routing.expert if counted is None else jnp.where(counted, routing.expert, -1)
    return expert.reshape(len(routing.scores), -1)


def dispatched(routing: Routing | SoftRouting, label: Int[Array, " T"], labels: int) -> Float[Array, "labels E"]:
    """Counts the assignments of each cluster to each expert, in any order of the assignments."""
    if isinstance(routing, SoftRouting):
        expert = chosen(routing)[:, 0]
    else:
        expert, label = routing.expert, label[routing.token]
    return entropies.cluster_sums(jax.nn.one_hot(expert, routing.scores.shape[-1]), label, labels)


def gate_of(
    routing: Routing | SoftRouting,
    label: Int[Array, " T"],
    labels: int,
    test: Any,
    params: Any,
    real: Bool[Array, " T"] | None = None,
) -> MetricInputs:
    """Returns the inputs of metrics for a routing."""
    choices = chosen(routing)
    if real is not None:
        choices = jnp.where(real[:, None], choices, -1)
    return MetricInputs(routing, jax.nn.softmax(routing.scores), choices, label, labels, test, params, real)


class ClusterSums(NamedTuple):
    """Sums over the tokens of each cluster: probabilities, hard choices (1 a token), and assignments."""

    probs: Float[Array, "C E"]
    choices: Float[Array, "C E"]
    assigned: Float[Array, "C E"]
    #: Mean entropy of a token's probabilities, and of its hard choices.
    token: Scalar
    hard_token: Scalar


def cluster_sums(gate: MetricInputs) -> ClusterSums:
    """Returns the sums over clusters of what a router gave to each expert."""
    experts, slots = gate.probs.shape[-1], gate.choices.shape[1]
    each = jax.nn.one_hot(gate.choices, experts)
    # A list of all experts holds -1 for the experts that a token did not choose.
    hard = each.mean(1) if slots < experts else each.sum(1) / jnp.maximum(each.sum((1, 2)), 1)[:, None]
    sums, counts = (entropies.cluster_sums(p, gate.label, gate.labels) for p in (gate.probs, hard))
    assigned = counts * slots
    if slots == experts:
        assigned = entropies.cluster_sums(each.sum(1), gate.label, gate.labels)
    token, hard_token = (entropies.entropy(p).mean() for p in (gate.probs, hard))
    return ClusterSums(sums, counts, assigned, token, hard_token)


def layer_columns(
    sums: Float[Array, "C E"],
    token: Scalar,
    choices: Int[Array, "T k"],
    share: Float[Array, " E"],
    tokens: Int[Array, ""] | int,
) -> dict[str, Array]:
    """Returns the entropies and the load of one layer, from the sums of probabilities and the mean entropy of a token.

    `share` is each expert's share of the assignments, `tokens` counts the tokens without padding.
    """
    columns = entropies.split(sums, token) | load.load_summary(share, tokens)
    if choices.shape[1] == len(share):
        columns["chosen"] = (choices >= 0).sum() / tokens
    return columns


def cluster_columns(gate: MetricInputs, sums: ClusterSums) -> dict[str, Array]:
    """Returns the columns of one layer that need clusters: entropies, load, and agreement with the clusters."""
    share = load.load(gate.choices, gate.probs.shape[-1])
    columns = layer_columns(sums.probs, sums.token, gate.choices, share, len(gate.probs))
    hard = entropies.split(sums.choices, sums.hard_token)
    covered = agreement.covered(sums.choices)
    return (
        columns
        | {f"hard_{name}": value for name, value in hard.items()}
        | {
            "experts_used": jnp.exp(columns["entropy_load"]),
            "dispatch_entropy": entropies.dispatch_entropy(sums.choices),
            "clusters_with_specialists": covered.mean(),
            "all_clusters_with_specialists": covered.all().astype(jnp.float32),
            "dropped": load.dropped(gate.routing),
        }
    )


def weight_columns(params: Any, signal: int | None, sharpness: Scalar | float) -> dict[str, Array]:
    """Returns the norms of a router's weights, times the `sharpness` that multiplies its scores.

    `signal` is the number of informative input dimensions; None: unknown.
    """
    columns = {}
    if signal is not None and (first := weights.first_layer(params)) is not None:
        columns["signal_share"] = weights.signal_share(first, signal)
        columns["spurious_norm"] = sharpness * jnp.linalg.norm(first[signal:])
        columns["spurious_ratio"] = columns["spurious_norm"] / (sharpness * jnp.linalg.norm(first[:signal]))
    if (kernel := params.get("kernel")) is not None:
        columns["norm_ratio"] = weights.norm_ratio(kernel)
        columns["norm_mean"] = sharpness * jnp.linalg.norm(kernel, axis=0).mean()
    return columns
