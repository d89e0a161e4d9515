"""Products of rows sorted by expert with their expert's matrix, as JAX and tokamax have them for GPUs.

Cases of `bench gpu` only. Where one of them wins it belongs into `kernels/megablox.py`, beside the kernels of TPUs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from routed.kernels.grouped import product_of
from routed.system.platform import platform

#: Blocks of rows, of columns and of the axis that is summed over, copies in flight: 160 KiB of a core's 227. Sizes of
#: matrices are multiples of these.
TILING = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}
#: JAX's name of a Hopper's capability.
HOPPER = "9.0"
#: Module that JAX's wheels must contain for its Triton lowering, and the flag that asks for it.
TRITON = "jax._src.lax.pallas_lowerings.gpu.ragged_dot"
TRITON_FLAG = "jax_ragged_dot_use_gpu_pallas_triton_lowering"
#: Contractions of rows [A, K] with weights [E, K, N], of rows [A, N] with the same, and of rows with rows.
BY_GROUP, TRANSPOSED, OUTER = (
    jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(axes, ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=groups
    )
    for axes, groups in ((((1,), (1,)), [0]), (((1,), (2,)), [0]), (((0,), (0,)), []))
)


class Product(NamedTuple):
    """A grouped product: function as `grouped.product`, and the reason why it cannot run here, None if it can.

    `missing(ahead)`: True where programs are only compiled, for another machine.
    """

    run: Callable[[Float[Array, "A K"], Float[Array, "E K N"], Int[Array, " E"]], Float[Array, "A N"]]
    missing: Callable[[bool], str | None]


def _general(name: str) -> Callable[..., Array]:
    """Returns `ragged_dot_general` of a library: jax.lax or tokamax."""

    def dot(rows, right, sizes, dimensions):
        if name == "tokamax":  # on a GPU its kernels alone, and not XLA's dense products in their place
            ways = ("mosaic", "triton") if platform() == "gpu" else ("xla",)
            tokamax = importlib.import_module("tokamax")
            return tokamax.ragged_dot_general(rows, right, sizes, dimensions, implementation=ways)
        return jax.lax.ragged_dot_general(rows, right, sizes, dimensions)

    return dot


def _product(name: str) -> Callable[..., Array]:
    dot = _general(name)
    return product_of(
        lambda rows, weights, sizes, transposed: dot(rows, weights, sizes, TRANSPOSED if transposed else BY_GROUP),
        lambda rows, columns, sizes: dot(rows, columns, sizes, OUTER),
    )


def _kernel(module: str, name: str) -> Callable[..., Array]:
    """Returns a kernel for Hopper with its blocks; loading it takes a second."""
    kernels = importlib.import_module(f"jax.experimental.pallas.ops.gpu.{module}")
    return functools.partial(getattr(kernels, name), **TILING)


def _mosaic(rows, weights, sizes, transposed):
    return _kernel("ragged_dot_mgpu", "ragged_dot")(rows, weights, group_sizes=sizes, transpose_rhs=transposed)


def _mosaic_outer(rows, columns, sizes):
    return _kernel("transposed_ragged_dot_mgpu", "transposed_ragged_dot")(rows, columns, group_sizes=sizes)


def _no_hopper(ahead: bool) -> str | None:
    device = jax.devices()[0]
    if ahead or getattr(device, "compute_capability", "") == HOPPER:
        return None
    return f"{device.device_kind} is no Hopper, for which these kernels of JAX are"


def _no_triton(ahead: bool) -> str | None:
    try:
        spec = importlib.util.find_spec(TRITON)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        return f"jax {jax.__version__} has no Triton lowering of ragged_dot (jax issue 40888): try a newer jax"
    return None if ahead or platform() == "gpu" else f"{platform()} is no GPU, for which this lowering is"


def _no_tokamax(ahead: bool) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed: pip install tokamax"
    return None


#: name -> product. Triton is the lowering of `ragged_dot` under a flag, see `set_flags`.
PRODUCTS = {
    "mosaic": Product(product_of(_mosaic, _mosaic_outer), _no_hopper),
    "triton": Product(_product("jax"), _no_triton),
    "tokamax": Product(_product("tokamax"), _no_tokamax),
    "ragged_dot": Product(_product("jax"), lambda ahead: None),
}


def set_flags(name: str) -> None:
    """Sets JAX's flags for programs with the product `name`, before they are lowered."""
    if hasattr(jax.config, TRITON_FLAG):
        jax.config.update(TRITON_FLAG, name == "triton")
