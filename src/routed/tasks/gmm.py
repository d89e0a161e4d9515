"""Mixtures of spherical Gaussians with a constant or a linear target per cluster (Dikkala et al. 2023, 3.1-3.2).

Our additions: clusters in groups, clusters far from the origin, clusters of unequal size in training, and noise in the
training targets.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, Scalar
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.settings.setting import Setting, at_least, refuse, within
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of, posterior, separated

#: With `data.groups`: the distance of groups in units of the distance of clusters within a group, and the share of a
#: target's variance that its group has.
SPREAD, SHARED = 3.0, 0.9


class Draws(NamedTuple):
    """Samples without the centres of their clusters."""

    cluster: Int[Array, " T"]
    noise: Float[Array, "T D"]
    error: Float[Array, "T O"] | None = None  # N(0, I), of training samples with data.label_noise


class Fixed(NamedTuple):
    """Centres at separation 1, and a target per cluster."""

    centres: Float[Array, "C D"]
    targets: Float[Array, "C P"]  # constant: P = O, the vector; linear: P = signal dimensions, the weights


def fixed(keys: Key[Array, " n"], data) -> Fixed:
    """Draws centres, which are 0 in the spurious dimensions, and N(0, I) targets.

    A linear target has weights N(0, I / dim), so that y has variance |w|^2, about 1.
    """
    around = SPREAD * _of_groups(keys[0], data.dim, data) if data.groups else 0.0
    centres = separated(keys[0], data.clusters, data.dim, around)
    centres = jnp.pad(centres, ((0, 0), (0, data.spurious_dims)))
    if data.target == "linear":
        return Fixed(centres, _targets(keys[1], data.dim, data) / jnp.sqrt(data.dim))
    return Fixed(centres, _targets(keys[1], data.target_dim, data))


def _targets(key: PRNGKeyArray, size: int, data) -> Float[Array, "C P"]:
    """Draws N(0, I) vectors; with groups sqrt(SHARED) of the group's vector plus sqrt(1 - SHARED) of the cluster's."""
    of_clusters = jax.random.normal(key, (data.clusters, size))
    if not data.groups:
        return of_clusters
    return jnp.sqrt(SHARED) * _of_groups(key, size, data) + jnp.sqrt(1 - SHARED) * of_clusters


def _of_groups(key: PRNGKeyArray, size: int, data) -> Float[Array, "C P"]:
    """Draws an N(0, I) vector for each group, and returns the vector of each cluster's group, c mod data.groups."""
    drawn = jax.random.normal(jax.random.fold_in(key, 1), (data.groups, size))
    return drawn[jnp.arange(data.clusters) % data.groups]


def frequencies(data) -> Float[Array, " C"]:
    """Returns the probabilities of clusters in training: proportional to (c + 1) ** -data.imbalance (Zipf)."""
    weight = (1.0 + jnp.arange(data.clusters)) ** -data.imbalance
    return weight / weight.sum()


def draw(fixed: Fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Draws clusters and N(0, I) noise; imbalance and label noise are for training samples only.

    Test samples have no `cluster_key`.
    """
    cluster, error = clusters_of(cluster_key, (size,), data.clusters), None
    if cluster_key is not None and data.imbalance:
        cluster = jax.random.choice(cluster_key, data.clusters, (size,), p=frequencies(data))
    if cluster_key is not None and data.label_noise:
        error = jax.random.normal(jax.random.fold_in(noise_key, 1), (size, _outputs(data)))
    return Draws(cluster, jax.random.normal(noise_key, (size, data.dim + data.spurious_dims)), error)


def batch(world: World, draws: Draws, data) -> Batch:
    """Computes x = mu_c + noise + offset, and y = v_c, w_c^T (x - mu_c) or x, plus the label noise of training."""
    x = world.fixed.centres[draws.cluster] * data.separation + draws.noise + data.offset
    target = world.fixed.targets[draws.cluster]
    if data.target == "linear":
        target = (target * draws.noise[:, : target.shape[1]]).sum(-1, keepdims=True)
    y = x if data.target == "input" else target
    return Batch(x=x, y=y if draws.error is None else y + data.label_noise * draws.error, cluster=draws.cluster)


def bayes(world: World, batch: Batch, data) -> Float[Array, "T O"]:
    """Computes E[y|x] = sum_c p(c|x) y_c(x)."""
    if data.target == "input":
        return batch.x
    centres, targets = world.fixed.centres * data.separation, world.fixed.targets
    x = batch.x - data.offset
    likely = posterior(x, centres)
    if data.target == "constant":
        return likely @ targets
    signal = centres.shape[1] - data.spurious_dims
    per_cluster = x[:, :signal] @ targets.T - (centres[:, :signal] * targets).sum(-1)[None]
    return (likely * per_cluster).sum(-1, keepdims=True)


def variance(world: World, data) -> Scalar:
    """Computes the variance of the target.

    constant: mean_c |v_c - mean v|^2; linear: mean_c |w_c|^2, since y = w_c^T noise has mean 0; input: the variance of
    x.
    """
    centres, targets = world.fixed
    if data.target == "linear":
        return (targets**2).sum(-1).mean()
    if data.target == "input":
        return _spread(centres * data.separation) + centres.shape[1]
    return _spread(targets)


def _spread(points: Float[Array, "C P"]) -> Scalar:
    """Computes the mean squared distance of points from their mean."""
    return ((points - points.mean(0, keepdims=True)) ** 2).sum(-1).mean()


def _outputs(data) -> int:
    return {"constant": data.target_dim, "linear": 1, "input": data.dim + data.spurious_dims}[data.target]


def _check(config: ConfigDict) -> None:
    if config.data.groups > config.data.clusters:
        refuse("data.groups", config.data.groups, f"must be at most data.clusters={config.data.clusters}")


TASK = Task(
    tokens="rows",
    targets={"constant": "vector", "linear": "vector", "input": "input"},
    fixed=fixed,
    draw=draw,
    batch=batch,
    bayes=bayes,
    dims=lambda data: data.dim + data.spurious_dims,
    signal=lambda data: data.dim,
    outputs=_outputs,
    variance=variance,
    reads=("clusters", "dim", "separation"),
    settings={
        "spurious_dims": Setting(0, "further dimensions, the same for every cluster", at_least(0)),
        "offset": Setting(
            0.0, "added to every dimension of every input, as hidden states have a mean", within(-1e6, 1e6), traced=True
        ),
        "groups": Setting(
            0,
            "groups that clusters are in: centres lie around those of their groups, three times as far apart, and .9 "
            "of a target's variance is its group's; 0: none",
            at_least(0),
        ),
        "imbalance": Setting(
            0.0, "a: cluster c has a share of training samples proportional to (c + 1)^-a (Zipf)", within(0.0, 10.0)
        ),
        "label_noise": Setting(
            0.0, "standard deviation of what is added to each output of a training sample's target", at_least(0)
        ),
    },
    check=_check,
)
