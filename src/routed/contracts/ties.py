"""The one rule for ties between scores: among equal values the lower index comes first.

Equal infinities are ties, and a positive NaN is above all numbers. Zeros of both signs are ties too, with one
exception: `highest` of k > 1 puts 0.0 before -0.0, as `jax.lax.top_k` does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int


def highest(values: Float[Any, "N M"], k: int) -> Int[Any, "N k"]:
    """Returns the indices of the k largest values of each row, the largest first."""
    if k == 1:
        return values.argmax(1)[:, None].astype(jnp.int32)
    return jax.lax.top_k(values, k)[1]


def is_highest(values: Float[Any, "N M"], k: int) -> Bool[Any, "N M"]:
    """Returns True for the k largest values of each row; all values are above -inf.

    The largest values are found one after the other: XLA gathers the values of all devices for `jax.lax.top_k`.
    """
    chosen = jnp.zeros(values.shape, bool)
    for _ in range(k):
        best = jnp.where(chosen, -jnp.inf, values).argmax(1)
        chosen |= jax.nn.one_hot(best, values.shape[1], dtype=bool)
    return chosen
