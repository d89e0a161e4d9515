"""Dropless dispatch at any load: assignments sorted by expert, each expert on its stretch of rows.

Experts run in two ways. `blocks` goes over the experts one after the other, in blocks of rows, for CPUs and GPUs.
`grouped` runs all of them at once through the kernels of TPUs, if they are made of `nn.Dense` layers.

Twin: `routed.layer.dispatch.direct.dense`, every expert on every token.
Measured: `jax.lax.ragged_dot` multiplies every row with every expert on CPUs and GPUs; for T = 8,192 and 64 experts a
step of blocks takes 35 ms on two cores, in 1/56 of the memory of one-hot dispatch (`python -m routed.bench dispatch`).
Delete when: `jax.lax.ragged_dot` and its gradients cost the FLOPs of the rows on every platform.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from routed.contracts import ExpertFunction, Queues, Routing
from routed.kernels.grouped import grouped, is_dense
from routed.kernels.ranks import ranks
from routed.system.platform import platform

#: Largest block of rows. On a GPU a block must keep all its cores busy.
BLOCK = {"cpu": 128, "gpu": 1024, "tpu": 512}
#: Largest block of images on a CPU: what a network makes of them has to stay in cache, and few are to be there only to
#: fill a block.
IMAGES = 8


def ragged(
    expert: ExpertFunction, params, x: Float[Array, "T ..."], routing: Routing, queues: Queues | None = None
) -> Float[Array, "T O"]:
    """Sorts assignments by expert and runs each expert on its rows; neither capacity nor load changes the cost.

    Dropped assignments are sorted behind all others and belong to no expert.
    """
    return sorted_outputs(expert, params, x, routing).combined(routing.weight, len(x))


class Sorted(NamedTuple):
    """Outputs sorted by expert, then dropped rows and padding; the row of each assignment, the token of each row.

    They stay as they lie: each further pass over all of them takes as long as a product of the experts.
    """

    outputs: Float[Array, "R O"]
    row: Int[Array, " A"]
    token: Int[Array, " R"]  # as many as there are tokens: nobody's, read as zeros and written nowhere

    def measured(self, of: Callable[[Float[Array, "R O"]], Float[Array, " R"]]) -> Float[Array, " A"]:
        """Applies a function to the output of each assignment, in their order."""
        return of(self.outputs)[self.row]

    def combined(self, weight: Float[Array, " A"], tokens: int) -> Float[Array, "T O"]:
        """Returns the weighted sum of each token's assignments."""
        weight = jnp.zeros(len(self.token), weight.dtype).at[self.row].set(weight, unique_indices=True)
        empty = jnp.zeros((tokens, self.outputs.shape[-1]), self.outputs.dtype)
        return empty.at[self.token].add(weight[:, None].astype(empty.dtype) * self.outputs, mode="drop")


def sorted_outputs(
    expert: ExpertFunction, params, x: Float[Array, "T ..."], routing: Routing, run: Callable | None = None
) -> Sorted:
    """Runs each expert on its rows: by `run(expert, params, rows, sizes)`, or as is best for the platform."""
    if run is None and platform() == "tpu" and is_dense(expert, params, x):
        run = grouped
    row, sizes = _order(routing)
    size = 0 if run else _block(len(row), len(sizes), x.ndim)
    theirs = jnp.where(routing.kept, routing.token, len(x)).astype(jnp.int32)
    token = jnp.full(len(row) + size, len(x), jnp.int32).at[row].set(theirs, unique_indices=True)
    # As flat rows: XLA:CPU copies [4, 50] values in 2.3 times the time of 200.
    rows = x.reshape(len(x), -1).at[token].get(mode="fill", fill_value=0).reshape(-1, *x.shape[1:])
    if run:
        return Sorted(run(expert, params, rows, sizes), row, token)
    return Sorted(_blocks(expert, size, params, rows, jnp.cumsum(sizes) - sizes, sizes), row, token)


def _order(routing: Routing) -> tuple[Int[Array, " A"], Int[Array, " E"]]:
    """Returns each assignment's row, sorted by expert with dropped ones last, and the number of rows of each expert."""
    experts = routing.scores.shape[1]
    owner = jnp.where(routing.kept, routing.expert, experts)
    sizes = jnp.zeros(experts + 1, jnp.int32).at[owner].add(1)
    return (jnp.cumsum(sizes) - sizes)[owner] + ranks(owner, experts), sizes[:-1]


def alone(expert: ExpertFunction, params, x: Float[Array, "T ..."]) -> Float[Array, "T O"]:
    """Runs one expert on every token; on a CPU in blocks, so that activations stay in cache."""
    if platform() != "cpu":
        return expert(params, x)
    return blocks(expert, jax.tree.map(lambda leaf: leaf[None], params), x, jnp.array([len(x)]))


def blocks(expert: ExpertFunction, params, rows: Float[Array, "A ..."], sizes: Int[Array, " E"]) -> Float[Array, "A O"]:
    """Runs expert e on its `sizes[e]` rows, in blocks; rows behind the last expert's come back as zeros or garbage.

    FLOPs are those of the rows, rounded up to a block per expert, and an expert's weights and their gradient pass
    through memory once in each direction. The derivative is our own, since that of a scan would keep a copy of the
    weights for each block: it keeps the products of dense layers, a row for each row, and computes all else again.
    """
    size = _block(len(rows), len(sizes), rows.ndim)
    padded = jnp.pad(rows, [(0, size), *[(0, 0)] * (rows.ndim - 1)])  # the last block may read past the end
    return _blocks(expert, size, params, padded, jnp.cumsum(sizes) - sizes, sizes)[: len(rows)]


def _block(rows: int, experts: int, ndim: int) -> int:
    most = IMAGES if platform() == "cpu" and ndim == 4 else BLOCK[platform()]
    return max(8, min(most, 1 << max(0, rows // experts - 1).bit_length()))


def _cut(a: Array, start, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(a, start, size)


def _paste(a: Array, block: Array, start) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(a, block, start, 0)


def _forward(expert: ExpertFunction, size: int, params, rows, starts, sizes):
    return _through(lambda weights, block: [_whole(expert, weights, block)], size, params, rows, starts, sizes)[0]


def _whole(expert: ExpertFunction, weights, block):
    """Returns the outputs of a block; a constant expert has one row for all."""
    outputs = expert(weights, block)
    return jnp.broadcast_to(outputs, (len(block), *outputs.shape[1:]))


def _through(run: Callable[[Any, Array], list[Array]], size: int, params, rows, starts, sizes) -> list[Array]:
    """Returns arrays with a row for each row, of which `run` makes those of a block."""
    shapes = jax.eval_shape(run, jax.tree.map(lambda leaf: leaf[0], params), rows[:size])

    def of_expert(arrays, item):
        weights, start, count = item

        def block(i, arrays):  # what it writes past its expert's rows, the next expert overwrites
            at = start + i * size
            return [
                _paste(whole, part, at) for whole, part in zip(arrays, run(weights, _cut(rows, at, size)), strict=True)
            ]

        return jax.lax.fori_loop(0, -(-count // size), block, arrays), None

    empty = [jnp.zeros((len(rows), *array.shape[1:]), array.dtype) for array in shapes]
    return jax.lax.scan(of_expert, empty, (params, starts, sizes))[0]


def _pulled(expert: ExpertFunction, weights, block) -> tuple[Array, list[Array], Any, list[int]]:
    """Returns a block's outputs, leaves and structure of their derivative, and the indices of leaves to keep.

    Weights and rows are there anyway. Where anything else has no row for each row (patches of images, products of
    weights), nothing is kept.
    """
    run = jax.checkpoint(partial(_whole, expert), policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
    outputs, derivative = jax.vjp(run, weights, block)
    leaves, structure = jax.tree.flatten(derivative)
    longer = jax.eval_shape(  # by a row, as anything may have as many rows as a block
        lambda weights, block: jax.tree.leaves(jax.vjp(run, weights, block)[1]),
        weights,
        jax.ShapeDtypeStruct((len(block) + 1, *block.shape[1:]), block.dtype),
    )
    known_leaves = {id(leaf) for leaf in jax.tree.leaves((weights, block))}
    more = [index for index, leaf in enumerate(leaves) if id(leaf) not in known_leaves]
    fits = len(longer) == len(leaves) and all(
        (leaves[index].shape[:1], longer[index].shape[:1]) == ((len(block),), (len(block) + 1,)) for index in more
    )
    return outputs, leaves, structure, more if fits else []


_blocks = jax.custom_vjp(_forward, nondiff_argnums=(0, 1))


def _save(expert, size, params, rows, starts, sizes):
    asked = () if rows.perturbed else None  # what is saved holds arrays or nothing
    args = (params, rows, starts, sizes)
    args = jax.tree.map(lambda a: a.value, args, is_leaf=lambda a: hasattr(a, "perturbed"))

    def run(weights, block):
        outputs, leaves, _, indices = _pulled(expert, weights, block)
        return [outputs, *(leaves[index] for index in indices)]

    outputs, *saved_leaves = _through(run, size, *args)
    return outputs, (*args, saved_leaves, asked)


def _backward(expert: ExpertFunction, size: int, saved, cotangent) -> tuple[Any, Array | None, None, None]:
    """Returns gradients of the weights, and of the rows where something learns from them: data has none."""
    params, rows, starts, sizes, saved_leaves, asked = saved
    if isinstance(cotangent, SymbolicZero):
        return None, None, None, None

    def of_expert(gradient, item):
        weights, start, count = item

        def block(i, carry):
            total, gradient = carry
            at = start + i * size
            _, leaves, structure, indices = _pulled(expert, weights, _cut(rows, at, size))
            for index, array in zip(indices, saved_leaves, strict=True):
                leaves[index] = _cut(array, at, size)
            mine = (jnp.arange(size) + i * size < count)[:, None]
            of_weights, of_rows = jax.tree.unflatten(structure, leaves)(jnp.where(mine, _cut(cotangent, at, size), 0))
            gradient = None if asked is None else _paste(gradient, of_rows, at)
            return jax.tree.map(jnp.add, total, of_weights), gradient

        # In float32 at least: bfloat16 loses a block's share once the sum over blocks is some 256 times as large.
        wide = lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))  # noqa: E731
        start_total = jax.tree.map(wide, weights)
        total, gradient = jax.lax.fori_loop(0, -(-count // size), block, (start_total, gradient))
        return gradient, jax.tree.map(lambda array, leaf: array.astype(leaf.dtype), total, weights)

    start = None if asked is None else jnp.zeros_like(rows)
    gradient, totals = jax.lax.scan(of_expert, start, (params, starts, sizes))
    return totals, gradient, None, None


_blocks.defvjp(_save, _backward, symbolic_zeros=True)
