"""x W with derivatives in the order that is fast on a CPU, and `nn.Dense` on it.

Twin: `jnp.matmul`, whose order of products all other platforms have.
Measured: of few rows W g^T in place of g W^T, as XLA:CPU reads transposed weights 2 to 3 times slower: 512 experts of
128 x 256 with 10 rows each take 9.5 ms in place of 21. Of many rows and few columns g^T x in place of x^T g: 320 x 784
with 320 x 40 takes .14 ms in place of .27, with 320 x 5 .02 in place of .18 (`python -m routed.bench dispatch`).
Delete when: XLA:CPU chooses the order of a product by its shape.
"""

from __future__ import annotations

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from routed.system.platform import platform

#: A product of fewer rows than this with transposed weights is slow on a CPU.
FEW = 96


@jax.custom_vjp
def matmul(x: Float[Array, "T D"], weights: Float[Array, "D H"]) -> Float[Array, "T H"]:
    """Returns x W. On a CPU barriers keep its derivatives' order: XLA would join a product with its transposition."""
    return x @ weights


def _save(x, weights):
    return x @ weights, (x, weights)


def _backward(saved, cotangent):
    x, weights = saved
    rows, columns = weights.shape
    few = len(x) < FEW
    few, narrow = (platform() == "cpu" and so for so in (few, 2 * columns <= rows and not few))
    of_x = jax.lax.optimization_barrier(weights @ cotangent.T).T if few else cotangent @ weights.T
    return of_x, jax.lax.optimization_barrier(cotangent.T @ x).T if narrow else x.T @ cotangent


matmul.defvjp(_save, _backward)


def dense_layer(outputs: int, **options) -> nn.Dense:
    """Returns `nn.Dense` through `matmul`; further axes of its input (patches) are rows too."""
    return nn.Dense(outputs, dot_general=_of_dense, **options)


def _of_dense(x, weights, dimensions, precision=None):
    del dimensions, precision  # of a Dense: the last axis of x, the first of the weights
    return matmul(x.reshape(-1, x.shape[-1]), weights).reshape(*x.shape[:-1], -1)
