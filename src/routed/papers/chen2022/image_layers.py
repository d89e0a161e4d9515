"""Layers of networks on images: convolutions, and a normalisation over the positions of one image."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.papers.chen2022.convolutions import convolve, depthwise

#: Weights of PyTorch's layers at the start: uniform on +- 1 / sqrt(inputs of a response).
START = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
#: Channels that are normalised together, at most.
TOGETHER = 8


class Convolution(nn.Module):
    """`filters` of 3 x 3 (or 1 x 1) positions with a stride."""

    filters: int
    size: int = 3
    stride: int = 1
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w F"]:
        kernel = self.param("kernel", START, (self.size**2 * x.shape[-1], self.filters))
        y = convolve(x, kernel, self.stride)
        return y + self.param("bias", nn.initializers.zeros, (self.filters,))[None, None, None] if self.bias else y


class Depthwise(nn.Module):
    """A filter of 3 x 3 positions for each channel, with a stride."""

    stride: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w C"]:
        return depthwise(x, self.param("kernel", START, (9, x.shape[-1])), self.stride)


class Norm(nn.Module):
    """Groups of up to 8 channels with mean 0 and variance 1 over all positions of an image, scaled and shifted."""

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        samples, _, _, channels = x.shape
        size = max(n for n in range(1, TOGETHER + 1) if channels % n == 0)
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))

        def over_groups(values):
            return jnp.repeat(values.reshape(samples, -1, size).mean(2), size, axis=1)

        mean, square = over_groups(x.mean((1, 2))), over_groups((x**2).mean((1, 2)))
        factor = scale[None] * jax.lax.rsqrt(jnp.maximum(square - mean**2, 0) + 1e-5)
        return x * factor[:, None, None] + (bias[None] - mean * factor)[:, None, None]
