"""A router on random Fourier features: its scores may rise and fall many times along a direction."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.routers.product import ProductRouter
from routed.routers.router import Router, kernel_from_clusters, kernel_from_examples, scale_kernel
from routed.settings.setting import POSITIVE, Setting, at_least


class Waves(nn.Module):
    """sqrt(2 / F) cos(x R + b), with R ~ N(0, frequency^2) and b uniform on a circle (Rahimi and Recht 2007).

    At the start the product of two tokens' features is about exp(-frequency^2 |x - y|^2 / 2). R and b are trained.
    """

    count: int
    frequency: float

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T F"]:
        x = x.reshape(len(x), -1)
        directions = self.param("kernel", jax.random.normal, (x.shape[1], self.count))
        phases = self.param("bias", nn.initializers.uniform(2 * math.pi), (self.count,))
        return math.sqrt(2 / self.count) * jnp.cos(x @ directions * self.frequency + phases[None])


ROUTER = Router(
    lambda own, experts: ProductRouter(experts, Waves(own.waves, own.frequency), measure=own.measure),
    tokens=("rows", "patches", "hidden"),
    scale=scale_kernel,
    from_examples=kernel_from_examples,
    from_clusters=kernel_from_clusters,
    settings={
        "waves": Setting(64, "random Fourier features of a token", at_least(1)),
        "frequency": Setting(1.0, "standard deviation of their frequencies at the start", POSITIVE),
    },
    reads=("measure",),
)
