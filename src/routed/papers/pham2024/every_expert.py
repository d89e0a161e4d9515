"""Every expert on every token, one after the other or shared out over a mesh, for a layer that competes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from routed.contracts import ExpertFunction, Routing, SoftRouting
from routed.kernels.ragged import alone
from routed.layer.dispatch.direct import combine_weights, combined
from routed.layer.dispatch.parallel import BOTH, DATA, EXPERT


def one_by_one(
    expert: ExpertFunction, params, x: Float[Array, "T ..."], of: Callable[[Float[Array, "T O"]], Float[Array, " T"]]
) -> Float[Array, "T E"]:
    """Applies a function to the outputs of every expert on every token, one expert after the other; for no gradient."""
    return jax.lax.map(lambda weights: jnp.broadcast_to(of(alone(expert, weights, x)), len(x)), params).T


def parallel_outputs(expert: ExpertFunction, mesh: Mesh, params, x: Float[Array, "T ..."]) -> Float[Array, "E T O"]:
    """Returns outputs of all experts on all tokens: a device has those of its experts on its replica's tokens."""

    def local(params, x):
        tokens = jax.lax.all_gather(x, EXPERT, tiled=True)
        outputs = jax.vmap(expert, in_axes=(0, None))(params, tokens)
        # A constant expert has one row for all.
        return jnp.broadcast_to(outputs, (len(outputs), len(tokens), *outputs.shape[2:]))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(EXPERT), BOTH), out_specs=P(EXPERT, DATA), check_vma=False)
    return mapped(params, x)


def parallel_combined(
    mesh: Mesh, routing: Routing | SoftRouting, outputs: Float[Array, "E T O"]
) -> Float[Array, "T O"]:
    """Applies `combined` to shared outputs: weights travel to the experts, and sums of their outputs to the tokens."""

    def local(routing, outputs):
        tokens = len(routing.scores)
        if isinstance(routing, Routing):
            routing = routing._replace(token=routing.token - jax.lax.axis_index((DATA, EXPERT)) * tokens)
        weight = jax.lax.all_to_all(combine_weights(routing), EXPERT, split_axis=1, concat_axis=0, tiled=True)
        sums = combined(SoftRouting(weight, weight), outputs)
        return jax.lax.psum_scatter(sums, EXPERT, tiled=True)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(BOTH, P(EXPERT, DATA)), out_specs=BOTH, check_vma=False)
    return mapped(routing, outputs)
