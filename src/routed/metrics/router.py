"""Metrics of one layer's router at an evaluation: the table of users' metrics, and what probes compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Scalar

from routed.contracts import Column, Routing, SoftRouting, UserError
from routed.contracts.ties import highest
from routed.metrics import agreement, entropies, load


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


def own_columns(gate: MetricInputs) -> dict[str, Array]:
    """Returns the columns of the table METRICS.

    Raises:
      UserError: one is no single number.
    """
    columns = {name: metric.value(gate) for name, metric in METRICS.items()}
    for name, value in columns.items():
        if (shape := jnp.shape(value)) != ():
            raise UserError(f"metric {name!r} returns {list(shape)}; it must return one number, such as a mean")
    return columns


#: Test tokens whose choices are kept at every evaluation, for churn.
PROBE = 1024


def chosen(routing: Routing | SoftRouting) -> Int[Array, "T k"]:
    """Returns the experts of each token; of soft routing the expert with the largest score.

    Lists of all experts hold -1 for experts that a token did not choose.
    """
    if isinstance(routing, SoftRouting):
        return highest(routing.scores, 1)
    expert = routing.expert if routing.chosen is None else jnp.where(routing.chosen, routing.expert, -1)
    return expert.reshape(len(routing.scores), -1)


def dispatched(routing: Routing | SoftRouting, label: Int[Array, " T"], labels: int) -> Float[Array, "labels E"]:
    """Counts the assignments of each cluster to each expert, in any order of the assignments."""
    if isinstance(routing, SoftRouting):
        expert = chosen(routing)[:, 0]
    else:
        expert = routing.expert if routing.chosen is None else jnp.where(routing.chosen, routing.expert, -1)
        label = label[routing.token]
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
    return columns | {
        "hard_sparsity": hard["sparsity"],
        "hard_entropy_load": hard["entropy_load"],
        "experts_used": jnp.exp(columns["entropy_load"]),
        "dispatch_entropy": entropies.dispatch_entropy(sums.choices),
        "clusters_with_specialists": covered.mean(),
        "all_clusters_with_specialists": covered.all().astype(jnp.float32),
        "dropped": load.dropped(gate.routing),
    }


def norm_ratio(kernel: Float[Array, "D E"]) -> Scalar:
    """Returns E_e|w_e|^2 / (E_e|w_e|)^2 over the experts' router weights: 1 for equal norms, E for one non-zero norm.

    Dikkala et al. (2023), C.1. A fresh Gaussian router in D dimensions already has 1 + 1/(2 D) or so.
    """
    norms = jnp.linalg.norm(kernel, axis=0)
    return (norms**2).mean() / norms.mean() ** 2


def first_layer(params) -> Float[Array, "D H"] | None:
    """Returns the weights of a router's first layer, hidden or of scores; None: the router has no such weights."""
    hidden = params.get("features", {})
    for weights in (hidden.get("Dense_0", {}), hidden, {} if hidden else params):
        if "kernel" in weights:
            return weights["kernel"]
    return None


def signal_share(kernel: Float[Array, "D E"], signal: int) -> Scalar:
    """Returns the share of the squared norm on the first `signal` input dimensions (Dikkala et al. 2023, 3.1)."""
    return (kernel[:signal] ** 2).sum() / (kernel**2).sum()


def weight_columns(params: Any, signal: int | None, dims: int, sharpness: Scalar | float) -> dict[str, Array]:
    """Returns the norms of a router's weights, times the `sharpness` that multiplies its scores.

    `signal` is the number of informative dimensions of the `dims` of an input; None: unknown.
    """
    columns, first = {}, first_layer(params)
    if signal is not None and first is not None and len(first) == dims:  # not a convolution's weights of a window
        columns["signal_share"] = signal_share(first, signal)
        columns["spurious_ratio"] = jnp.linalg.norm(first[signal:]) / jnp.linalg.norm(first[:signal])
    if (kernel := params.get("kernel")) is not None:
        columns["norm_ratio"] = norm_ratio(kernel)
        columns["norm_mean"] = sharpness * jnp.linalg.norm(kernel, axis=0).mean()
    return columns
