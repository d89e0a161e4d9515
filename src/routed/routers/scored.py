"""Routers with weights: scores of some features of a token, with one column of `kernel` per expert.

Routers differ in their features (none, hidden layers, windows summed by a convolution, a convolutional net) and in whether they
score by product or by cosine. Scores are float32 whatever the type of the input. Columns are drawn with keys folded from the expert, so that a router
over 8 experts is a prefix of the one over 16.
"""

from __future__ import annotations

import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

#: Temperature of a fresh cosine router (Chi et al. 2022).
TEMPERATURE = 0.07

#: Images that a convolutional net takes at once, so that their patches stay in cache (2,000 images: 70 ms against 250).
IMAGES = 64


class Flat(nn.Module):
    """The input itself, as one row a token."""

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T F"]:
        return x.reshape(len(x), -1)


class Hidden(nn.Module):
    """`depth` hidden ReLU layers of `width`."""

    depth: int
    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T F"]:
        x = x.reshape(len(x), -1)
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width)(x))
        return x


class Windows(nn.Module):
    """The sum of all windows of a token, so that a column is a filter whose responses are summed over positions.

    A token is [*positions, channels], or a row (one channel). Windows have `size` positions along every axis and do not
    overlap. Chen et al. (2022): h_m(x) = sum_p <theta_m, x^(p)>, with size 1 for patches and 4 x 4 for images.
    """

    size: int

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T F"]:
        x = x[..., None] if x.ndim == 2 else x
        tokens, *positions, channels = x.shape
        if any(n % self.size for n in positions):
            raise ValueError(f"router.window={self.size} does not divide the positions {positions} of a token")
        split = [part for n in positions for part in (n // self.size, self.size)]
        x = x.reshape(tokens, *split, channels).sum(tuple(range(1, 2 * len(positions), 2)))
        return x.reshape(tokens, -1)


class Convolutions(nn.Module):
    """`depth` layers of 3 x 3 filters with stride 2 and ReLU, `width` of them at first and twice as many each time; then their mean.

    A token is [*positions, channels], or a row (one channel). Weights are He-normal, biases zero.
    """

    depth: int
    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T F"]:
        x = x[..., None] if x.ndim == 2 else x
        layers, inputs = [], x.shape[-1] * 3 ** (x.ndim - 2)
        for layer in range(self.depth):
            filters = self.width * 2**layer
            kernel = self.param(f"kernel_{layer}", nn.initializers.he_normal(), (inputs, filters))
            layers.append((kernel, self.param(f"bias_{layer}", nn.initializers.zeros, (filters,))))
            inputs = filters * 3 ** (x.ndim - 2)

        def one(image):
            # Products with patches: XLA:CPU takes 30 times as long for the gradient of a convolution within a loop.
            for kernel, bias in layers:
                responses = patches(image) @ kernel
                image = nn.relu(responses + jnp.broadcast_to(bias, responses.shape))
            return image.mean(tuple(range(image.ndim - 1)))

        return jax.vmap(one)(x) if len(x) <= IMAGES else jax.lax.map(one, x, batch_size=IMAGES)


def patches(image: Float[Array, "*positions C"]) -> Float[Array, "*half P"]:
    """The 3 x 3 positions from every second one on, side by side; beyond the end there are zeros."""
    *positions, _ = image.shape
    half = [math.ceil(n / 2) for n in positions]
    image = jnp.pad(image, [(0, 2 * h + 1 - n) for h, n in zip(half, positions, strict=True)] + [(0, 0)])
    starts = itertools.product(range(3), repeat=len(positions))
    return jnp.concatenate(
        [image[tuple(slice(a, a + 2 * h - 1, 2) for a, h in zip(start, half, strict=True))] for start in starts], -1
    )


class ProductRouter(nn.Module):
    """Scores f(x) W, without bias (Dikkala et al. 2023, Section 2) or with one (their Theorem 3).

    `kernel` is [F, E], lecun-normal; `bias` is [E] and starts at 0.
    """

    num_experts: int
    features: nn.Module
    biased: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], **context) -> Float[Array, "T E"]:
        del context
        features = self.features(x.astype(jnp.float32))
        scores = features @ self.param("kernel", columns, features.shape[-1], self.num_experts)
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
    """One lecun-normal column for each expert: N(0, 1/F)."""

    def column(expert):
        return jax.random.normal(jax.random.fold_in(key, expert), (dim,)) / jnp.sqrt(dim)

    return jax.vmap(column, out_axes=1)(jnp.arange(experts))


def unit(a: Float[Array, "N M"], axis: int) -> Float[Array, "N M"]:
    """`a` with vectors of length 1 along `axis`; zero vectors stay zero, with a finite gradient."""
    return a * jax.lax.rsqrt(jnp.maximum((a**2).sum(axis, keepdims=True), 1e-12))
