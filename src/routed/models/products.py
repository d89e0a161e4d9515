"""Products of a transformer whose gradients XLA:CPU computes in a slow order, with rules of their own for them.

The gradient of a product has its first factor transposed, over which XLA:CPU goes with a stride: a third of the speed for the blocks of an
attention, an eighth for the head of a vocabulary, whose cotangent it also copies (`python -m routed.bench t5`). So the small factor is
the one that is transposed, and what comes in is laid out first. Elsewhere these are the plain products.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier
from jaxtyping import Array, Float

from routed.system.platform import platform


def compared(q: Float[Array, "N Q K"], k: Float[Array, "N S K"]) -> Float[Array, "N Q S"]:
    """q k^T, float32."""
    return _ordered(_compared, _compared_in_order)(q, k)


def mixed(weight: Float[Array, "N Q S"], v: Float[Array, "N S K"]) -> Float[Array, "N Q K"]:
    """The weighted sums of values."""
    return _ordered(_mixed, _mixed_in_order)(weight, v)


def projected(y: Float[Array, "B M D"], head: Float[Array, "D V"]) -> Float[Array, "B M V"]:
    """y W, float32: the logits of a vocabulary."""
    return _ordered(_projected, _projected_in_order)(y, head)


def _ordered(plain: Callable[..., Array], in_order: Callable[..., Array]) -> Callable[..., Array]:
    return in_order if platform() == "cpu" else plain


def _compared(q, k):
    return jnp.einsum("NQK,NSK->NQS", q, k, preferred_element_type=jnp.float32)


def _mixed(weight, v):
    return jnp.einsum("NQS,NSK->NQK", weight, v)


def _projected(y, head):
    return jnp.einsum("BMD,DV->BMV", y, head, preferred_element_type=jnp.float32)


def _with_gradient(product: Callable[..., Array], pull: Callable[..., tuple[Array, Array]]) -> Callable[..., Array]:
    """The product of two factors whose gradients are pull(first, second, cotangent), in the factors' types."""

    def backward(factors, cotangent):
        return tuple(g.astype(a.dtype) for a, g in zip(factors, pull(*factors, cotangent), strict=True))

    ruled = jax.custom_vjp(product)
    ruled.defvjp(lambda *factors: (product(*factors), factors), backward)
    return ruled


def _gathered(rows: Float[Array, "N Q K"], weight: Float[Array, "N Q S"]) -> Float[Array, "N S K"]:
    """weight^T rows, as (rows^T weight)^T; the barrier keeps XLA from turning it back."""
    return optimization_barrier(jnp.einsum("NQK,NQS->NKS", rows, weight)).swapaxes(1, 2)


def _pull_projected(y, head, cotangent):
    cotangent = optimization_barrier(cotangent)
    return jnp.einsum("BMV,DV->BMD", cotangent, head), jnp.einsum("BMD,BMV->DV", y, cotangent)


_compared_in_order = _with_gradient(_compared, lambda q, k, g: (_mixed(g, k), _gathered(q, g)))
_mixed_in_order = _with_gradient(_mixed, lambda weight, v, g: (_compared(g, v), _gathered(g, weight)))
_projected_in_order = _with_gradient(_projected, _pull_projected)
