"""Dispatch by slots: tokens are copied to [experts, places], experts run side by side, outputs are fetched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed.contracts import ExpertFunction, Places, Routing
from routed.layer.dispatch.direct import combine


def slots(
    expert: ExpertFunction, params, x: Float[Array, "T ..."], routing: Routing, queues: Places, exchange=None
) -> Float[Array, "T O"]:
    """Runs the experts on E times `queues.capacity` slots for every group; memory and FLOPs are those of the slots.

    `exchange(outputs_of, slots)` may move slots [E, S, ...] to where their experts' weights are and back (see
    `routed.dispatch.parallel`). Empty slots hold zeros and their outputs are never read.
    """
    experts = routing.scores.shape[1]
    groups = len(x) // queues.group_size
    each = groups * queues.capacity
    slot = slot_of(routing, queues, groups)
    # Slots fetch their token, so both directions are copies of rows; nothing has the shape [tokens, experts, places].
    source = jnp.full(experts * each, len(x), jnp.int32).at[slot].set(routing.token.astype(jnp.int32), mode="drop")
    filled = x.at[source].get(mode="fill", fill_value=0).reshape(experts, each, *x.shape[1:])

    def run(params, filled):
        outputs = jax.vmap(expert)(params, filled)
        return jnp.broadcast_to(outputs, (*filled.shape[:2], outputs.shape[-1]))

    outputs = run(params, filled) if exchange is None else exchange(run, params, filled)
    outputs = outputs.reshape(experts * each, -1)
    return combine(routing, outputs.at[slot].get(mode="fill", fill_value=0), len(x))


def slot_of(routing: Routing, queues: Places, groups: int) -> Int[Array, " A"]:
    """Returns the slot of each assignment by expert, group and rank; past the end for dropped assignments."""
    group = routing.token // queues.group_size
    slot = (routing.expert * groups + group) * queues.capacity + routing.rank
    return jnp.where(routing.kept, slot, routing.scores.shape[1] * groups * queues.capacity)
