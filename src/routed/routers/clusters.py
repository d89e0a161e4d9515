"""Clusters of samples without labels: k-means, for routers that nobody trains and for the model that is k-means itself.

Distances are taken as products, so that nothing is as large as [samples, centres, dimensions].
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

#: Iterations of Lloyd at most, and the squared way of all centres, over the mean variance of a dimension, at which they
#: stand still: the rule of scikit-learn's KMeans, at its tolerance.
ITERATIONS, STILL = 300, 1e-4
#: Rounds of `balanced`.
ROUNDS = 5


def closeness(centres: Float[Array, "E D"], x: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """Returns x.w - |w|^2 / 2 for each centre w: minus half the squared distance, without the common |x|^2 / 2."""
    return x @ centres.T - 0.5 * (centres**2).sum(1)[None]


def nearest(centres: Float[Array, "E D"], x: Float[Array, "T D"]) -> Int[Array, " T"]:
    """Returns the nearest centre of each sample."""
    return closeness(centres, x).argmax(1)


def members(centres: Float[Array, "E D"], x: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """Returns 1 where a sample belongs to a centre."""
    return jax.nn.one_hot(nearest(centres, x), len(centres))


def lloyd_step(
    centres: Float[Array, "E D"], x: Float[Array, "T D"], weight: Float[Array, " T"] | None = None
) -> Float[Array, "E D"]:
    """Applies one iteration of k-means: each centre becomes the mean of its samples; a centre without samples stays."""
    membership = members(centres, x)
    membership = membership if weight is None else membership * weight[:, None]
    count = membership.sum(0)[:, None]
    return jnp.where(count > 0, membership.T @ x / jnp.maximum(count, 1), centres)


def kmeans(
    key: PRNGKeyArray, x: Float[Array, "T D"], weight: Float[Array, " T"], count: int, starts: int = 1
) -> Float[Array, "E D"]:
    """Returns the centres of `count` clusters of the samples whose weight is 1; samples of weight 0 take no part.

    Seeds by k-means++, then iterations of Lloyd until the centres stand still. Of several starts the one with the least
    sum of squared distances stays. The key is consumed.
    """
    if starts > 1:
        tried = jax.lax.map(lambda key: kmeans(key, x, weight, count), jax.random.split(key, starts))
        # The sum of squared distances, halved and without |x|^2, which all starts share.
        far = jax.lax.map(lambda centres: -(closeness(centres, x).max(1) * weight).sum(), tried)
        return tried[far.argmin()]
    mean = (x * weight[:, None]).sum(0) / weight.sum()
    x = x - mean[None]  # far from the origin products lose the digits that tell centres apart
    variance = ((x**2).mean(1) * weight).sum() / weight.sum()

    def moving(state) -> Array:
        taken, _, way = state
        return (taken < ITERATIONS) & (way > STILL * variance)

    def step(state):
        taken, centres, _ = state
        moved = lloyd_step(centres, x, weight)
        return taken + 1, moved, ((moved - centres) ** 2).sum()

    first = seeds(key, x, weight, count)
    return jax.lax.while_loop(moving, step, (0, first, jnp.float32(jnp.inf)))[1] + mean[None]


def balanced(
    centres: Float[Array, "E D"], x: Float[Array, "T D"], weight: Float[Array, " T"]
) -> tuple[Float[Array, "E D"], Float[Array, " E"]]:
    """Returns centres of clusters of equal size, and the offsets of `closeness` that make them so (a power diagram).

    Offsets rise where a cluster is too small and fall where it is too large (ascent of the dual of the transport of the
    samples to the centres), in ROUNDS rounds, between which centres become the means of their clusters.
    """
    mean = (x * weight[:, None]).sum(0) / weight.sum()
    x, count = x - mean[None], len(centres)
    spread = closeness(centres - mean[None], x).std()

    def chosen(centres, offsets) -> Float[Array, "T E"]:
        return jax.nn.one_hot((closeness(centres, x) + offsets[None]).argmax(1), count) * weight[:, None]

    def step(i, state):
        centres, offsets = state
        missing = 1 - count * chosen(centres, offsets).sum(0) / weight.sum()
        return centres, offsets + spread * missing / (2 + i)

    def round_(i, state):
        centres, offsets = jax.lax.fori_loop(0, ITERATIONS, step, state)
        members = chosen(centres, offsets)
        size = members.sum(0)[:, None]
        means = jnp.where(size > 0, members.T @ x / jnp.maximum(size, 1), centres)
        return jnp.where(i < ROUNDS - 1, means, centres), offsets

    centres, offsets = jax.lax.fori_loop(0, ROUNDS, round_, (centres - mean[None], jnp.zeros(count)))
    return centres + mean[None], offsets


def seeds(key: PRNGKeyArray, x: Float[Array, "T D"], weight: Float[Array, " T"], count: int) -> Float[Array, "E D"]:
    """Draws samples by their squared distances from earlier ones, k-means++ (Arthur and Vassilvitskii 2007).

    Of 2 + log(count) such draws the one that brings the samples closest to their nearest seed, as in scikit-learn. The
    key is consumed.
    """

    def drawn(number, chance: Float[Array, " T"], trials: int) -> Float[Array, "L D"]:
        # Through sums, so that samples of weight 0 at the end change no draw.
        below = jnp.cumsum(chance)
        return x[jnp.searchsorted(below, below[-1] * jax.random.uniform(jax.random.fold_in(key, number), (trials,)))]

    def squared(centres: Float[Array, "L D"]) -> Float[Array, "L T"]:
        return jnp.maximum((x**2).sum(1)[None] - 2 * closeness(centres, x).T, 0.0)

    def add(number, state):
        chosen, distance = state
        tried = drawn(number, distance * weight, 2 + int(math.log(count)))
        closer = jnp.minimum(distance[None], squared(tried))
        best = (closer * weight[None]).sum(1).argmin()
        return chosen.at[number].set(tried[best]), closer[best]

    first = drawn(0, weight, 1)
    chosen = jnp.zeros((count, x.shape[1])).at[0].set(first[0])
    return jax.lax.fori_loop(1, count, add, (chosen, squared(first)[0]))[0]
