"""What all tasks of samples share: a world is drawn once per seed, and batches are made of it.

What depends on a traced setting (separation, number of samples) is applied when a batch is made, so a world is shared by
all points and arms of a seed (but for patches), and 1,000 training samples are the first 1,000 of 10,000.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar

from routed.config import TRACED
from routed.words import Batch


class Task(NamedTuple):
    """A generator of samples, as pure functions of the config node `data`. Keys are consumed.

    fixed(keys [2], data) -> what is drawn once per seed (centres, targets);
    draw(fixed, kind, noise, size, data, settings) -> samples from a key for their clusters (None: test samples, every cluster
    equally often) and one for their noise; most leave it to `batch` to apply settings;
    batch(world, draws, data, settings) -> Batch; bayes(world, batch, data, settings) -> E[y|x], [T, O] (None: unknown);
    outputs(data), dims(data) -> numbers per sample; labels(data) -> clusters that routing is judged by; side(data) -> numbers of `Batch.side`;
    variance(world, data, settings) -> E|y - E y|^2 in closed form (None: estimated on the test samples);
    groupings(world, data) -> {name: [labels, groups] membership}, coarser clusters;
    given(data) -> arrays that all runs share, in `world.given` whenever a batch is made;
    watch(params, world, test, key) -> columns (and arrays) that say what was learned in the words of the task.
    """

    targets: tuple[str, ...]  # of data.target
    fixed: Callable[..., Any]
    draw: Callable[..., Any]
    batch: Callable[..., Batch]
    dims: Callable[[Any], int]
    bayes: Callable[..., Array] | None = None
    outputs: Callable[[Any], int] = lambda data: 1
    labels: Callable[[Any], int] = lambda data: data.clusters
    side: Callable[[Any], int] = lambda data: 0
    variance: Callable[..., Scalar] | None = None
    groupings: Callable[..., dict[str, Array]] = lambda world, data: {}
    given: Callable[[Any], Any] = lambda data: ()
    watch: Callable[..., dict[str, Array]] = lambda params, world, test, key: {}


class World(NamedTuple):
    """What was drawn once, the training and test samples, and arrays that all runs share."""

    fixed: Any
    train: Any
    test: Any
    given: Any = ()


def world(task: Task, key: PRNGKeyArray, data, pool: int, settings=None) -> World:
    """Draws a world whose training pool holds `pool` samples. The key is consumed."""
    keys = jax.random.split(key, 5)
    fixed = task.fixed(keys[:2], data)
    return World(
        fixed=fixed,
        train=task.draw(fixed, keys[2], keys[3], pool, data, settings),
        test=task.draw(fixed, None, keys[4], data.test_samples, data, settings),
    )


def train_batch(task: Task, world: World, key: PRNGKeyArray, size: int, data, settings) -> Batch:
    """`size` training samples with replacement from the first `data.samples` of the pool. The key is consumed."""
    index = jax.random.randint(key, (size,), 0, settings["data.samples"])
    return task.batch(world, jax.tree.map(lambda a: a[index], world.train), data, settings)


def all_batch(task: Task, world: World, key: PRNGKeyArray, size: int, data, settings) -> Batch:
    """The first `size` training samples, in order: gradient descent on all of them."""
    del key
    return task.batch(world, jax.tree.map(lambda a: a[:size], world.train), data, settings)


def examples(task: Task, world: World, count: int, data, settings) -> Batch:
    """The first `count` training samples, which are as random as any."""
    index = jnp.arange(count) % settings["data.samples"]
    return task.batch(world, jax.tree.map(lambda a: a[index], world.train), data, settings)


def fresh_batch(task: Task, world: World, key: PRNGKeyArray, size: int, data, settings) -> Batch:
    """`size` samples that nobody has seen. The key is consumed."""
    kind, noise = jax.random.split(key)
    return task.batch(world, task.draw(world.fixed, kind, noise, size, data, settings), data, settings)


def test_batch(task: Task, world: World, data, settings) -> Batch:
    """All test samples."""
    return task.batch(world, world.test, data, settings)


def variance(task: Task, world: World, data, settings) -> Scalar:
    """E|y - E y|^2, the loss of the best constant predictor: losses are divided by it, so 1 is trivial."""
    if task.variance is not None:
        return task.variance(world, data, settings)
    y = test_batch(task, world, data, settings).y
    return ((y - y.mean(0, keepdims=True)) ** 2).sum(-1).mean()


def bytes_of(task: Task, data, pool: int) -> int:
    """Bytes that the samples of one run take, from their shapes."""
    settings = dict.fromkeys(TRACED, 1.0)
    shapes = jax.eval_shape(lambda key: world(task, key, data, pool, settings), jax.random.key(0))
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def kinds(key: PRNGKeyArray | None, shape: tuple[int, ...], clusters: int) -> Int[Array, "B ..."]:
    """Clusters at random, or (without a key) in turn, so that each comes equally often."""
    if key is None:
        return (jnp.arange(shape[0]) % clusters).reshape(shape)
    return jax.random.randint(key, shape, 0, clusters)


def separated(key: PRNGKeyArray, count: int, dim: int) -> Float[Array, "C D"]:
    """Centres with separation 1: N(0, I) draws, scaled so that the closest pair is sqrt(dim) apart (sigma = 1)."""
    centres = jax.random.normal(key, (count, dim))
    squared = ((centres[:, None] - centres[None]) ** 2).sum(-1)
    closest = jnp.sqrt(jnp.where(jnp.eye(count, dtype=bool), jnp.inf, squared).min())
    return centres * (jnp.sqrt(dim) / closest)


def posterior(x: Float[Array, "T D"], centres: Float[Array, "C D"], variance: float = 1.0) -> Float[Array, "T C"]:
    """p(c|x) of equally likely spherical Gaussians: proportional to exp(-|x - mu_c|^2 / (2 variance))."""
    return jax.nn.softmax((x @ centres.T - 0.5 * (centres**2).sum(-1)[None]) / variance)
