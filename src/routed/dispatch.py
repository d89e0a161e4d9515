"""Dispatch: Routing + tokens + experts -> outputs. Every dispatch computes the same function; they differ in cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.selection import combine_weights
from routed.words import Routing, SoftRouting


def dense(
    expert: Callable[[Any, Float[Array, "T D"]], Float[Array, "#T O"]],
    params: Any,
    x: Float[Array, "T D"],
    routing: Routing | SoftRouting,
) -> Float[Array, "T O"]:
    """Every expert on every token: the oracle for all other dispatches, and the only one for soft routing.

    y_t = sum_e w_te f_e(x_t). Leaves of `params` carry a leading expert axis. An expert that returns one row for all
    tokens (a constant) is combined by one [T, E] x [E, O] product.
    """
    outputs = jax.vmap(expert, in_axes=(0, None))(params, x)
    weight = combine_weights(routing)
    if outputs.shape[1] == 1:
        return weight @ outputs[:, 0]
    return jnp.einsum("TE,ETO->TO", weight, outputs)


def gather(
    expert: Callable[[Any, Float[Array, "T D"]], Float[Array, "#T O"]],
    params: Any,
    x: Float[Array, "T D"],
    routing: Routing | SoftRouting,
) -> Float[Array, "T O"]:
    """Each assignment fetches its own copy of its expert's weights: for few tokens, small experts and sparse routing.

    FLOPs are those of the chosen experts only; bytes grow with assignments times weights, so `dense` is better beyond
    about E tokens per expert.

    Raises:
      TypeError: soft routing has no list of assignments.
    """
    if isinstance(routing, SoftRouting):
        raise TypeError("dispatch 'gather' needs a sparse selection; soft routing is dispatched 'dense'")
    chosen = jax.tree.map(lambda leaf: leaf[routing.expert], params)
    outputs = jax.vmap(lambda p, token: expert(p, token[None])[0])(chosen, x[routing.token])
    weight = jnp.where(routing.kept, routing.weight, 0.0)[:, None]
    return jnp.zeros((len(x), outputs.shape[-1]), outputs.dtype).at[routing.token].add(weight * outputs)


DISPATCHES = {"dense": dense, "gather": gather}
