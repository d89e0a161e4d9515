"""Two truncated Gaussians with opposite targets: the data of Theorem 4 (Dikkala et al. 2023, Section F)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.settings.setting import Setting, between, refuse
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of


class Fixed(NamedTuple):
    """The mean z of the first Gaussian, of norm 1, and its target v; the second Gaussian has -z and -v."""

    mean: Float[Array, " D"]
    target: Float[Array, " O"]


class Draws(NamedTuple):
    """Samples before the mean is added."""

    cluster: Int[Array, " T"]
    noise: Float[Array, "T D"]


def fixed(keys: Key[Array, " n"], data) -> Fixed:
    """Draws a uniform direction, and a target N(0, I / O)."""
    mean = jax.random.normal(keys[0], (data.dim,))
    target = jax.random.normal(keys[1], (data.target_dim,)) / jnp.sqrt(data.target_dim)
    return Fixed(mean / jnp.linalg.norm(mean), target)


def draw(fixed: Fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Draws Gaussians within data.radius: uniform directions, and radii by the inverse distribution function."""
    towards, far = jax.random.split(noise_key)
    direction = jax.random.normal(towards, (size, data.dim))
    direction /= jnp.linalg.norm(direction, axis=1, keepdims=True)
    grid = np.linspace(0, data.radius, 4097)
    below = scipy.stats.chi2.cdf((grid / data.noise) ** 2, data.dim)
    radius = jnp.interp(jax.random.uniform(far, (size,)), jnp.asarray(below / below[-1]), jnp.asarray(grid))
    return Draws(clusters_of(cluster_key, (size,), 2), direction * radius[:, None])


def batch(world: World, draws: Draws, data) -> Batch:
    """Returns x = +-z + noise, y = +-v."""
    sign = (1.0 - 2.0 * draws.cluster)[:, None]
    return Batch(sign * world.fixed.mean[None] + draws.noise, sign * world.fixed.target[None], draws.cluster)


def bayes(world: World, batch: Batch, data) -> Float[Array, "T O"]:
    """Computes sign(x^T z) v, which is exact: data.radius < 1, so no sample crosses 0."""
    return jnp.sign(batch.x @ world.fixed.mean)[:, None] * world.fixed.target[None]


def plane(data, rings: int = 48, angles: int = 48) -> tuple[Float[np.ndarray, "Q 2"], Float[np.ndarray, " Q"]]:
    """Returns points and weights, which sum to 1, of a quadrature of the first Gaussian's noise within a plane.

    Two coordinates g of the noise have density exp(-|g|^2 / (2 sigma^2)) P(|rest|^2 <= radius^2 - |g|^2), where
    |rest|^2 / sigma^2 is chi-squared with D - 2 degrees of freedom: Gauss-Legendre over |g|, equal angles. Every point
    has its mirror images in both axes, so what vanishes by symmetry vanishes here too.
    """
    node, weight = np.polynomial.legendre.leggauss(rings)
    radius, weight = data.radius * (node + 1) / 2, weight * data.radius / 2
    left = (data.radius**2 - radius**2) / data.noise**2
    rest = scipy.stats.chi2.cdf(left, data.dim - 2) if data.dim > 2 else np.ones(rings)
    weight = weight * radius * np.exp(-((radius / data.noise) ** 2) / 2) * rest
    angle = 2 * np.pi * (np.arange(angles) + 0.5) / angles
    points = radius[:, None, None] * np.stack([np.cos(angle), np.sin(angle)], -1)[None]
    weights = np.repeat(weight / weight.sum() / angles, angles)
    return points.reshape(-1, 2), weights


def _check(config: ConfigDict) -> None:
    if config.data.dim < 2:
        refuse("data.dim", config.data.dim, "two Gaussians need at least 2 dimensions")


TASK = Task(
    tokens="rows",
    targets={"constant": "vector"},
    fixed=fixed,
    draw=draw,
    batch=batch,
    bayes=bayes,
    signal=lambda data: data.dim,
    outputs=lambda data: data.target_dim,
    labels=lambda data: 2,
    variance=lambda world, data: (world.fixed.target**2).sum(),
    provides=frozenset({"cluster", "opposite Gaussians"}),
    reads=("dim", "noise"),
    settings={
        "radius": Setting(0.9, "no sample is further from its mean, which is at distance 1 from 0", between(0, 1))
    },
    check=_check,
)
