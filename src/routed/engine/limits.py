"""What fits into memory, from shapes alone, and which setting is too large where it does not."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed.plan.config import declared, problem_of, traced
from routed.settings.setting import refuse
from routed.settings.tree import flatten, node_of, override, value_of
from routed.system import hosts
from routed.training import program
from routed.training.problem import Inputs

#: Share of the memory that worlds and states may take; the rest is for what a step computes.
USABLE = 1 / 3
#: How the compiler for TPUs says what a program needs and what a chip has.
SHORT = r"Used (\S+) of (\S+) hbm|required for HLO \w+ \((\S+)\) exceeds available HBM \((\S+)\)"


def steps_fed(config: ConfigDict) -> int:
    """Steps that are fed at once, and after which a batch is saved."""
    return config.checkpoint.every or config.eval_every


def pool_of(config: ConfigDict) -> int:
    """Training samples that a run needs in its world."""
    return config.data.samples if "samples" in config.data else 0


def bytes_fed(config: ConfigDict) -> int:
    """Bytes of the two parts of a run's feed that are held at once, from their shapes."""
    return 2 * _bytes(problem_of(config).feed_shape(config, steps_fed(config)))


def bytes_of_run(config: ConfigDict) -> int:
    """Bytes of one run's world, of its state with the whole history, and of a batch, from their shapes."""
    problem = problem_of(config)
    one = program.make_program(config, problem.build(config, pool_of(config), None))

    def made(seed, values, shared, feed):
        world, state = program.start(one, seed, values, shared)
        inputs = Inputs(program.streams(seed, config), node_of(config, values), world, shared)
        return world, state, one.problem.batch(inputs, feed, 0)

    feed = problem.feed_shape(config, steps_fed(config))
    return _bytes(jax.eval_shape(made, np.uint32(0), traced(config), problem.shared_arrays(config), feed))


def memory(mesh: Mesh) -> int:
    """Bytes of memory for the runs of a host, the smallest, or for the run that is spread over all devices.

    All of it, not what is free now, so that a plan is the same on every start.
    """
    accelerator = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", 0)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return hosts.min_over_processes(accelerator or host // len(mesh.local_devices)) * devices_sharing(mesh)


def devices_sharing(mesh: Mesh) -> int:
    """Devices that `memory` is the memory of: those of a host, or of a run that is spread all."""
    return mesh.size if mesh.size > mesh.shape["run"] else devices_here(mesh)


def devices_here(mesh: Mesh) -> int:
    """Devices of one host that hold runs of their own."""
    return mesh.shape["run"] // min(jax.process_count(), mesh.shape["run"])


def refuse_if_too_large(config: ConfigDict, devices: int, memory: int) -> int:
    """Bytes of one run; `devices` that share `memory` bytes hold one each.

    Raises:
      UserError: they do not fit; it names the setting that takes most.
    """
    size = 0
    for measure in (bytes_fed, bytes_of_run):  # in this order: the latter makes what all runs share
        size = measure(config)
        if size * devices > memory * USABLE:
            what = (
                f"a run takes {_gigabytes(size)} and {devices} devices hold one each, of {_gigabytes(memory)} of memory"
            )
            refuse_largest(config, measure, what, " or set mesh.run=1" if devices > 1 else "")
    return size


def refuse_program(config: ConfigDict, compiled: Sequence[Any], mesh: Mesh) -> None:
    """Refuses programs whose arguments, results and intermediate arrays take more than there is, before they run.

    Raises:
      UserError: it names the setting that takes most.
    """
    needed, there = 0, memory(mesh) // devices_sharing(mesh)
    for one in compiled:
        found = one.memory_analysis()
        held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        needed = max(needed, held + found.temp_size_in_bytes)
    if needed > there:
        what = f"a step takes {_gigabytes(needed)} on each device, of {_gigabytes(there)} of memory"
        refuse_largest(config, bytes_computed, what, " or set mesh.run=1" if devices_here(mesh) > 1 else "")


def shortage(error: Exception) -> tuple[str, str] | None:
    """What a program needs and what a chip has, if a compiler says that it does not fit."""
    found = re.search(SHORT, str(error))
    return tuple(filter(None, found.groups())) if found else None  # type: ignore[return-value]


def refuse_shortage(config: ConfigDict, error: Exception) -> None:
    """Refuses a program of which its compiler says that it does not fit; other errors are not its business.

    Raises:
      UserError: it names the setting that takes most.
    """
    if short := shortage(error):
        what = f"a step takes {short[0]} on each device, of {short[1]} of memory"
        refuse_largest(config, bytes_computed, what, " or mesh.runs_per_batch")


def bytes_computed(config: ConfigDict) -> int:
    """Bytes of all arrays that a run computes from its start to the end of a step and an evaluation, held at once or not."""
    problem = problem_of(config)
    one = program.make_program(config, problem.build(config, pool_of(config), None))

    def whole(seed, values, shared, feed):
        world, state = program.start(one, seed, values, shared)
        return program.record(
            one, seed, values, world, program.advance(one, 1, seed, values, world, state, feed, shared), shared
        )

    feed = problem.feed_shape(config, steps_fed(config))
    return _written(jax.make_jaxpr(whole)(np.uint32(0), traced(config), problem.shared_arrays(config), feed).jaxpr)


def _written(jaxpr: Any) -> int:
    """Bytes of what the equations of a jaxpr yield, each once."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(list(equation.params.values()))]
        total += sum(_written(one) for one in inner if hasattr(one, "eqns"))
        total += _bytes([one.aval for one in equation.outvars if hasattr(one.aval, "shape")])
    return total


def refuse_largest(config: ConfigDict, measure: Callable[[ConfigDict], int], what: str, other_mend: str = "") -> None:
    """Refuses a config, for the setting whose default would save most of what is measured; `what` is too large in it.

    Raises:
      UserError: always.
    """
    known, sizes = declared(), dict[str, int]()
    for key, value in flatten(config).items():
        if type(value) in (int, float) and value > known[key].default:
            with contextlib.suppress(Exception):  # beside the other values a default may be impossible
                sizes[key] = measure(override(config, {key: known[key].default}))
    key = min(sizes, key=lambda name: sizes[name], default="experts.count")
    refuse(key, value_of(config, key), f"{what}; lower {key}{other_mend}")


def _bytes(shapes: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
