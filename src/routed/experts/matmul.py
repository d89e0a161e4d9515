"""Products with few rows, and nn.Dense on them."""

from __future__ import annotations

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from routed.system.platform import platform

#: Fewer rows than this make a product with transposed weights slow on a CPU.
FEW = 96


@jax.custom_vjp
def matmul(x: Float[Array, "T D"], weights: Float[Array, "D H"]) -> Float[Array, "T H"]:
    """x W, with a derivative for few rows on a CPU: W g^T, turned afterwards, in place of g W^T.

    XLA:CPU reads transposed weights 2 to 3 times slower (512 experts of 128 x 256 with 10 rows each: 21 ms against 9.5). The
    barrier keeps it from joining the two again.
    """
    return x @ weights


def _save(x, weights):
    return x @ weights, (x, weights)


def _backward(saved, cotangent):
    x, weights = saved
    if platform() == "cpu" and len(x) < FEW:
        return jax.lax.optimization_barrier(weights @ cotangent.T).T, x.T @ cotangent
    return cotangent @ weights.T, x.T @ cotangent


matmul.defvjp(_save, _backward)


def dense_layer(outputs: int, **options) -> nn.Dense:
    """nn.Dense through `matmul`; further axes of its input (patches) are rows too."""
    return nn.Dense(outputs, dot_general=_of_dense, **options)


def _of_dense(x, weights, dimensions, precision=None):
    del dimensions, precision  # of a Dense: the last axis of x, the first of the weights
    return matmul(x.reshape(-1, x.shape[-1]), weights).reshape(*x.shape[:-1], -1)
