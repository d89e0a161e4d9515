"""The product with a vocabulary's head, whose gradient XLA:CPU computes in a slow order, with a rule of its own for it.

Its weight's gradient has the tokens transposed, over which XLA:CPU goes with a stride, at an eighth of the speed, and copies the cotangent
(`python -m routed.bench t5`). Here what comes in is laid out first. Elsewhere it is the plain product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.system.platform import platform


def projected(y: Float[Array, "B M D"], head: Float[Array, "D V"]) -> Float[Array, "B M V"]:
    """y W, float32: the logits of a vocabulary."""
    return (_projected_in_order if platform() == "cpu" else _projected)(y, head)


def _projected(y, head):
    return jnp.einsum("BMD,DV->BMV", y, head, preferred_element_type=jnp.float32)


def _save(y, head):
    return _projected(y, head), (y, head)


def _backward(factors, cotangent):
    y, head = factors
    cotangent = jax.lax.optimization_barrier(cotangent)
    of_y, of_head = jnp.einsum("BMV,DV->BMD", cotangent, head), jnp.einsum("BMD,BMV->DV", y, cotangent)
    return of_y.astype(y.dtype), of_head.astype(head.dtype)


_projected_in_order = jax.custom_vjp(_projected)
_projected_in_order.defvjp(_save, _backward)
