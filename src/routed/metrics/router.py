"""What is seen of a router at an evaluation on samples whose clusters are known: every column of `router/`, and arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar

from routed.contracts import AT_LEAST_0, AT_LEAST_1, AT_MOST_1, SHARE, Batch, Column, Routing, SoftRouting
from routed.contracts.ties import highest
from routed.metrics import agreement, entropies, load, weights


class MetricInputs(NamedTuple):
    """What a metric sees of a router at one evaluation: the router on all test tokens, and the clusters they came from."""

    routing: Routing | SoftRouting
    probs: Float[Array, "T E"]
    choices: Int[Array, "T k"]
    label: Int[Array, " T"]
    labels: int
    test: Batch
    params: Any


class Metric(NamedTuple):
    """A column of ours or of a user's file: its value at an evaluation on samples, and how it is shown."""

    value: Callable[[MetricInputs], Scalar]
    column: Column


#: Columns that are not computed below: name -> metric. A user's file adds to it.
METRICS: dict[str, Metric] = {}

#: What an effective number of experts lies between.
ONE_TO_ALL: dict[str, float | str] = {"one expert": 1.0, "all experts": "experts.count"}

#: How the columns below are shown, and those made of several evaluations (`training`).
COLUMNS: dict[str, Column] = {
    "router/sparsity": Column(
        "sparsity: effective experts per cluster",
        log=True,
        bounds=AT_LEAST_1,
        references=ONE_TO_ALL,
        definition="Mean over clusters (of text: languages) of exp H(expert | cluster): how many experts share a cluster's tokens. 1: one expert each; E: routing ignores clusters.",
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
        definition="The sparsity of the same weights when the input features are permuted: what a router without knowledge of the inputs shows. Mean of several permutations.",
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
        definition="Sparsity of the choices made, not of the probabilities: effective experts that a cluster's tokens go to.",
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
        definition="Specialisation: how much the chosen expert tells of the cluster, corrected for chance. 1: experts and clusters are the same partition; about 0: unrelated; below 0: less than chance.",
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
        definition="Share of the experts that get less than 1 % of a fair load (1 / E) of at least 100 E tokens; undefined with fewer tokens.",
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
        definition="E times the largest share of the assignments that one expert gets: 1 is balanced, E is collapse onto one.",
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
    "router/all_covered": Column(
        "share of runs in which\nevery cluster has specialists",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of runs in which every cluster has specialists: 90 % of its tokens go to experts 90 % of whose tokens are its own.",
    ),
    "router/covered": Column(
        "share of clusters with specialists",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of the clusters 90 % of whose tokens go to experts 90 % of whose tokens are of that cluster.",
    ),
    "router/rows_hit": Column(
        "share of runs in which rows from examples\nwould come from every cluster",
        bounds=SHARE,
        definition="Share of runs in which as many examples as experts, drawn at random, would come from every cluster (coupon collector).",
    ),
    "router/moved": Column(
        "share of runs whose router moved",
        bounds=SHARE,
        definition="1 in a run whose router parameters differ from step 0 in any bit: 0 for every frozen arm, or the run fails.",
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
    """The experts of each token, -1 in places of a whole list that were not chosen; of soft routing the one with the highest score."""
    if isinstance(routing, SoftRouting):
        return highest(routing.scores, 1)
    counted = load.asked(routing)
    expert = routing.expert if counted is None else jnp.where(counted, routing.expert, -1)
    return expert.reshape(len(routing.scores), -1)


def dispatched(routing: Routing | SoftRouting, label: Int[Array, " T"], labels: int) -> Float[Array, "labels E"]:
    """How many assignments of each cluster went to each expert, in whatever order they come: of expert choice, expert by expert."""
    if isinstance(routing, SoftRouting):
        expert = chosen(routing)[:, 0]
    else:
        expert, label = routing.expert, label[routing.token]
    return entropies.cluster_sums(jax.nn.one_hot(expert, routing.scores.shape[-1]), label, labels)


def columns(
    routing: Routing | SoftRouting,
    params: Any,
    test: Batch,
    score: Callable[[Float[Array, "T ..."]], Float[Array, "T E"]],
    labels: int,
    groupings: dict[str, Float[Array, "labels groups"]],
    signal: int | None,
    key: PRNGKeyArray,
    shuffles: int,
    sharpness: Scalar | float = 1.0,
) -> dict[str, Array]:
    """Entropies, load, agreement with the clusters, and what the weights look like.

    `params` are the router's, `score` is the router on tokens, `signal` the number of informative input dimensions (None: unknown). Norms are
    those of the weights times the `sharpness` that multiplies the scores. `choices`, `counts` and `probs` are arrays, for
    columns that need several evaluations or scikit-learn. The key is consumed.
    """
    label, scores, experts = test.label, routing.scores, routing.scores.shape[-1]
    choices = chosen(routing)
    probs, each = jax.nn.softmax(scores), jax.nn.one_hot(choices, experts)
    hard = each.mean(1) if choices.shape[1] < experts else each.sum(1) / jnp.maximum(each.sum((1, 2)), 1)[:, None]
    sums, counts = (entropies.cluster_sums(p, label, labels) for p in (probs, hard))
    assigned = counts * choices.shape[1]
    if choices.shape[1] == experts:
        assigned = entropies.cluster_sums(each.sum(1), label, labels)
    soft_entropies, hard_entropies = (
        entropies.split(total, entropies.entropy(p).mean()) for total, p in ((sums, probs), (counts, hard))
    )
    seen = soft_entropies | {f"hard_{name}": value for name, value in hard_entropies.items()}
    seen |= load.load_summary(load.load(choices, experts), len(scores))
    seen |= {
        "experts_used": jnp.exp(soft_entropies["entropy_load"]),
        "dispatch_entropy": entropies.dispatch_entropy(counts),
        "covered": (covered := agreement.covered(counts)).mean(),
        "all_covered": covered.all().astype(jnp.float32),
        "dropped": load.dropped(routing),
    }
    if choices.shape[1] == experts:
        seen["chosen"] = (choices >= 0).sum(1).mean()
    if shuffles:
        shuffled = entropies.shuffled_sparsity(score, test.tokens, label, labels, key, shuffles)
        seen |= {"sparsity_shuffled": shuffled.mean(), "sparsity_shuffled_std": shuffled.std()}
    for name, members in groupings.items():
        seen[f"sparsity_by_{name}"] = entropies.split(members.T @ sums, soft_entropies["entropy_token"])["sparsity"]
    if signal is not None and (first := weights.first_layer(params)) is not None:
        seen["signal_share"] = weights.signal_share(first, signal)
        seen["spurious_norm"] = sharpness * jnp.linalg.norm(first[signal:])
        seen["spurious_ratio"] = seen["spurious_norm"] / (sharpness * jnp.linalg.norm(first[:signal]))
    if "kernel" in params:
        seen["norm_ratio"] = weights.norm_ratio(params["kernel"])
        seen["norm_mean"] = sharpness * jnp.linalg.norm(params["kernel"], axis=0).mean()
    inputs = MetricInputs(routing, probs, choices, label, labels, test, params)
    further = {name: metric.value(inputs) for name, metric in METRICS.items()}
    return (
        {f"router/{name}": value for name, value in seen.items()}
        | further
        | {
            "choices": choices[:PROBE],
            "counts": jnp.round(assigned),
            "probs": sums / sums.sum(-1, keepdims=True),  # not over choices, of which a token may have none
        }
        | {f"counts_by_{name}": jnp.round(members.T @ assigned) for name, members in groupings.items()}
    )
