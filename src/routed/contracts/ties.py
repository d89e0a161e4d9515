"""The one rule for ties between scores: among equal values the lower index comes first.

Equal infinities are ties, and a positive NaN is above all numbers. Zeros of both signs are ties too, with one
exception: `highest` of k > 1 puts 0.0 before -0.0, as `jax.lax.top_k` does. The module loads no JAX before `highest` or
`is_highest` runs: traces need none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int


def highest(values: Float[Any, "N M"], k: int) -> Int[Any, "N k"]:
    """Returns the indices of the k largest values of each row, the largest first."""
    import jax
    import jax.numpy as jnp

    if k == 1:
        return values.argmax(1)[:, None].astype(jnp.int32)
    return jax.lax.top_k(values, k)[1]


def is_highest(values: Float[Any, "N M"], k: int) -> Bool[Any, "N M"]:
    """Returns True for the k largest values of each row; all values are above -inf.

    The largest values are found one after the other: XLA gathers the values of all devices for `jax.lax.top_k`.
    """
    import jax
    import jax.numpy as jnp

    chosen = jnp.zeros(values.shape, bool)
    for _ in range(k):
        best = jnp.where(chosen, -jnp.inf, values).argmax(1)
        chosen |= jax.nn.one_hot(best, values.shape[1], dtype=bool)
    return chosen


def highest_of_array(values: Float[np.ndarray, "N M"], k: int) -> Int[np.ndarray, "N k"]:
    """Returns the same indices as `highest`, of a NumPy array whose values are above -inf; faster than a sort for small
    k.
    """
    remaining, rows = values.copy(), np.arange(len(values))
    indices = np.empty((len(values), k), np.int32)
    for rank in range(k):
        indices[:, rank] = best = remaining.argmax(1)
        remaining[rows, best] = -np.inf
    return indices
