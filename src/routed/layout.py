"""Runs over devices: one mesh axis `run`, and within a device one run after the other or all at once.

Measured on 2 CPU cores (BUILD_NOTES.md): two host devices that each map their runs one after the other are 1.4x faster
than one device for depth-3 experts, whose weights then stay in cache, and no slower than vmap for constant experts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from ml_collections import ConfigDict

from routed.config import TRACED, flatten
from routed.dispatch import DATA, EXPERT
from routed.kinds import kind_of
from routed.models import expert_axis
from routed.run import Program
from routed.words import UserError


def split_host() -> None:
    """On a CPU, makes a device of every core, unless the user already chose a number. Before JAX's first use only."""
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports each accelerator that is not there
    chosen = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if chosen < 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))


def steps_fed(config: ConfigDict) -> int:
    """Steps that are fed at once, and after which a batch is saved."""
    return config.checkpoint.every or config.eval_every


def keep_programs(workdir: pathlib.Path) -> None:
    """Compiled programs stay in the workdir, unless JAX_COMPILATION_CACHE_DIR names a place that many share."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(workdir / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def make_mesh(config: ConfigDict) -> Mesh:
    """The mesh of `mesh.run` devices (0: all), or of `mesh.data` x `mesh.expert` ones that share each run.

    Raises:
      UserError: more devices asked for than there are.
    """
    devices = jax.devices()
    shared = config.mesh.data * config.mesh.expert
    if jax.process_count() > 1 and (shared if shared > 1 else config.mesh.run or len(devices)) != len(devices):
        raise UserError(
            f"config keys mesh.run={config.mesh.run}, mesh.data={config.mesh.data}, mesh.expert={config.mesh.expert}: the"
            f" {jax.process_count()} processes have {len(devices)} devices in all, and a run over several processes uses all"
        )
    if shared > 1:
        if shared > len(devices):
            raise UserError(
                f"config keys mesh.data={config.mesh.data}, mesh.expert={config.mesh.expert}: this machine has"
                f" {len(devices)} devices; their product must be at most that"
            )
        shape = (1, config.mesh.data, config.mesh.expert)
        return jax.make_mesh(shape, ("run", DATA, EXPERT), axis_types=(AxisType.Auto,) * 3, devices=devices[:shared])
    wanted = config.mesh.run or len(devices)
    if wanted > len(devices):
        raise UserError(
            f"config key mesh.run={wanted}: this machine has {len(devices)} devices; use at most that, or 0 for all"
        )
    return jax.make_mesh((wanted,), ("run",), axis_types=(AxisType.Auto,), devices=devices[:wanted])


class Compiled(NamedTuple):
    """The program of a group, compiled for batches of `runs` runs.

    start(seeds, settings, given) -> (worlds, states); advance(active, steps, evaluated, seeds, settings, worlds, states, feed,
    given) -> states, where every argument but `given` has a leading axis [runs]. `place` and `place_given` put arguments on
    the devices; with several processes each puts its own part there. Of the feed a process makes its own part only: the runs
    and rows `fed`, which `place_feed` takes.
    """

    runs: int
    start: Callable[..., Any]
    advance: Callable[..., Any]
    place: Callable[[Any], Any]
    fed: tuple[slice, slice]
    place_feed: Callable[[Any], Any]
    place_given: Callable[[Any], Any]
    batching: str
    seconds: float
    bytes: int


def compile_group(config: ConfigDict, pool: int, runs: int, mesh: Mesh) -> Compiled:
    """Compiles the group's program for `runs` runs at a time; `runs` is a multiple of the mesh's axis `run`."""
    kind = kind_of(config)
    spread = mesh.size > mesh.shape["run"]
    one: Program = kind.program(config, pool, mesh if spread else None)
    over_runs = _one_spread_run if spread else _shared_out(config, mesh)

    begun = time.perf_counter()
    every = steps_fed(config)
    rows, whole = NamedSharding(mesh, PartitionSpec("run")), NamedSharding(mesh, PartitionSpec())
    batch = NamedSharding(mesh, PartitionSpec("run", None, (DATA, EXPERT))) if spread else rows
    given = _shaped(jax.tree.map(np.asarray, kind.given(config)), whole)
    seeds = _shaped(np.zeros(runs, np.uint32), rows)
    settings = _shaped(stack_settings([traced(config)] * runs), rows)
    flags, steps = _shaped(np.ones(runs, bool), rows), _shaped(np.zeros(runs, np.int32), rows)
    feed = jax.tree.map(lambda a: jax.ShapeDtypeStruct((runs, *a.shape), a.dtype), kind.feed_shape(config, every))
    worlds, states = jax.eval_shape(over_runs(one.start), seeds, settings, given)
    held = jax.tree_util.tree_map_with_path(lambda path, a: _sharding(path, a, mesh), states) if spread else rows
    start = compiled(jax.jit(over_runs(one.start), out_shardings=(rows, held)).lower(seeds, settings, given), kind.fuse)
    worlds = _shaped(worlds, rows)
    states = jax.tree.map(_shaped, states, held) if spread else _shaped(states, rows)
    lowered = jax.jit(over_runs(one.chunk), donate_argnums=6, out_shardings=held).lower(
        flags, steps, flags, seeds, settings, worlds, states, _shaped(feed, batch), given
    )
    advance = compiled(lowered, kind.fuse)
    return Compiled(
        runs=runs,
        start=start,
        advance=advance,
        place=partial(_place, rows),
        fed=(fed := _part_of_process(batch, (runs, every, config.batch_size))),
        place_feed=partial(_place_feed, batch, fed, (runs, config.batch_size)),
        place_given=partial(_place, whole),
        batching="spread over devices" if spread else batching(config, mesh),
        seconds=time.perf_counter() - begun,
        bytes=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((worlds, states))),
    )


def _place(sharding: NamedSharding, tree):
    """The host's arrays on the devices of this process, whichever part of them belongs there."""
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda part: a[part]), arrays)


def _part_of_process(sharding: NamedSharding, shape: tuple[int, int, int]) -> tuple[slice, slice]:
    """Runs and rows, of a feed [runs, steps, rows], from the first to the last that this process's devices hold."""
    parts = [part for part in sharding.addressable_devices_indices_map(shape).values() if part is not None]
    first, last = (
        slice(min(p[axis].start or 0 for p in parts), max(p[axis].stop or shape[axis] for p in parts))
        for axis in (0, 2)
    )
    return first, last


def _place_feed(sharding: NamedSharding, fed: tuple[slice, slice], whole: tuple[int, int], tree):
    """Runs and rows `fed` [runs, steps, rows, ...] of a feed that has `whole` of them, on the devices of this process."""

    def place(made):
        shape = (whole[0], made.shape[1], whole[1], *made.shape[3:])

        def part(index):
            own = [
                slice((i.start or 0) - f.start, (i.stop or n) - f.start)
                for i, f, n in zip(index[::2], fed, whole, strict=False)
            ]
            return made[own[0], :, own[1]]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(place, tree)


def _shaped(tree, sharding):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def _shared_out(config: ConfigDict, mesh: Mesh):
    """Runs shared out over the axis `run`; the last argument is the same for all."""
    mapper = _mapper(batching(config, mesh))

    def over_runs(function):
        def local(*args):
            *own, given = args
            return mapper(lambda *one: function(*one, given))(*own)

        def mapped(*args):
            specs = (PartitionSpec("run"),) * (len(args) - 1) + (PartitionSpec(),)
            return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("run"), check_vma=False)(
                *args
            )

        return mapped

    return over_runs


def _one_spread_run(function):
    """A batch of one run, which the layer itself shares out over the axes `data` and `expert`."""

    def mapped(*args):
        *own, given = args
        made = function(*jax.tree.map(lambda a: a[0], own), given)
        return jax.tree.map(lambda a: a[None], made)

    return mapped


def _sharding(path, leaf, mesh: Mesh) -> NamedSharding:
    """Experts and what the optimiser knows of them live on the devices of the axis `expert`, all else on each device."""
    axis = expert_axis(path)  # of one run; a batch of runs has one more in front
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * (axis + 1), EXPERT)
    return NamedSharding(mesh, spec)


def compiled(lowered: Lowered, fuse: str = "LIBRARY_FUSION_TYPE_REDUCE") -> Any:
    """Compiles; for a CPU with YNNPACK for what `fuse` names only (BUILD_NOTES.md, section 4).

    It slows batched products down. Reductions: twice the speed for the softmax of a router, a third of the processor time lost
    for that of attention.
    """
    if jax.default_backend() == "cpu":
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # a release that does not know the option
            return lowered.compile(compiler_options={"xla_cpu_experimental_ynn_fusion_type": fuse})
    return lowered.compile()


def bytes_of_run(config: ConfigDict, pool: int) -> int:
    """Bytes of one run's world and state, from their shapes."""
    kind = kind_of(config)
    shapes = jax.eval_shape(kind.program(config, pool, None).start, np.uint32(0), traced(config), kind.given(config))
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
