"""Layers of networks on images: convolutions as products with windows, and a normalisation that knows one image only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.routers.matmul import matmul
from routed.system.platform import platform

#: Weights of PyTorch's layers at the start: uniform on +- 1 / sqrt(inputs of a response).
START = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
#: Channels that are normalised together, at most.
TOGETHER = 8


def windows(x: Float[Array, "B H W C"], stride: int = 1) -> Float[Array, "B h w P"]:
    """The 3 x 3 positions around every `stride`-th one, side by side, row by row; beyond the ends there are zeros.

    Columns first, then rows of these: 6 pieces in place of 9, which compile in two thirds of the time.
    """
    _, high, wide, _ = x.shape
    x = jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    x = jnp.concatenate([x[:, :, at : at + wide : stride] for at in range(3)], -1)
    return jnp.concatenate([x[:, at : at + high : stride] for at in range(3)], -1)


def convolve(x: Float[Array, "B H W C"], kernel: Float[Array, "P F"], stride: int = 1) -> Float[Array, "B h w F"]:
    """Responses of filters of 3 x 3 (or 1 x 1) positions around every `stride`-th one; `kernel` has a row for each number of a window.

    On a CPU a product with windows: XLA:CPU takes 30 times as long for the gradient of a convolution within a loop. On a GPU no product
    with every second position: XLA 0.10.2 ends the process where several seeds have one.
    """
    channels = x.shape[-1]
    side = 1 if len(kernel) == channels else 3
    if platform() != "cpu":
        kernel, around = kernel.reshape(side, side, channels, -1), [(side // 2, side // 2)] * 2
        return jax.lax.conv_general_dilated(
            x, kernel, (stride,) * 2, around, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    if side == 3:
        return _product(stride, x, kernel)
    x = x[:, ::stride, ::stride]
    return matmul(x.reshape(-1, channels), kernel).reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(stride, x, kernel):
    seen = windows(x, stride)
    return (seen.reshape(-1, len(kernel)) @ kernel).reshape(*seen.shape[:-1], -1)


def _save(stride, x, kernel):
    return _product(stride, x, kernel), (x, kernel)


def _backward(stride, saved, cotangent):
    """Windows are made again, as they are nine times as large as what they are made of."""
    x, kernel = saved
    rows = cotangent.reshape(-1, cotangent.shape[-1])
    _, of_kernel = jax.vjp(lambda kernel: matmul(windows(x, stride).reshape(len(rows), -1), kernel), kernel)
    if stride > 1:
        _, of_x = jax.vjp(lambda x: windows(x, stride), x)
        (moved,) = of_x((rows @ kernel.T).reshape(*cotangent.shape[:-1], -1))
        return moved, *of_kernel(rows)
    turned = kernel.reshape(9, x.shape[-1], -1)[::-1].swapaxes(1, 2).reshape(-1, x.shape[-1])
    return _product(1, cotangent, turned), *of_kernel(rows)


_product.defvjp(_save, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(stride: int, x: Float[Array, "B H W C"], kernel: Float[Array, "9 C"]) -> Float[Array, "B h w C"]:
    """Responses of a filter for each channel: a sum of shifted products, which XLA:CPU makes one loop of."""
    products = (one * kernel[i][None, None, None] for i, one in enumerate(_shifted(x, stride)))
    return functools.reduce(jnp.add, products)


def _shifted(x: Float[Array, "B H W C"], stride: int) -> Iterator[Float[Array, "B h w C"]]:
    """What stands at each place of the windows, row by row."""
    _, high, wide, _ = x.shape
    x = jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    for row, column in itertools.product(range(3), repeat=2):
        yield x[:, row : row + high : stride, column : column + wide : stride]


def _save_each(stride, x, kernel):
    return _each(stride, x, kernel), (x, kernel)


def _backward_each(stride, saved, cotangent):
    """A sum of shifted products too, with zeros between the positions of a stride: slices have the gradient of nine padded sums."""
    x, kernel = saved
    of_kernel = jnp.stack([(one * cotangent).sum((0, 1, 2)) for one in _shifted(x, stride)])
    _, high, wide, _ = x.shape
    *_, h, w, _ = cotangent.shape
    rest = [
        (0, 0, 0),
        (0, high - stride * (h - 1) - 1, stride - 1),
        (0, wide - stride * (w - 1) - 1, stride - 1),
        (0, 0, 0),
    ]
    return _each(1, jax.lax.pad(cotangent, jnp.float32(0), rest), kernel[::-1]), of_kernel


_each.defvjp(_save_each, _backward_each)


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
        kernel = self.param("kernel", START, (9, x.shape[-1]))
        if platform() == "cpu":
            return _each(self.stride, x, kernel)
        names, channels = ("NHWC", "HWIO", "NHWC"), x.shape[-1]
        return jax.lax.conv_general_dilated(
            x, kernel.reshape(3, 3, 1, channels), (self.stride,) * 2, [(1, 1), (1, 1)],
            dimension_numbers=names, feature_group_count=channels,
        )  # fmt: skip


class Norm(nn.Module):
    """Groups of up to 8 channels of an image with mean 0 and variance 1 over all positions, times a scale, plus a bias."""

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
