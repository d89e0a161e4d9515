"""Sequences of tokens from a mixture of Gaussians, with a function for each cluster (Dikkala et al. 2023, C.2)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from routed.contracts import Batch
from routed.tasks.task import Task, World
from routed.tasks.worlds import posterior, separated


class Fixed(NamedTuple):
    """Centres at separation 1, and a weight vector of each centre."""

    centres: Float[Array, "C D"]
    weights: Float[Array, "C D"]


class Draws(NamedTuple):
    """Tokens before the centres are added; S tokens a sample."""

    cluster: Int[Array, "B S"]
    noise: Float[Array, "B S D"]


def fixed(keys: Key[Array, " n"], data) -> Fixed:
    """Draws weights N(0, I/D), so that the noise of a token adds a variance of about 1 to the label."""
    weights = jax.random.normal(keys[1], (data.clusters, data.dim)) / jnp.sqrt(data.dim)
    return Fixed(separated(keys[0], data.clusters, data.dim), weights)


def draw(fixed: Fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Draws independent tokens; test sequences contain every cluster equally often in total."""
    shape = (size, data.positions)
    if cluster_key is None:
        order = jax.random.permutation(jax.random.fold_in(noise_key, 1), size * data.positions)
        cluster = (order % data.clusters).reshape(shape)
    else:
        cluster = jax.random.randint(cluster_key, shape, 0, data.clusters)
    return Draws(cluster, jax.random.normal(noise_key, (*shape, data.dim)))


def batch(world: World, draws: Draws, data) -> Batch:
    """Returns y = sum_i w_{g_i}^T x_i, or the sum of squares; g_i is the cluster of token i."""
    x = world.fixed.centres[draws.cluster] * data.separation + draws.noise
    products = (world.fixed.weights[draws.cluster] * x).sum(-1)
    y = products if data.target == "linear" else products**2
    return Batch(x=x, y=y.sum(-1, keepdims=True), cluster=draws.cluster)


def bayes(world: World, batch: Batch, data) -> Float[Array, "B O"]:
    """Computes sum_i sum_c p(c|x_i) w_c^T x_i, or with squared products: given clusters, y has no noise."""
    likely = posterior(batch.tokens, world.fixed.centres * data.separation)
    products = batch.tokens @ world.fixed.weights.T
    each = (likely * (products if data.target == "linear" else products**2)).sum(-1)
    return each.reshape(batch.cluster.shape).sum(-1, keepdims=True)


TASK = Task(
    tokens="rows",
    targets={"linear": "vector", "quadratic": "vector"},
    fixed=fixed,
    draw=draw,
    batch=batch,
    bayes=bayes,
    signal=lambda data: data.dim,
    positions=lambda data: data.positions,
    reads=("clusters", "dim", "positions", "separation"),
)
