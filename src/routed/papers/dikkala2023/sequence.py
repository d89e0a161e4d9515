"""Sequences of tokens from a mixture of Gaussians, each token with a function of its cluster (Dikkala et al. 2023, C.2)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from routed.contracts import Batch
from routed.tasks.task import Task, World
from routed.tasks.worlds import posterior, separated


class Fixed(NamedTuple):
    """Centres at separation 1, and a weight vector for each."""

    centres: Float[Array, "C D"]
    weights: Float[Array, "C D"]


class Draws(NamedTuple):
    """Tokens before the centres are added; S tokens a sample."""

    cluster: Int[Array, "B S"]
    noise: Float[Array, "B S D"]


def fixed(keys: Key[Array, " n"], data) -> Fixed:
    """N(0, I/D) weights: a token's share of the label has a variance of about 1 from its noise."""
    weights = jax.random.normal(keys[1], (data.clusters, data.dim)) / jnp.sqrt(data.dim)
    return Fixed(separated(keys[0], data.clusters, data.dim), weights)


def draw(fixed: Fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Tokens are independent of each other; so test sequences are drawn too, with every cluster equally often over all."""
    del fixed
    shape = (size, data.positions)
    if cluster_key is None:
        order = jax.random.permutation(jax.random.fold_in(noise_key, 1), size * data.positions)
        cluster = (order % data.clusters).reshape(shape)
    else:
        cluster = jax.random.randint(cluster_key, shape, 0, data.clusters)
    return Draws(cluster, jax.random.normal(noise_key, (*shape, data.dim)))


def batch(world: World, draws: Draws, data) -> Batch:
    """y = sum_i w_{g_i}^T x_i, or the sum of its squares; g_i is the cluster of token i."""
    x = world.fixed.centres[draws.cluster] * data.separation + draws.noise
    products = (world.fixed.weights[draws.cluster] * x).sum(-1)
    y = products if data.target == "linear" else products**2
    return Batch(x=x, y=y.sum(-1, keepdims=True), cluster=draws.cluster)


def bayes(world: World, batch: Batch, data) -> Float[Array, "B O"]:
    """Sum over tokens of sum_c p(c|x_i) w_c^T x_i, or of its squares: given the cluster there is no noise left."""
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
    dims=lambda data: data.dim,
    signal=lambda data: data.dim,
    positions=lambda data: data.positions,
    reads=("clusters", "dim", "positions", "separation"),
)
