"""The devices of this process and of all processes: cores of a host, the mesh, and arrays on their devices."""

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
from routed.engine import jax_flags
from routed.layer.dispatch.parallel import DATA, EXPERT, devices_of_run
from routed.layer.selection import SELECTIONS
from routed.models import expert_axis
from routed.plan.config import problem_of


def split_host() -> None:
    """Makes each core of a CPU a device, unless the user already chose a number. Before JAX's first use only.

    Raises:
      UserError: as `jax_flags.refuse_changed`.
    """
    jax_flags.refuse_changed()
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports each accelerator that is missing
    number = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if number < 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))


#: Threads of a CPU's virtual device that shares runs with other devices, where it may wait in several collectives at
#: once.
THREADS = 4


def allow_collectives(configs: Sequence[ConfigDict]) -> None:
    """Gives a CPU's devices that share a run enough threads to wait for each other. Before JAX's first use only.

    XLA:CPU has a thread a device or core, and runs independent collectives side by side: once every thread waits for a
    device that has none, XLA ends the process after 40 s. That happened where devices share experts that compete. Where
    devices share only rows, one thread each is enough, and half as fast again as four (`python -m routed.bench lm`).
    """
    shared = max((devices_of_run(config) for config in configs), default=1)
    if shared > 1:
        only_rows = all(config.mesh.expert == 1 and not contested(config) for config in configs)
        threads = (1 if only_rows else THREADS) * max(shared, len(os.sched_getaffinity(0)))
        os.environ.setdefault("PJRT_NPROC", str(threads))


def contested(config: ConfigDict) -> bool:
    """True if the experts of a config compete, in training or in evaluation."""
    if not problem_of(config).models[config.model].routed:
        return False
    return any(SELECTIONS[name].forward is not None for name in (config.selection.name, config.selection.eval.name))


def keep_programs(workdir: pathlib.Path) -> None:
    """Caches all compiled programs in the workdir, or in the shared folder that JAX_COMPILATION_CACHE_DIR names."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(workdir / "compiled"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:  # JAX leaves out what compiles within a second
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] = ()) -> Mesh:
    """The mesh of `mesh.run` devices (0: all), or of `mesh.data` x `mesh.expert` devices that share each run.

    Raises:
      UserError: the config needs more devices than `devices`, by default those of this machine; or a user's file has
        set a flag of JAX.
    """
    jax_flags.refuse_changed()
    owner, devices = ("the topology" if devices else "this machine"), list(devices or jax.devices())
    shared = devices_of_run(config)
    if jax.process_count() > 1 and (shared if shared > 1 else config.mesh.run or len(devices)) != len(devices):
        raise UserError(
            f"config keys mesh.run={config.mesh.run}, mesh.data={config.mesh.data}, mesh.expert={config.mesh.expert}:"
            f" the {jax.process_count()} processes have {len(devices)} devices in all, and a run over several processes"
            " uses all"
        )
    if shared > 1:
        if shared > len(devices):
            raise UserError(
                f"config keys mesh.data={config.mesh.data}, mesh.expert={config.mesh.expert}: {owner} has"
                f" {len(devices)} devices; their product must be at most that"
            )
        shape = (1, shared // config.mesh.expert, config.mesh.expert)
        return _mesh(shape, ("run", DATA, EXPERT), devices[:shared])
    count = config.mesh.run or len(devices)
    if count > len(devices):
        raise UserError(
            f"config key mesh.run={count}: {owner} has {len(devices)} devices; use at most that, or 0 for all"
        )
    return _mesh((count,), ("run",), devices[:count])


def _mesh(shape: tuple[int, ...], names: tuple[str, ...], devices: list[jax.Device]) -> Mesh:
    """A mesh whose neighbours are neighbours in the machine, where JAX can arrange it."""
    types = (AxisType.Auto,) * len(shape)
    try:
        return jax.make_mesh(shape, names, axis_types=types, devices=devices)
    except NotImplementedError:  # 8 x 8 on the 4 x 4 x 4 of a v4 or v5p: an axis of the machine is part of both
        array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except AssertionError:  # a described v4, whose chips are two devices each
        array = np.array(devices).reshape(shape)
    return Mesh(array, names, axis_types=types)


def place(sharding: NamedSharding, tree: Any) -> Any:
    """Copies the host's arrays to the devices of this process, each device its part."""
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda part: a[part]), arrays)


class LocalSlice(NamedTuple):
    """The runs and rows of a feed [runs, steps, rows, ...] that are on this process's devices."""

    runs: slice
    rows: slice


def local_slice(sharding: NamedSharding, shape: tuple[int, int, int]) -> LocalSlice:
    """The slice of a feed of this shape [runs, steps, rows] that this process has to build."""
    parts = [part for part in sharding.addressable_devices_indices_map(shape).values() if part is not None]
    runs, rows = (
        slice(min(p[axis].start or 0 for p in parts), max(p[axis].stop or shape[axis] for p in parts))
        for axis in (0, 2)
    )
    return LocalSlice(runs, rows)


def place_feed(sharding: NamedSharding, local: LocalSlice, whole: tuple[int, int], tree: Any) -> Any:
    """Copies this process's slice of a feed to its devices; `whole` are the runs and rows of all processes."""

    def place_leaf(leaf):
        shape = (whole[0], leaf.shape[1], whole[1], *leaf.shape[3:])

        def part(index):
            inner = [
                slice((i.start or 0) - axis.start, (i.stop or n) - axis.start)
                for i, axis, n in zip(index[::2], local, whole, strict=False)
            ]
            return leaf[inner[0], :, inner[1]]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(place_leaf, tree)


def state_sharding(path: tuple[Any, ...], leaf: Any, mesh: Mesh) -> NamedSharding:
    """The sharding of a leaf of the state: over the axis `expert` for experts and their optimiser state."""
    axis = expert_axis(path)  # of one run; a batch of runs has one more in front. Adafactor has leaves of one number.
    spec = PartitionSpec() if axis is None or leaf.ndim < axis + 2 else PartitionSpec(*[None] * (axis + 1), EXPERT)
    return NamedSharding(mesh, spec)
