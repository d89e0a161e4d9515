"""Expert parallelism: experts live on the devices of one mesh axis, and slots or tokens travel to them and back.

Tokens are sharded over all devices of the mesh (`data` x `expert`), whole groups each, so what is dropped depends on
the groups of the config and never on the mesh. The exchange has fixed shapes (`all_to_all`), which CPU, GPU and TPU all
have. Without queues every device of the axis `expert` gets all tokens of its replica (`gathered`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import ExpertFunction, Queues, Routing, SoftRouting, UserError
from routed.kernels.ragged import ragged
from routed.layer.dispatch.direct import slots
from routed.layer.rule import SelectionRule
from routed.layer.selection import groupless, select

#: Mesh axes: replicas of the experts, and the devices that share one replica.
DATA, EXPERT = "data", "expert"
#: Shared out over both axes.
BOTH = P((DATA, EXPERT))
#: Assignments that a device has room for at once, over those of an even load.
ROOM = 1.25


def devices_of_run(config: ConfigDict) -> int:
    """Returns how many devices share a run by its config; 1 where the program decides (`routed.engine.sharing`)."""
    return max(1, config.mesh.data) * config.mesh.expert


def parallel(
    run, expert: ExpertFunction, params, x: Float[Array, "T ..."], routing: Routing, queues: Queues, mesh: Mesh
) -> Float[Array, "T O"]:
    """Applies the dispatch `run` to each device's tokens; device j of axis `expert` has experts j E/n to (j+1) E/n - 1.

    Where that axis has several devices, `run` is one of `EXCHANGED`, which brings tokens to their experts.

    Raises:
      UserError: the experts or the groups cannot be shared out evenly.
    """
    check(mesh, routing.scores.shape[1], len(x), queues.group_size)

    def local(params, x, routing):
        device = jax.lax.axis_index((DATA, EXPERT))
        routing = routing._replace(token=routing.token - device * len(x))
        return run(expert, params, x, routing, queues)

    # Unchecked: an expert's own derivative need not know the mesh, and the sum over replicas is made here.
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(EXPERT), BOTH, BOTH), out_specs=BOTH, check_vma=False)
    return mapped(params, x, routing)


def group_size_of(rule: SelectionRule, tokens: int, mesh: Mesh | None) -> int:
    """Returns the tokens of a group: by the rule, or all; a device's where groups are of no consequence."""
    if mesh is not None and groupless(rule):
        return max(1, tokens // mesh.size)
    return rule.group_size or tokens


def parallel_select(
    rule: SelectionRule, mesh: Mesh, scores: Float[Array, "T E"], *, preference=None, mask=None, bias=None
) -> Routing | SoftRouting:
    """Applies `select` to the groups of each device: XLA would gather all scores for the top-k.

    Raises:
      UserError: the groups cannot be shared out evenly.
    """
    check(mesh, scores.shape[1], len(scores), group_size_of(rule, len(scores), mesh))
    mask = jnp.ones(len(scores), bool) if mask is None else mask
    bias = jnp.zeros(scores.shape[1]) if bias is None else bias
    preference = scores if preference is None else preference

    def local(scores, preference, mask, bias):
        routing = select(rule, scores, preference=preference, mask=mask, bias=bias)
        if isinstance(routing, SoftRouting):
            return routing
        return routing._replace(token=routing.token + jax.lax.axis_index((DATA, EXPERT)) * len(scores))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(BOTH, BOTH, BOTH, P()), out_specs=BOTH)
    return mapped(scores, preference, mask, bias)


def exchange(run, params, filled: Float[Array, "E S ..."]) -> Float[Array, "E S O"]:
    """Sends slots to their experts' devices, runs them there, and sends the outputs back."""
    arrived = jax.lax.all_to_all(filled, EXPERT, split_axis=0, concat_axis=1, tiled=True)
    return jax.lax.all_to_all(run(params, arrived), EXPERT, split_axis=1, concat_axis=0, tiled=True)


def gathered(
    expert: ExpertFunction, params, x: Float[Array, "T ..."], routing: Routing, queues: Queues | None = None
) -> Float[Array, "T O"]:
    """Runs this device's experts on the tokens of all devices of its replica, by `ragged`; drops nothing at any load.

    Tokens and assignments are gathered, and sums of outputs scattered. A device has room for `ROOM` times its even
    share of assignments. Where it has more, all of them come in turns of that size, whose gradients compute them again.
    """
    devices, device, experts = jax.lax.axis_size(EXPERT), jax.lax.axis_index(EXPERT), len(jax.tree.leaves(params)[0])
    owner = jnp.where(routing.kept, routing.expert, -1)
    integers = jnp.stack([routing.token + device * len(x), owner], 1)
    tokens, weight, integers = jax.lax.all_gather((x, routing.weight, integers), EXPERT, tiled=True)
    token, local = integers[:, 0], integers[:, 1] - device * experts
    is_local = (local >= 0) & (local < experts)
    room = min(len(local), math.ceil(ROOM * len(local) / devices))
    rank, count = jnp.cumsum(is_local) - 1, is_local.sum()

    def turn(params, tokens, weight, number):
        """Adds up what the experts make of assignments `number` x room, and so many after it."""
        slot = jnp.where(is_local & (rank >= number * room), rank - number * room, room)
        source = jnp.full(room, len(local)).at[slot].set(jnp.arange(len(local)), mode="drop")
        fetch = lambda a: a.at[source].get(mode="fill", fill_value=0)  # noqa: E731
        scores = jnp.zeros((len(tokens), experts))  # its axes count tokens and experts
        numbers = (fetch(token), fetch(local), fetch(weight), source < len(local), jnp.zeros_like(source))
        return ragged(expert, params, tokens, Routing(scores, *numbers))

    def once(params, tokens, weight):
        return turn(params, tokens, weight, 0)

    @jax.checkpoint
    def in_turns(params, tokens, weight):
        def add(outputs, number):
            more = lambda outputs: outputs + turn(params, tokens, weight, number)  # noqa: E731
            return jax.lax.cond(number * room < count, more, lambda outputs: outputs, outputs), None

        shape = jax.eval_shape(once, params, tokens, weight)
        return jax.lax.scan(jax.checkpoint(add), jnp.zeros(shape.shape, shape.dtype), jnp.arange(turns))[0]

    turns = -(-len(local) // room)
    run = once if turns == 1 else partial(jax.lax.cond, count <= room, once, in_turns)
    return jax.lax.psum_scatter(run(params, tokens, weight), EXPERT, tiled=True)


#: Dispatch -> its form on each device of an axis `expert` of several, with the device's experts and its own tokens.
EXCHANGED: dict[str, Callable[..., Array]] = {"slots": partial(slots, exchange=exchange), "ragged": gathered}


def check(mesh: Mesh, experts: int, tokens: int, group_size: int) -> None:
    """Refuses experts, or groups of tokens, that the devices cannot share evenly.

    Raises:
      UserError: names the axis or the group size, and a value that works.
    """
    if {DATA, EXPERT} - mesh.shape.keys() or mesh.size > mesh.shape[DATA] * mesh.shape[EXPERT]:
        raise UserError(f"mesh {dict(mesh.shape)}: a layer shares tokens over the axes {DATA!r} and {EXPERT!r} alone")
    devices = mesh.shape[EXPERT]
    if experts % devices:
        fits = max(n for n in range(1, devices + 1) if experts % n == 0)
        raise UserError(f"{devices} devices of the mesh's axis {EXPERT!r} cannot share {experts} experts; use {fits}")
    groups = tokens / group_size
    if groups % mesh.size:
        sizes = [n for n in range(1, group_size + 1) if group_size % n == 0 and tokens % (n * mesh.size) == 0]
        mend = f"use group_size={sizes[-1]}" if sizes else f"use a multiple of {mesh.size} tokens"
        problem = f"{tokens} tokens make {groups:g} groups, no multiple of {mesh.size} devices"
        raise UserError(f"group_size={group_size}: {problem}; {mend}")
