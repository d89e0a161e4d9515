"""Worlds, and batches made of them: a world is drawn once per seed.

A traced setting (separation, number of samples) is applied when a batch is made. So all points and arms of a seed share
a world (except for Chen's patches), and 1,000 training samples are the first 1,000 of 10,000.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar

from routed.contracts import Batch
from routed.tasks.task import Task, World


def draw_world(task: Task, key: PRNGKeyArray, data, pool: int) -> World:
    """Draws a world whose training pool holds `pool` samples. The key is consumed."""
    keys = jax.random.split(key, 5)
    fixed = task.fixed(keys[:2], data)
    return World(
        fixed=fixed,
        train=task.draw(fixed, keys[2], keys[3], pool, data),
        test=task.draw(fixed, None, keys[4], data.test_samples, data),
    )


def train_batch(
    task: Task, world: World, order: PRNGKeyArray, size: int, data, step: Int[Array, ""] | int = 0
) -> Batch:
    """Returns the `size` training samples of a step, by `data.fresh`, `data.full_batch` and `data.epochs`.

    `order` is the key of all steps. Default: drawn with replacement from the first `data.samples` of the pool. fresh:
    new samples. whole: the first `size` samples of the pool, in order (gradient descent on all samples). epochs: the
    next `size` samples of a random order of all samples, with a new order in each epoch of data.samples / size steps.
    The world is the world of the step (`Task.at`).
    """
    world = task.at(world, step, data)
    if data.epochs:
        epoch, step_of_epoch = jnp.divmod(step, data.samples // size)
        pool = len(jax.tree.leaves(world.train)[0])
        shuffled = shuffle(jax.random.fold_in(order, epoch), pool, data.samples)
        index = jax.lax.dynamic_slice(shuffled, (step_of_epoch * size,), (size,))
        return task.batch(world, jax.tree.map(lambda a: a[index], world.train), data)
    key = jax.random.fold_in(order, step)
    if data.fresh:
        cluster_key, noise_key = jax.random.split(key)
        return task.batch(world, task.draw(world.fixed, cluster_key, noise_key, size, data), data)
    if data.full_batch:
        return task.batch(world, jax.tree.map(lambda a: a[:size], world.train), data)
    index = jax.random.randint(key, (size,), 0, data.samples)
    return task.batch(world, jax.tree.map(lambda a: a[index], world.train), data)


def shuffle(key: PRNGKeyArray, pool: int, count) -> Int[Array, " pool"]:
    """Returns the numbers below `count` in random order, then padding; `count` may be traced. The key is consumed.

    The order does not depend on the pool. Random bits above each number and one sort: an argsort takes five times as
    long (pool of 1,000 on CPU: .27 against .05 ms).
    """
    number, last = jnp.arange(pool, dtype=jnp.uint32), jnp.asarray(count - 1, jnp.uint32)
    below = (jnp.uint32(1) << (32 - jax.lax.clz(last))) - 1  # the bits that a number below `count` needs
    drawn = (jax.random.bits(key, (pool,)) & ~below) | number
    return (jnp.sort(jnp.where(number < count, drawn, jnp.uint32(2**32 - 1))) & below).astype(jnp.int32)


def examples(task: Task, world: World, count: int, data) -> Batch:
    """Returns the first `count` training samples, which are a random subset."""
    index = jnp.arange(count) % data.samples
    return task.batch(world, jax.tree.map(lambda a: a[index], world.train), data)


def test_batch(task: Task, world: World, data) -> Batch:
    """Returns all test samples."""
    return task.batch(world, world.test, data)


def variance(task: Task, world: World, data) -> Scalar:
    """Computes E|y - E y|^2, the loss of the best constant predictor.

    Losses are divided by this number: 1 is trivial.
    """
    if task.variance is not None:
        return task.variance(world, data)
    y = test_batch(task, world, data).y
    return ((y - y.mean(0, keepdims=True)) ** 2).sum(-1).mean()


def clusters_of(key: PRNGKeyArray | None, shape: tuple[int, ...], clusters: int) -> Int[Array, "B ..."]:
    """Draws clusters at random; without a key clusters come in turn, each equally often."""
    if key is None:
        return (jnp.arange(shape[0]) % clusters).reshape(shape)
    return jax.random.randint(key, shape, 0, clusters)


def separated(
    key: PRNGKeyArray, count: int, dim: int, around: Float[Array, "C D"] | float = 0.0
) -> Float[Array, "C D"]:
    """Draws centres with separation 1: N(0, I) plus `around`, scaled so that the closest pair is sqrt(dim) apart."""
    centres = around + jax.random.normal(key, (count, dim))
    squared = ((centres[:, None] - centres[None]) ** 2).sum(-1)
    closest = jnp.sqrt(jnp.where(jnp.eye(count, dtype=bool), jnp.inf, squared).min())
    return centres * (jnp.sqrt(dim) / closest)


def posterior(x: Float[Array, "T D"], centres: Float[Array, "C D"], variance: float = 1.0) -> Float[Array, "T C"]:
    """Computes p(c|x) of equally likely spherical Gaussians: proportional to exp(-|x - mu_c|^2 / (2 variance))."""
    return jax.nn.softmax((x @ centres.T - 0.5 * (centres**2).sum(-1)[None]) / variance)
