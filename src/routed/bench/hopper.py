"""Dropless experts through the kernels that JAX ships for Hopper (`ragged_dot_mgpu`), as a case of the bench only.

They were traced and lowered here, and nobody ran them: `bench gpu` compares their gradients with those of the blocks that training uses,
then their time. Where they win they belong into `kernels/megablox.py`, beside those of TPUs.
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed.contracts import ExpertFunction, Places, Routing
from routed.kernels.grouped import grouped
from routed.kernels.ragged import sorted_outputs

#: Blocks of rows, columns and of the axis that is summed over, copies in flight: 160 KiB of the 227 that a core has. Sizes of matrices
#: are multiples of these.
TILING = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}
#: What JAX calls a Hopper's capability.
HOPPER = "9.0"


def is_here() -> bool:
    """Is the first device a Hopper?"""
    return getattr(jax.devices()[0], "compute_capability", "") == HOPPER


def ragged(
    expert: ExpertFunction, params, x: Float[Array, "T D"], routing: Routing, places: Places | None = None
) -> Float[Array, "T O"]:
    """The dispatch `ragged` through these kernels: for 16-bit rows, and experts whose parameters are in nn.Dense layers."""
    del places
    outputs = sorted_outputs(expert, params, x, routing, functools.partial(grouped, multiply=product))
    return outputs.combined(routing.weight, len(x))


@jax.custom_vjp
def product(rows: Float[Array, "A K"], weights: Float[Array, "E K N"], sizes: Int[Array, " E"]) -> Float[Array, "A N"]:
    """Rows of expert e times weights[e]; `sizes` sum to the number of rows."""
    return _kernel("ragged_dot_mgpu", "ragged_dot")(rows, weights, group_sizes=sizes)


def _save(rows, weights, sizes):
    return product(rows, weights, sizes), (rows, weights, sizes)


def _backward(saved, cotangent):
    rows, weights, sizes = saved
    of_rows = _kernel("ragged_dot_mgpu", "ragged_dot")(cotangent, weights, group_sizes=sizes, transpose_rhs=True)
    outer = _kernel("transposed_ragged_dot_mgpu", "transposed_ragged_dot")
    return of_rows, outer(rows, cotangent, group_sizes=sizes), None


product.defvjp(_save, _backward)


def _kernel(module: str, name: str):
    """A kernel with its blocks; loading it takes a second."""
    found = importlib.import_module(f"jax.experimental.pallas.ops.gpu.{module}")
    return functools.partial(getattr(found, name), **TILING)


def difference(one, other) -> float:
    """The largest of the relative distances of two trees' leaves."""

    def of(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

    return max(float(leaf) for leaf in jax.tree.leaves(jax.tree.map(of, one, other)))
