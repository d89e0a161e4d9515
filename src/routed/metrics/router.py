"""What is seen of a router at an evaluation on samples whose clusters are known: every column of `router/`, and arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar

from routed.contracts import AT_LEAST_0, AT_LEAST_1, AT_MOST_1, SHARE, Batch, Column, Routing, SoftRouting
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
        "sparsity: effective experts per cluster", log=True, bounds=AT_LEAST_1, references=ONE_TO_ALL
    ),
    "router/sparsity_exp_mean": Column("exp of the mean entropy of a cluster's experts", log=True, bounds=AT_LEAST_1),
    "router/sparsity_shuffled": Column(
        "sparsity of the shuffled router", log=True, bounds=AT_LEAST_1, references=ONE_TO_ALL
    ),
    "router/sparsity_shuffled_std": Column("deviation over shuffles of the router", bounds=AT_LEAST_0),
    "router/hard_sparsity": Column("effective experts per cluster, hard choices", log=True, bounds=AT_LEAST_1),
    "router/hard_sparsity_exp_mean": Column("exp of the mean entropy, hard choices", log=True, bounds=AT_LEAST_1),
    "router/experts_used": Column("experts used over all samples", log=True, bounds=AT_LEAST_1),
    "router/signal_share": Column(
        "share of squared norm on\nthe informative dimensions", bounds=SHARE, higher_is_better=True
    ),
    "router/norm_ratio": Column("norm ratio E|w|² / (E|w|)²", bounds=AT_LEAST_1),
    "router/norm_mean": Column("mean norm of a router row", bounds=AT_LEAST_0),
    "router/ami": Column(
        "adjusted mutual information\nof experts and clusters", bounds=AT_MOST_1, higher_is_better=True
    ),
    "router/homogeneity": Column("homogeneity of experts (1 = one cluster each)", bounds=SHARE, higher_is_better=True),
    "router/dead": Column("share of dead experts", bounds=SHARE),
    "router/churn": Column("churn in the last evaluation interval", bounds=SHARE),
    "router/churn_to_final": Column("churn from here to the end", bounds=SHARE),
    "router/load_max": Column("largest load (1 = balanced)", bounds=AT_LEAST_1),
    "router/dropped": Column("share of assignments dropped", bounds=SHARE),
    "router/entropy_token": Column("entropy of a token's gate (nats)", bounds=AT_LEAST_0),
    "router/entropy_cluster": Column("entropy of a cluster's experts (nats)", bounds=AT_LEAST_0),
    "router/entropy_load": Column("entropy of the load (nats)", bounds=AT_LEAST_0),
    "router/hard_entropy_token": Column("entropy of a token's hard choices (nats)", bounds=AT_LEAST_0),
    "router/hard_entropy_cluster": Column("entropy of a cluster's hard choices (nats)", bounds=AT_LEAST_0),
    "router/hard_entropy_load": Column("entropy of the load of hard choices (nats)", bounds=AT_LEAST_0),
    "router/all_covered": Column(
        "share of runs in which\nevery cluster has specialists", bounds=SHARE, higher_is_better=True
    ),
    "router/covered": Column("share of clusters with specialists", bounds=SHARE, higher_is_better=True),
    "router/rows_hit": Column("share of runs in which rows from examples\nwould come from every cluster", bounds=SHARE),
    "router/moved": Column("share of runs whose router moved", bounds=SHARE),
    "router/spurious_ratio": Column(
        "norm on the spurious dimensions\nover norm on the others", log=True, bounds=AT_LEAST_0
    ),
    "router/spurious_norm": Column("norm on the spurious dimensions", log=True, bounds=AT_LEAST_0),
    "router/dispatch_entropy": Column("dispatch entropy H(cluster | expert),\ntest samples (nats)", bounds=AT_LEAST_0),
}

#: Test tokens whose choices are kept at every evaluation, for churn.
PROBE = 1024


def chosen(routing: Routing | SoftRouting) -> Int[Array, "T k"]:
    """The experts of each token, where it has as many as any other; of soft routing the one with the highest score."""
    if isinstance(routing, SoftRouting):
        return routing.scores.argmax(-1)[:, None]
    return routing.expert.reshape(len(routing.scores), -1)


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
    probs, hard = jax.nn.softmax(scores), jax.nn.one_hot(choices, experts).mean(1)
    sums, counts = (entropies.cluster_sums(p, label, labels) for p in (probs, hard))
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
            "counts": jnp.round(counts * choices.shape[1]),  # assignments
            "probs": sums / counts.sum(-1, keepdims=True),
        }
        | {f"counts_by_{name}": jnp.round(members.T @ counts * choices.shape[1]) for name, members in groupings.items()}
    )
