"""Runs over devices: one mesh axis `run`, and within a device one run after the other or all at once.

Measured on 2 CPU cores (BUILD_NOTES.md): two host devices that each map their runs one after the other are 1.4x faster
than one device for depth-3 experts, whose weights then stay in cache, and no slower than vmap for constant experts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from ml_collections import ConfigDict

from routed.config import TRACED, flatten
from routed.run import Program, program
from routed.words import UserError


def split_host() -> None:
    """On a CPU, makes a device of every core, unless the user already chose a number. Before JAX's first use only."""
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports each accelerator that is not there
    chosen = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if chosen < 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))


def make_mesh(config: ConfigDict) -> Mesh:
    """The mesh of `mesh.run` devices (0: all).

    Raises:
      UserError: more devices asked for than there are.
    """
    devices = jax.devices()
    wanted = config.mesh.run or len(devices)
    if wanted > len(devices):
        raise UserError(
            f"config key mesh.run={wanted}: this machine has {len(devices)} devices; use at most that, or 0 for all"
        )
    return jax.make_mesh((wanted,), ("run",), axis_types=(AxisType.Auto,), devices=devices[:wanted])


class Compiled(NamedTuple):
    """The program of a group, compiled for batches of `runs` runs.

    start(seeds, settings) -> (worlds, states); advance(active, steps, seeds, settings, worlds, states) -> states, where
    every argument has a leading axis [runs].
    """

    runs: int
    start: Callable[..., Any]
    advance: Callable[..., Any]
    place: Callable[[Any], Any]
    batching: str
    seconds: float
    bytes: int


def compile_group(config: ConfigDict, pool: int, runs: int, mesh: Mesh) -> Compiled:
    """Compiles the group's program for `runs` runs at a time; `runs` is a multiple of the mesh's devices."""
    one: Program = program(config, pool)
    spec = PartitionSpec("run")

    def over_runs(function):
        mapped = _mapper(batching(config, mesh))(function)
        return jax.shard_map(mapped, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    begun = time.perf_counter()
    seeds, settings = np.zeros(runs, np.uint32), stack_settings([traced(config)] * runs)
    active, steps = np.ones(runs, bool), np.zeros(runs, np.int32)
    start = compiled(jax.jit(over_runs(one.start)).lower(seeds, settings))
    worlds, states = jax.eval_shape(over_runs(one.start), seeds, settings)
    sharding = NamedSharding(mesh, spec)
    shaped = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        (active, steps, seeds, settings, worlds, states),
    )
    advance = compiled(jax.jit(over_runs(one.chunk), donate_argnums=5).lower(*shaped))
    return Compiled(
        runs=runs,
        start=start,
        advance=advance,
        place=lambda tree: jax.device_put(tree, sharding),
        batching=batching(config, mesh),
        seconds=time.perf_counter() - begun,
        bytes=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((worlds, states))),
    )


def compiled(lowered: Lowered) -> Any:
    """Compiles; for a CPU with YNNPACK for reductions only: it slows batched products down (BUILD_NOTES.md, section 4)."""
    if jax.default_backend() == "cpu":
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # a release that does not know the option
            return lowered.compile(
                compiler_options={"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
            )
    return lowered.compile()


def bytes_of_run(config: ConfigDict, pool: int) -> int:
    """Bytes of one run's world and state, from their shapes."""
    shapes = jax.eval_shape(program(config, pool).start, np.uint32(0), traced(config))
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def traced(config: ConfigDict) -> dict[str, bool | int | float]:
    """The traced settings of a config."""
    flat = flatten(config)
    return {key: flat[key] for key in TRACED}


def stack_settings(runs: list[dict[str, bool | int | float]]) -> dict[str, np.ndarray]:
    """Settings of several runs as arrays [R]: bool, int32 or float32 by the declared type."""
    kinds = {bool: np.bool_, int: np.int32, float: np.float32}
    return {key: np.array([run[key] for run in runs], kinds[type(runs[0][key])]) for key in runs[0]}


def batching(config: ConfigDict, mesh: Mesh) -> str:
    """How the runs of one device are batched: `map`, one after the other, or `vmap`, all at once."""
    if config.mesh.batching != "auto":
        return config.mesh.batching
    return "map" if mesh.devices.flat[0].platform == "cpu" else "vmap"


def _mapper(batching: str):
    if batching == "vmap":
        return jax.vmap
    return lambda function: lambda *args: jax.lax.map(lambda item: function(*item), args)
