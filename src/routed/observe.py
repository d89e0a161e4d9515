"""What is seen of a router at an evaluation on samples whose clusters are known: every column of `router/`, and arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from routed import metrics
from routed.words import Batch, Routing, SoftRouting

#: Test tokens whose choices are kept at every evaluation, for churn.
PROBE = 1024


def chosen(routing: Routing | SoftRouting) -> Int[Array, "T k"]:
    """The experts of each token; of soft routing the one with the highest score."""
    if isinstance(routing, SoftRouting):
        return routing.scores.argmax(-1)[:, None]
    return routing.expert.reshape(len(routing.scores), -1)


def dispatched(routing: Routing | SoftRouting, label: Int[Array, " T"], labels: int) -> Float[Array, "labels E"]:
    """How many assignments of each cluster went to each expert."""
    hard = jax.nn.one_hot(chosen(routing), routing.scores.shape[-1]).sum(1)
    return metrics.cluster_sums(hard, label, labels)


def columns(
    routing: Routing | SoftRouting,
    params: Any,
    test: Batch,
    score: Callable[[Float[Array, "T ..."]], Float[Array, "T E"]],
    labels: int,
    groupings: dict[str, Float[Array, "labels groups"]],
    signal: int,
    key: PRNGKeyArray,
    shuffles: int,
) -> dict[str, Array]:
    """Entropies, load, agreement with the clusters, and what the weights look like.

    `params` are the router's, `score` is the router on tokens, `signal` the number of informative input dimensions. `choices`,
    `counts` and `probs` are arrays, for columns that need several evaluations or scikit-learn. The key is consumed.
    """
    label, scores, experts = test.label, routing.scores, routing.scores.shape[-1]
    choices = chosen(routing)
    probs, hard = jax.nn.softmax(scores), jax.nn.one_hot(choices, experts).mean(1)
    sums, counts = (metrics.cluster_sums(p, label, labels) for p in (probs, hard))
    soft_entropies, hard_entropies = (
        metrics.split(total, metrics.entropy(p).mean()) for total, p in ((sums, probs), (counts, hard))
    )
    seen = soft_entropies | {f"hard_{name}": value for name, value in hard_entropies.items()}
    seen |= metrics.load_summary(metrics.load(choices, experts), len(scores))
    seen |= {
        "experts_used": jnp.exp(soft_entropies["entropy_load"]),
        "dispatch_entropy": metrics.dispatch_entropy(counts),
        "covered": (covered := metrics.covered(counts)).mean(),
        "all_covered": covered.all().astype(jnp.float32),
        "dropped": metrics.dropped(routing),
    }
    if shuffles:
        shuffled = metrics.shuffled_sparsity(score, test.tokens, label, labels, key, shuffles)
        seen |= {"sparsity_shuffled": shuffled.mean(), "sparsity_shuffled_std": shuffled.std()}
    for name, members in groupings.items():
        seen[f"sparsity_by_{name}"] = metrics.split(members.T @ sums, soft_entropies["entropy_token"])["sparsity"]
    if (first := metrics.first_layer(params)) is not None:
        seen["signal_share"] = metrics.signal_share(first, signal)
        seen["spurious_norm"] = jnp.linalg.norm(first[signal:])
        seen["spurious_ratio"] = seen["spurious_norm"] / jnp.linalg.norm(first[:signal])
    if "kernel" in params:
        seen["norm_ratio"] = metrics.norm_ratio(params["kernel"])
        seen["norm_mean"] = jnp.linalg.norm(params["kernel"], axis=0).mean()
    return {f"router/{name}": value for name, value in seen.items()} | {
        "choices": choices[:PROBE],
        "counts": jnp.round(counts * choices.shape[1]),  # assignments
        "probs": sums / counts.sum(-1, keepdims=True),
    }
