"""Features that a router scores: a token, hidden layers, windows summed over positions, a convolutional net."""

from __future__ import annotations

import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
    """`depth` layers of 3 x 3 filters with stride 2 and ReLU: `width` filters, doubled in each layer; then their mean.

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

        def features_of_image(image):
            # Products with patches: XLA:CPU takes 30 times as long for the gradient of a convolution within a loop.
            for kernel, bias in layers:
                responses = patches(image) @ kernel
                image = nn.relu(responses + jnp.broadcast_to(bias, responses.shape))
            return image.mean(tuple(range(image.ndim - 1)))

        return (
            jax.vmap(features_of_image)(x) if len(x) <= IMAGES else jax.lax.map(features_of_image, x, batch_size=IMAGES)
        )


def patches(image: Float[Array, "*positions C"], stride: int = 2) -> Float[Array, "*half P"]:
    """Returns the 3 x 3 positions around every `stride`-th position, side by side, with zeros beyond the ends."""
    *positions, _ = image.shape
    half, before = [math.ceil(n / stride) for n in positions], 2 - stride
    after = [stride * (h - 1) + 3 - before - n for h, n in zip(half, positions, strict=True)]
    image = jnp.pad(image, [(before, a) for a in after] + [(0, 0)])
    starts = itertools.product(range(3), repeat=len(positions))
    return jnp.concatenate(
        [
            image[tuple(slice(a, a + stride * (h - 1) + 1, stride) for a, h in zip(start, half, strict=True))]
            for start in starts
        ],
        -1,
    )
