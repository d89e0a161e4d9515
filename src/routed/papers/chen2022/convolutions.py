"""Convolutions of 3 x 3 (or 1 x 1) positions and their gradients, as products with windows and shifted sums.

Twin: `plain_convolution`, which all platforms but CPUs run.
Measured in November 2026: XLA:CPU takes 30 times as long for the gradient of a convolution within a loop.
Delete when: the gradient of `jax.lax.conv_general_dilated` within a loop is as fast on CPUs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.kernels.matmul import matmul
from routed.system.platform import platform


def plain_convolution(
    x: Float[Array, "B H W C"], kernel: Float[Array, "P F"], stride: int = 1, groups: int = 1
) -> Float[Array, "B h w F"]:
    """Returns the same responses by XLA's convolution; with `groups`, of a filter for each channel."""
    inputs = x.shape[-1] // groups
    side = 1 if len(kernel) == inputs else 3
    kernel, around = kernel.reshape(side, side, inputs, -1), [(side // 2, side // 2)] * 2
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride,) * 2, around, dimension_numbers=names, feature_group_count=groups
    )


def depthwise(x: Float[Array, "B H W C"], kernel: Float[Array, "9 C"], stride: int = 1) -> Float[Array, "B h w C"]:
    """Returns the responses of a filter of 3 x 3 positions for each channel, around every `stride`-th position."""
    return _each(stride, x, kernel) if platform() == "cpu" else plain_convolution(x, kernel, stride, x.shape[-1])


def windows(x: Float[Array, "B H W C"], stride: int = 1) -> Float[Array, "B h w P"]:
    """Returns the 3 x 3 positions around every `stride`-th one, side by side, row by row, with zeros beyond the ends.

    Columns first, then rows of these: 6 pieces in place of 9, which compile in two thirds of the time.
    """
    _, high, wide, _ = x.shape
    x = jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    x = jnp.concatenate([x[:, :, at : at + wide : stride] for at in range(3)], -1)
    return jnp.concatenate([x[:, at : at + high : stride] for at in range(3)], -1)


def convolve(x: Float[Array, "B H W C"], kernel: Float[Array, "P F"], stride: int = 1) -> Float[Array, "B h w F"]:
    """Returns the responses of filters around every `stride`-th position; `kernel` has a row per number of a window.

    Only CPUs multiply windows. On a GPU XLA 0.10.2 ends the process for a product with every second position where
    several seeds have one.
    """
    if platform() != "cpu":
        return plain_convolution(x, kernel, stride)
    channels = x.shape[-1]
    if len(kernel) != channels:
        return _product(stride, x, kernel)
    x = x[:, ::stride, ::stride]
    return matmul(x.reshape(-1, channels), kernel).reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(stride, x, kernel):
    rows = windows(x, stride)
    return (rows.reshape(-1, len(kernel)) @ kernel).reshape(*rows.shape[:-1], -1)


def _save(stride, x, kernel):
    return _product(stride, x, kernel), (x, kernel)


def _backward(stride, saved, cotangent):
    """Returns the gradients; windows are made again, as they are nine times as large as the image."""
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
    """Returns the responses of a filter for each channel: a sum of shifted products, one loop on a CPU."""
    products = (shifted * kernel[i][None, None, None] for i, shifted in enumerate(_shifted(x, stride)))
    return functools.reduce(jnp.add, products)


def _shifted(x: Float[Array, "B H W C"], stride: int) -> Iterator[Float[Array, "B h w C"]]:
    """Yields the image at each position of the windows, row by row."""
    _, high, wide, _ = x.shape
    x = jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    for row, column in itertools.product(range(3), repeat=2):
        yield x[:, row : row + high : stride, column : column + wide : stride]


def _save_each(stride, x, kernel):
    return _each(stride, x, kernel), (x, kernel)


def _backward_each(stride, saved, cotangent):
    """Returns gradients that are sums of shifted products too, with zeros between the positions of a stride."""
    x, kernel = saved
    of_kernel = jnp.stack([(shifted * cotangent).sum((0, 1, 2)) for shifted in _shifted(x, stride)])
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
