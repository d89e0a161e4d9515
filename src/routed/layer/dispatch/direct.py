"""Dispatches on one device: every expert on every token, an expert's weights for every assignment, or slots of queues.

With `slots` tokens are copied to [experts, places], experts run side by side, and outputs are fetched.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.contracts import ExpertFunction, Queues, Routing, SoftRouting
from routed.kernels.comparisons import is_few, table


def combine_weights(routing: Routing | SoftRouting) -> Float[Array, "T E"]:
    """Returns the weight of every expert in every token's output; 0 for experts not chosen and dropped assignments."""
    if isinstance(routing, SoftRouting):
        return routing.weight
    weight = jnp.where(routing.kept, routing.weight, 0.0)
    return table(weight, routing.token, routing.expert, routing.scores)


def dense(
    expert: ExpertFunction,
    params,
    x: Float[Array, "T ..."],
    routing: Routing | SoftRouting,
    queues: Queues | None = None,
) -> Float[Array, "T O"]:
    """Runs every expert on every token: the oracle for all other dispatches, and the only one for soft routing.

    y_t = sum_e w_te f_e(x_t). An expert that returns one row for all tokens (a constant) is combined by one
    [T, E] x [E, O] product.
    """
    return combined(routing, jax.vmap(expert, in_axes=(0, None))(params, x))


def combined(routing: Routing | SoftRouting, outputs: Float[Array, "E N O"]) -> Float[Array, "T O"]:
    """Returns each token's weighted sum of the outputs of all experts; N: one row for all tokens, or T."""
    weight = combine_weights(routing).astype(outputs.dtype)
    if outputs.shape[1] == 1:
        return weight @ outputs[:, 0]
    return jnp.einsum("TE,ETO->TO", weight, outputs)


def gather(
    expert: ExpertFunction, params, x: Float[Array, "T ..."], routing: Routing, queues: Queues | None = None
) -> Float[Array, "T O"]:
    """Runs each assignment with its own copy of its expert's weights: for few tokens, small experts and sparse routing.

    FLOPs are those of the chosen experts only; bytes grow with assignments times weights, so others are better beyond
    about E assignments. On a TPU, with so few tokens that an expert costs the reading of its weights, `dense` is faster
    than copies, which are read, written and read.
    """
    if is_few(len(x)) and routing.scores.shape[1] <= 3 * len(routing.token):
        return dense(expert, params, x, routing)
    chosen = jax.tree.map(lambda leaf: leaf[routing.expert], params)
    outputs = jax.vmap(lambda p, token: expert(p, token[None])[0])(chosen, x[routing.token])
    return combine(routing, outputs, len(x))


def combine(routing: Routing, outputs: Float[Array, "A O"], tokens: int) -> Float[Array, "T O"]:
    """Returns the weighted sum of each token's assignments; a dropped one weighs nothing, whatever its output."""
    weight = jnp.where(routing.kept, routing.weight, 0.0)[:, None].astype(outputs.dtype)
    outputs = jnp.where(routing.kept[:, None], outputs, 0)
    return jnp.zeros((tokens, outputs.shape[-1]), outputs.dtype).at[routing.token].add(weight * outputs)


def apart(expert: ExpertFunction, params, x: Float[Array, "T ..."], routing: Routing) -> Float[Array, "T E O"]:
    """Returns the weighted output of each expert on each token, not summed; 0 for tokens the expert did not take.

    Of a selection whose experts all take as many tokens of each group: experts compute these, and nothing else.
    """
    experts, tokens = routing.scores.shape[1], len(x)
    order = jnp.argsort(routing.expert, stable=True).reshape(experts, -1)
    token, weight = routing.token[order], jnp.where(routing.kept, routing.weight, 0.0)[order]
    outputs = jax.vmap(expert)(params, x[token]) * weight[:, :, None]
    spread = jnp.zeros((experts, tokens, outputs.shape[-1]), outputs.dtype)
    return jax.vmap(lambda spread, token, rows: spread.at[token].set(rows))(spread, token, outputs).swapaxes(0, 1)


def apart_dense(expert: ExpertFunction, params, x: Float[Array, "T ..."], routing: Routing) -> Float[Array, "T E O"]:
    """Runs every expert on every token and returns the outputs of `apart`: the oracle for it."""
    outputs = jax.vmap(expert, in_axes=(0, None))(params, x)
    return outputs.swapaxes(0, 1) * combine_weights(routing)[:, :, None]


def slots(
    expert: ExpertFunction, params, x: Float[Array, "T ..."], routing: Routing, queues: Queues, exchange=None
) -> Float[Array, "T O"]:
    """Runs the experts on E times `queues.capacity` slots for every group; memory and FLOPs are those of the slots.

    `exchange(outputs_of, slots)` may move slots [E, S, ...] to where their experts' weights are and back (see
    `parallel.exchange`). Empty slots hold zeros and their outputs are never read.
    """
    experts = routing.scores.shape[1]
    groups = len(x) // queues.group_size
    each = groups * queues.capacity
    group = routing.token // queues.group_size
    slot = (routing.expert * groups + group) * queues.capacity + routing.rank  # by expert, then group, then rank
    slot = jnp.where(routing.kept, slot, experts * each)  # past the end: dropped
    # Slots fetch their token, so both directions are copies of rows; nothing has the shape [tokens, experts, places].
    source = jnp.full(experts * each, len(x), jnp.int32).at[slot].set(routing.token.astype(jnp.int32), mode="drop")
    filled = x.at[source].get(mode="fill", fill_value=0).reshape(experts, each, *x.shape[1:])

    def run(params, filled):
        outputs = jax.vmap(expert)(params, filled)
        return jnp.broadcast_to(outputs, (*filled.shape[:2], outputs.shape[-1]))

    outputs = run(params, filled) if exchange is None else exchange(run, params, filled)
    outputs = outputs.reshape(experts * each, -1)
    return combine(routing, outputs.at[slot].get(mode="fill", fill_value=0), len(x))
