"""Routers with weights: scores of some features of a token, with one column of `kernel` per expert.

Routers differ in their features (none, hidden layers, windows summed by a convolution, a convolutional net) and in
whether they score by product or by cosine. Scores are float32 whatever the type of the input. Columns are drawn with
keys folded from the expert, so that a router over 8 experts is a prefix of the one over 16.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from routed.kernels.matmul import matmul
from routed.routers.clusters import closeness

#: What a score may be (`router.score`).
PRODUCT, DISTANCE, DIRECTION = MEASURES = ("product", "distance", "direction")

#: Temperature of a fresh cosine router (Chi et al. 2022).
TEMPERATURE = 0.07


class ProductRouter(nn.Module):
    """Scores f(x) W, without bias (Dikkala et al. 2023, Section 2) or with one (their Theorem 3); or the closeness of
    f(x) to places.

    `kernel` is [F, E], lecun-normal; `bias` is [E] and starts at 0. With the `measure` distance a column w of `kernel`
    is a place and its score f.w - |w|^2 / 2, whose softmax is that of minus half the squared distances; with direction
    its score is f.w / |w|.
    """

    num_experts: int
    features: nn.Module
    biased: bool = False
    measure: str = PRODUCT

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], **context) -> Float[Array, "T E"]:
        del context
        features = self.features(x.astype(jnp.float32))
        kernel = self.param("kernel", columns, features.shape[-1], self.num_experts)
        if self.measure == DISTANCE:
            scores = closeness(kernel.T, features)
        else:
            scores = matmul(features, unit(kernel, axis=0) if self.measure == DIRECTION else kernel)
        if self.biased:
            scores += self.param("bias", nn.initializers.zeros, (self.num_experts,))[None]
        return scores


class CosineRouter(nn.Module):
    """Cosines of f(x) with the experts' embeddings, over a learnable temperature (XMoE, Chi et al. 2022).

    f is a down-projection without bias there. Neither the norm of a token nor that of a column of `kernel` matters.
    """

    num_experts: int
    features: nn.Module

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], **context) -> Float[Array, "T E"]:
        del context
        features = self.features(x.astype(jnp.float32))
        kernel = self.param("kernel", columns, features.shape[-1], self.num_experts)
        log_scale = self.param("log_scale", nn.initializers.constant(-math.log(TEMPERATURE)), ())
        return jnp.exp(log_scale) * (unit(features, axis=1) @ unit(kernel, axis=0))


def columns(key: PRNGKeyArray, dim: int, experts: int) -> Float[Array, "F E"]:
    """Draws one lecun-normal column for each expert: N(0, 1/F)."""

    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(experts))
    return jax.vmap(lambda key: jax.random.normal(key, (dim,)) / jnp.sqrt(dim), out_axes=1)(keys)


def unit(a: Float[Array, "N M"], axis: int) -> Float[Array, "N M"]:
    """Returns `a` with vectors of length 1 along `axis`; zero vectors stay zero, with a finite gradient."""
    return a * jax.lax.rsqrt(jnp.maximum((a**2).sum(axis, keepdims=True), 1e-12))
