"""Mixtures of spherical Gaussians with a constant or a linear target per cluster (Dikkala et al. 2023, 3.1-3.2)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, Scalar

from routed.contracts import Batch
from routed.settings.setting import Setting, at_least
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of, posterior, separated


class Draws(NamedTuple):
    """Samples before the cluster centres are added."""

    cluster: Int[Array, " T"]
    noise: Float[Array, "T D"]


class Fixed(NamedTuple):
    """Centres at separation 1, and a target per cluster."""

    centres: Float[Array, "C D"]
    targets: Float[Array, "C P"]  # constant: P = O, the vector; linear: P = signal dimensions, the weights


def fixed(keys: Key[Array, " n"], data) -> Fixed:
    """Centres (0 in the spurious dimensions), and N(0, I) targets (linear: N(0, I/dim), so that y has variance |w|^2 ~ 1)."""
    centres = separated(keys[0], data.clusters, data.dim)
    centres = jnp.pad(centres, ((0, 0), (0, data.spurious_dims)))
    if data.target == "linear":
        return Fixed(centres, jax.random.normal(keys[1], (data.clusters, data.dim)) / jnp.sqrt(data.dim))
    return Fixed(centres, jax.random.normal(keys[1], (data.clusters, data.target_dim)))


def draw(fixed: Fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Clusters and N(0, I) noise."""
    del fixed
    return Draws(
        cluster=clusters_of(cluster_key, (size,), data.clusters),
        noise=jax.random.normal(noise_key, (size, data.dim + data.spurious_dims)),
    )


def batch(world: World, draws: Draws, data) -> Batch:
    """x = mu_c + noise; y = v_c, or w_c^T (x - mu_c), or x itself."""
    x = world.fixed.centres[draws.cluster] * data.separation + draws.noise
    target = world.fixed.targets[draws.cluster]
    if data.target == "linear":
        target = (target * draws.noise[:, : target.shape[1]]).sum(-1, keepdims=True)
    return Batch(x=x, y=x if data.target == "input" else target, cluster=draws.cluster)


def bayes(world: World, batch: Batch, data) -> Float[Array, "T O"]:
    """E[y|x] in closed form: sum_c p(c|x) y_c(x)."""
    if data.target == "input":
        return batch.x
    centres, targets = world.fixed.centres * data.separation, world.fixed.targets
    likely = posterior(batch.x, centres)
    if data.target == "constant":
        return likely @ targets
    signal = centres.shape[1] - data.spurious_dims
    per_cluster = batch.x[:, :signal] @ targets.T - (centres[:, :signal] * targets).sum(-1)[None]
    return (likely * per_cluster).sum(-1, keepdims=True)


def variance(world: World, data) -> Scalar:
    """constant: mean_c |v_c - mean v|^2; linear: mean_c |w_c|^2, as y = w_c^T noise has mean 0; input: that of x."""
    centres, targets = world.fixed
    if data.target == "linear":
        return (targets**2).sum(-1).mean()
    if data.target == "input":
        return _spread(centres * data.separation) + centres.shape[1]
    return _spread(targets)


def _spread(points: Float[Array, "C P"]) -> Scalar:
    """Mean squared distance from their mean."""
    return ((points - points.mean(0, keepdims=True)) ** 2).sum(-1).mean()


def _outputs(data) -> int:
    whole = data.dim + data.spurious_dims
    return {"constant": data.target_dim, "linear": 1, "input": whole}[data.target]


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
    settings={"spurious_dims": Setting(0, "further dimensions, the same for every cluster", at_least(0))},
)
