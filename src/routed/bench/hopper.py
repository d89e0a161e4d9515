"""Dropless experts through the kernels that JAX ships for Hopper (`ragged_dot_mgpu`), a case of the bench only.

They were traced and lowered, and nobody has run them: `bench gpu` compares their gradients with the gradients of the
blocks that training uses, then their time. Where they win they belong into `kernels/megablox.py`, beside the kernels of
TPUs.
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed.contracts import ExpertFunction, Queues, Routing
from routed.kernels.grouped import grouped
from routed.kernels.ragged import sorted_outputs

#: Blocks of rows, of columns and of the axis that is summed over, copies in flight: 160 KiB of a core's 227. Sizes of
#: matrices are multiples of these.
TILING = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}
#: JAX's name of a Hopper's capability.
HOPPER = "9.0"


def available() -> bool:
    """True if the first device is a Hopper."""
    return getattr(jax.devices()[0], "compute_capability", "") == HOPPER


def ragged(
    expert: ExpertFunction, params, x: Float[Array, "T D"], routing: Routing, places: Queues | None = None
) -> Float[Array, "T O"]:
    """Dispatches as `ragged`, through these kernels: for 16-bit rows, and experts of nn.Dense layers alone."""
    del places
    outputs = sorted_outputs(expert, params, x, routing, functools.partial(grouped, multiply=product))
    return outputs.combined(routing.weight, len(x))


@jax.custom_vjp
def product(rows: Float[Array, "A K"], weights: Float[Array, "E K N"], sizes: Int[Array, " E"]) -> Float[Array, "A N"]:
    """Multiplies the rows of expert e with weights[e]; `sizes` sum to the number of rows."""
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
    """Returns a kernel with its blocks; loading it takes a second."""
    kernels = importlib.import_module(f"jax.experimental.pallas.ops.gpu.{module}")
    return functools.partial(getattr(kernels, name), **TILING)


def distance(first, second) -> float:
    """Returns the largest relative distance of the leaves of two trees."""

    def relative(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

    return max(float(leaf) for leaf in jax.tree.leaves(jax.tree.map(relative, first, second)))
