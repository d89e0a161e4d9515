"""Stripes that repeat along one direction, a constant target for each kind: no linear router can tell them apart."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from routed.contracts import Batch
from routed.settings.setting import Setting, at_least
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of


class Draws(NamedTuple):
    """Kinds of stripes, places across a stripe of width 1 and the period it is in, and N(0, I) in all directions."""

    cluster: Int[Array, " T"]
    across: Float[Array, " T"]
    period: Int[Array, " T"]
    noise: Float[Array, "T D"]


def fixed(keys: Key[Array, " n"], data) -> Float[Array, "C O"]:
    """A target N(0, I) for each kind of stripe."""
    return jax.random.normal(keys[1], (data.clusters, data.target_dim))


def draw(fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Uniform across a stripe and over the periods."""
    del fixed
    across, period, noise = jax.random.split(noise_key, 3)
    return Draws(
        cluster=clusters_of(cluster_key, (size,), data.clusters),
        across=jax.random.uniform(across, (size,)),
        period=jax.random.randint(period, (size,), 0, data.periods),
        noise=jax.random.normal(noise, (size, data.dim)),
    )


def batch(world: World, draws: Draws, data) -> Batch:
    """x_0 = separation (cluster + clusters period + u - half the whole width), u in [0, 1); the other directions are noise."""
    place = draws.cluster + data.clusters * draws.period + draws.across - data.clusters * data.periods / 2
    x = draws.noise.at[:, 0].set(data.separation * place)
    return Batch(x=x, y=world.fixed[draws.cluster], cluster=draws.cluster)


TASK = Task(
    tokens="rows",
    targets={"constant": "vector"},
    fixed=fixed,
    draw=draw,
    batch=batch,
    bayes=lambda world, batch, data: batch.y,  # x_0 tells the stripe
    dims=lambda data: data.dim,
    signal=lambda data: 1,
    outputs=lambda data: data.target_dim,
    reads=("clusters", "dim", "separation"),
    settings={"periods": Setting(2, "how often the stripes repeat", at_least(1))},
)
