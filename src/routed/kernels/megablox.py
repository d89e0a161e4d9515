"""Products of rows sorted by expert with their expert's matrix, by the TPU kernels that JAX ships.

Twin: `jax.lax.ragged_dot`, which all other platforms run (for tests only: there it multiplies every row with every
expert).
Measured: on a TPU `jax.lax.ragged_dot` has a kernel, but not for the gradient of the weights: 31 times the cycles of a
dense FFN at 64 experts.
Delete when: the gradient of the weights by `jax.lax.ragged_dot` costs the FLOPs of the rows on TPUs.
"""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed.system.platform import platform

#: Bytes of the blocks of a kernel, which a TPU core keeps on the chip, twice each and their sum in float32: of 16 MiB
#: by default.
ON_CHIP = 12 * 2**20
#: Largest and smallest block of rows; columns below which K is cut too.
ROWS, COLUMNS = (512, 128), 512


def product(
    rows: Float[Array, "A K"], weights: Float[Array, "E ..."], sizes: Int[Array, " E"], *, transposed: bool
) -> Float[Array, "A N"]:
    """Returns rows of expert e times weights[e], [K, N], or if `transposed` times its transpose, [N, K].

    `sizes` are the rows of each expert; what is behind them is garbage.
    """
    if platform() != "tpu":
        return jax.lax.ragged_dot(rows, weights.swapaxes(1, 2) if transposed else weights, sizes)
    return _product(_megablox().gmm, rows, weights, sizes, transposed)


def outer(rows: Float[Array, "A K"], columns: Float[Array, "A N"], sizes: Int[Array, " E"]) -> Float[Array, "E K N"]:
    """Returns rows^T columns, over the rows of each expert."""
    if platform() != "tpu":
        contract = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        return jax.lax.ragged_dot_general(rows, columns, sizes, contract)
    return _outer(_megablox().tgmm, rows, columns, sizes)


def _megablox():
    """Loads the module of the kernels, which its package hides behind a function of the same name, in a second."""
    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def _product(gmm, rows, weights, sizes, transposed: bool, **options):
    columns = weights.shape[1 if transposed else 2]
    tiling = tiles(len(rows), len(sizes), rows.shape[1], columns, rows.dtype.itemsize)
    outputs = gmm(_padded(rows, tiling[0]), weights, sizes, rows.dtype, tiling, transpose_rhs=transposed, **options)
    return outputs[: len(rows)]


def _outer(tgmm, rows, columns, sizes, **options):
    tiling = tiles(len(rows), len(sizes), rows.shape[1], columns.shape[1], rows.dtype.itemsize, sums=True)
    return tgmm(
        _padded(rows, tiling[0]).swapaxes(0, 1), _padded(columns, tiling[0]), sizes, rows.dtype, tiling, **options
    )


def tiles(rows: int, experts: int, k: int, n: int, itemsize: int, *, sums: bool = False) -> tuple[int, int, int]:
    """Returns the blocks of rows, of the axis K and of the axis N.

    A block at the border of two experts is computed for both, so blocks of rows are a quarter of an expert's mean
    number, if that is not too few to hide the reading of its weights; K and N stay whole as long as blocks fit on the
    chip: then weights are read once for all rows of an expert. With `sums` the result is [K, N].
    """
    block = 1 << max(0, -(-rows // (4 * experts)) - 1).bit_length()
    block = min(max(block, ROWS[1]), ROWS[0])

    def bytes_on_chip(k: int, n: int) -> int:
        result = k * n if sums else block * n
        return 2 * itemsize * (block * k + (block * n if sums else k * n) + result) + 4 * result

    while bytes_on_chip(k, n) > ON_CHIP:
        k, n = (k, _half(n)) if n > COLUMNS else (_half(k), n)
    return block, k, n


def _half(size: int) -> int:
    """Returns about half of a size, in whole lanes."""
    return max(128, -(-size // 256) * 128)


def _padded(rows: Array, block: int) -> Array:
    return jnp.pad(rows, [(0, -len(rows) % block), (0, 0)])
