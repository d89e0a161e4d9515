"""The devices of this process and of all: cores of a host, the mesh, and arrays put where they belong."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.layer.dispatch.parallel import DATA, EXPERT
from routed.layer.selection import SELECTIONS
from routed.models import expert_axis


def split_host() -> None:
    """On a CPU, makes a device of every core, unless the user already chose a number. Before JAX's first use only.

    Raises:
      UserError: JAX is told to compute in 64 bits, which would change every number and which the program is not made for.
    """
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise UserError("JAX_ENABLE_X64 is set, and runs are in 32 bits: unset it")
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports each accelerator that is not there
    chosen = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if chosen < 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))


#: Threads of a virtual device of a CPU that shares runs with others, where it may wait in several collectives at once.
THREADS = 4


def allow_collectives(configs: Sequence[ConfigDict]) -> None:
    """Gives a CPU's devices that share a run threads to wait for each other in. Before JAX's first use only.

    XLA:CPU has a thread a device or core, and runs collectives side by side that do not depend on each other: once every thread waits
    for a device that has none, it ends the process after 40 s. That was seen where experts are shared out and compete; where devices share
    nothing but rows one thread each is enough, and half as fast again as four (`python -m routed.bench lm`).
    """
    shared = max((config.mesh.data * config.mesh.expert for config in configs), default=1)
    if shared > 1:
        alone = all(config.mesh.expert == 1 and not _contested(config) for config in configs)
        threads = (1 if alone else THREADS) * max(shared, len(os.sched_getaffinity(0)))
        os.environ.setdefault("PJRT_NPROC", str(threads))


def _contested(config: ConfigDict) -> bool:
    names = (config.selection.name, config.selection.eval.name) if "selection" in config else ()
    return any(SELECTIONS[name].forward is not None for name in names)


def keep_programs(workdir: pathlib.Path) -> None:
    """Compiled programs stay in the workdir, unless JAX_COMPILATION_CACHE_DIR names a place that many share."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(workdir / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] = ()) -> Mesh:
    """The mesh of `mesh.run` devices (0: all), or of `mesh.data` x `mesh.expert` ones that share each run; of those here by default.

    Raises:
      UserError: more devices asked for than there are.
    """
    where, devices = ("the topology" if devices else "this machine"), list(devices or jax.devices())
    shared = config.mesh.data * config.mesh.expert
    if jax.process_count() > 1 and (shared if shared > 1 else config.mesh.run or len(devices)) != len(devices):
        raise UserError(
            f"config keys mesh.run={config.mesh.run}, mesh.data={config.mesh.data}, mesh.expert={config.mesh.expert}: the"
            f" {jax.process_count()} processes have {len(devices)} devices in all, and a run over several processes uses all"
        )
    if shared > 1:
        if shared > len(devices):
            raise UserError(
                f"config keys mesh.data={config.mesh.data}, mesh.expert={config.mesh.expert}: {where} has"
                f" {len(devices)} devices; their product must be at most that"
            )
        shape = (1, config.mesh.data, config.mesh.expert)
        return _mesh(shape, ("run", DATA, EXPERT), devices[:shared])
    wanted = config.mesh.run or len(devices)
    if wanted > len(devices):
        raise UserError(
            f"config key mesh.run={wanted}: {where} has {len(devices)} devices; use at most that, or 0 for all"
        )
    return _mesh((wanted,), ("run",), devices[:wanted])


def _mesh(shape: tuple[int, ...], names: tuple[str, ...], devices: list[jax.Device]) -> Mesh:
    """Neighbours in the mesh are neighbours in the machine, where JAX knows how."""
    types = (AxisType.Auto,) * len(shape)
    try:
        return jax.make_mesh(shape, names, axis_types=types, devices=devices)
    except NotImplementedError:  # 8 x 8 on the 4 x 4 x 4 of a v4 or v5p: an axis of the machine is part of both
        found = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except AssertionError:  # a described v4, whose chips are two devices each
        found = np.array(devices).reshape(shape)
    return Mesh(found, names, axis_types=types)


def place(sharding: NamedSharding, tree: Any) -> Any:
    """The host's arrays on the devices of this process, whichever part of them belongs there."""
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda part: a[part]), arrays)


class LocalSlice(NamedTuple):
    """The runs and rows of a feed [runs, steps, rows, ...] that this process's devices hold, from the first to the last."""

    runs: slice
    rows: slice


def local_slice(sharding: NamedSharding, shape: tuple[int, int, int]) -> LocalSlice:
    """What of a feed of this shape [runs, steps, rows] this process has to make."""
    parts = [part for part in sharding.addressable_devices_indices_map(shape).values() if part is not None]
    runs, rows = (
        slice(min(p[axis].start or 0 for p in parts), max(p[axis].stop or shape[axis] for p in parts))
        for axis in (0, 2)
    )
    return LocalSlice(runs, rows)


def place_feed(sharding: NamedSharding, local: LocalSlice, whole: tuple[int, int], tree: Any) -> Any:
    """Puts this process's slice of a feed on its devices; `whole` are the runs and rows of all processes."""

    def place_one(made):
        shape = (whole[0], made.shape[1], whole[1], *made.shape[3:])

        def part(index):
            inner = [
                slice((i.start or 0) - mine.start, (i.stop or n) - mine.start)
                for i, mine, n in zip(index[::2], local, whole, strict=False)
            ]
            return made[inner[0], :, inner[1]]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(place_one, tree)


def state_sharding(path: tuple[Any, ...], mesh: Mesh) -> NamedSharding:
    """Experts and what the optimiser knows of them live on the devices of the axis `expert`, all else on each device."""
    axis = expert_axis(path)  # of one run; a batch of runs has one more in front
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * (axis + 1), EXPERT)
    return NamedSharding(mesh, spec)
