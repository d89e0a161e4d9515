"""Mixtures of spherical Gaussians with a constant or a linear target per cluster (Dikkala et al. 2023, 3.1-3.2).

What depends on a traced setting (separation, number of samples) is applied when a batch is made, so a world is shared by
all points and arms of a seed, and 1,000 training samples are the first 1,000 of 10,000.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar

from routed.words import Batch


class Draws(NamedTuple):
    """Samples before the cluster centres are added."""

    cluster: Int[Array, " T"]
    noise: Float[Array, "T D"]


class World(NamedTuple):
    """What was drawn once: centres at separation 1, a target per cluster, and the samples' noise."""

    centres: Float[Array, "C D"]
    targets: Float[Array, "C P"]  # constant: P = O, the vector; linear: P = signal dimensions, the weights
    train: Draws
    test: Draws


def world(key: PRNGKeyArray, data, pool: int) -> World:
    """Draws a world whose training pool holds `pool` samples. The key is consumed.

    Centres are N(0, I) draws, scaled so that the closest pair is sqrt(dim) apart (separation 1, sigma = 1); in the
    spurious dimensions all centres are 0. Targets are N(0, I) vectors (linear: N(0, I/dim), so that y has variance
    |w|^2 ~ 1). Test samples take every cluster equally often.
    """
    keys = jax.random.split(key, 5)
    k, d = data.clusters, data.dim
    centres = jax.random.normal(keys[0], (k, d))
    centres *= jnp.sqrt(d) / _closest_pair(centres)
    centres = jnp.pad(centres, ((0, 0), (0, data.spurious_dims)))
    if data.target == "constant":
        targets = jax.random.normal(keys[1], (k, data.target_dim))
    else:
        targets = jax.random.normal(keys[1], (k, d)) / jnp.sqrt(d)
    train = Draws(
        cluster=jax.random.randint(keys[2], (pool,), 0, k),
        noise=jax.random.normal(keys[3], (pool, centres.shape[1])),
    )
    test = Draws(
        cluster=jnp.arange(data.test_samples) % k,
        noise=jax.random.normal(keys[4], (data.test_samples, centres.shape[1])),
    )
    return World(centres=centres, targets=targets, train=train, test=test)


def train_batch(world: World, key: PRNGKeyArray, size: int, data, settings) -> Batch:
    """`size` training samples with replacement from the first `data.samples` of the pool. The key is consumed."""
    index = jax.random.randint(key, (size,), 0, settings["data.samples"])
    return _batch(world, Draws(cluster=world.train.cluster[index], noise=world.train.noise[index]), data, settings)


def examples(world: World, count: int, data, settings) -> Batch:
    """The first `count` training samples, which are as random as any."""
    index = jnp.arange(count) % settings["data.samples"]
    return _batch(world, Draws(cluster=world.train.cluster[index], noise=world.train.noise[index]), data, settings)


def fresh_batch(world: World, key: PRNGKeyArray, size: int, data, settings) -> Batch:
    """`size` samples that nobody has seen. The key is consumed."""
    kind, noise = jax.random.split(key)
    draws = Draws(
        cluster=jax.random.randint(kind, (size,), 0, data.clusters),
        noise=jax.random.normal(noise, (size, world.centres.shape[1])),
    )
    return _batch(world, draws, data, settings)


def test_batch(world: World, data, settings) -> Batch:
    """All test samples."""
    return _batch(world, world.test, data, settings)


def bayes(world: World, x: Float[Array, "T D"], data, settings) -> Float[Array, "T O"]:
    """E[y|x] in closed form: sum_c p(c|x) y_c(x), with p(c|x) proportional to exp(-|x - mu_c|^2 / 2)."""
    centres = world.centres * settings["data.separation"]
    logits = x @ centres.T - 0.5 * (centres**2).sum(-1)[None]
    posterior = jax.nn.softmax(logits)
    if data.target == "constant":
        return posterior @ world.targets
    signal = world.centres.shape[1] - data.spurious_dims
    per_cluster = x[:, :signal] @ world.targets.T - (centres[:, :signal] * world.targets).sum(-1)[None]
    return (posterior * per_cluster).sum(-1, keepdims=True)


def variance(world: World, data) -> Scalar:
    """E|y - E y|^2, the loss of the best constant predictor: losses are divided by it, so 1 is trivial.

    constant: mean_c |v_c - mean v|^2; linear: mean_c |w_c|^2, as y = w_c^T noise has mean 0.
    """
    if data.target == "constant":
        return ((world.targets - world.targets.mean(0, keepdims=True)) ** 2).sum(-1).mean()
    return (world.targets**2).sum(-1).mean()


def bytes_per_sample(data) -> int:
    """Bytes that one training sample takes in a world."""
    return 4 * (data.dim + data.spurious_dims + 1)


def _batch(world: World, draws: Draws, data, settings) -> Batch:
    x = world.centres[draws.cluster] * settings["data.separation"] + draws.noise
    target = world.targets[draws.cluster]
    if data.target == "linear":
        target = (target * draws.noise[:, : target.shape[1]]).sum(-1, keepdims=True)
    return Batch(x=x, y=target, cluster=draws.cluster)


def _closest_pair(points: Float[Array, "C D"]) -> Scalar:
    """Smallest distance between two of the points."""
    squared = ((points[:, None] - points[None]) ** 2).sum(-1)
    return jnp.sqrt(jnp.where(jnp.eye(len(points), dtype=bool), jnp.inf, squared).min())
