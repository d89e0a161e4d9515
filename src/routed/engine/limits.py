"""The memory that runs need, from shapes alone, and errors that name the setting to lower where it does not suffice."""

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
from routed.training.problem import Inputs, ProblemPart

#: The fraction of the memory that worlds and states may take; the rest is for the arrays that a step computes.
USABLE = 1 / 3
#: The compiler for TPUs writes with these patterns how much a program needs and how much a chip has.
SHORTAGE = r"Used (\S+) of (\S+) hbm|required for HLO \w+ \((\S+)\) exceeds available HBM \((\S+)\)"


def steps_fed(config: ConfigDict) -> int:
    """Steps whose batches are fed at once, and after which a batch of runs is saved."""
    return config.checkpoint.every or config.eval_every


def pool_of(config: ConfigDict) -> int:
    """Training samples that a run needs in its world; 0 where the host feeds all data."""
    return config.data.samples if "data.samples" in problem_of(config).reads else 0


def program_of(problem: ProblemPart, config: ConfigDict, pool: int, mesh: Mesh | None = None) -> program.Program:
    """The training program of one run; with a `mesh`, its devices share the run."""
    return program.make_program(config, problem.build(config, pool, mesh))


def bytes_fed(config: ConfigDict) -> int:
    """Bytes of the two parts of a run's feed that exist at once, from their shapes."""
    return 2 * _bytes(problem_of(config).feed_shape(config, steps_fed(config)))


def bytes_of_run(config: ConfigDict) -> int:
    """Bytes of one run's world, of its state with the whole history, and of a batch, from their shapes."""
    problem = problem_of(config)
    single_run = program_of(problem, config, pool_of(config))

    def start_and_draw(seed, values, shared, feed):
        world, state = program.start(single_run, seed, values, shared)
        inputs = Inputs(program.streams(seed, config), node_of(config, values), world, shared)
        return world, state, single_run.problem.batch(inputs, feed, 0)

    feed = problem.feed_shape(config, steps_fed(config))
    return _bytes(jax.eval_shape(start_and_draw, np.uint32(0), traced(config), problem.shared_arrays(config), feed))


def memory(mesh: Mesh) -> int:
    """Bytes of memory for the runs of a host, the smallest, or for the run that is spread over all devices.

    The whole memory and not the free one, so that a plan is the same on every start.
    """
    accelerator = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", 0)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return hosts.min_over_processes(accelerator or host // len(mesh.local_devices)) * devices_sharing(mesh)


def devices_sharing(mesh: Mesh) -> int:
    """Devices that share the bytes of `memory`: those of a host, or all devices of a run that is spread."""
    return mesh.size if mesh.size > mesh.shape["run"] else devices_here(mesh)


def devices_here(mesh: Mesh) -> int:
    """Devices of one host that compute runs of their own."""
    return mesh.shape["run"] // min(jax.process_count(), mesh.shape["run"])


def refuse_if_too_large(config: ConfigDict, devices: int, memory: int) -> int:
    """Returns the bytes of one run; `devices` that share `memory` bytes compute one run each.

    Raises:
      UserError: the runs do not fit; it names the setting that takes most.
    """
    size = 0
    for measure in (bytes_fed, bytes_of_run):  # in this order: the latter makes the arrays that all runs share
        size = measure(config)
        if size * devices > memory * USABLE:
            problem = (
                f"a run takes {_gigabytes(size)} and {devices} devices hold one each, of {_gigabytes(memory)} of memory"
            )
            refuse_largest(config, measure, problem, " or set mesh.run=1" if devices > 1 else "")
    return size


def refuse_program(config: ConfigDict, compiled: Sequence[Any], mesh: Mesh) -> None:
    """Refuses programs whose arguments, results and intermediate arrays exceed the memory, before they run.

    Raises:
      UserError: it names the setting that takes most.
    """
    needed, available = 0, memory(mesh) // devices_sharing(mesh)
    for stage in compiled:
        sizes = stage.memory_analysis()
        arguments = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        needed = max(needed, arguments + sizes.temp_size_in_bytes)
    if needed > available:
        problem = f"a step takes {_gigabytes(needed)} on each device, of {_gigabytes(available)} of memory"
        refuse_largest(config, bytes_computed, problem, " or set mesh.run=1" if devices_here(mesh) > 1 else "")


def shortage(error: Exception) -> tuple[str, str] | None:
    """The memory that a program needs and that a chip has, if a compiler's error names both."""
    match = re.search(SHORTAGE, str(error))
    return tuple(filter(None, match.groups())) if match else None  # type: ignore[return-value]


def refuse_shortage(config: ConfigDict, error: Exception) -> None:
    """Refuses a program whose compiler reports a lack of memory; ignores other errors.

    Raises:
      UserError: it names the setting that takes most.
    """
    if sizes := shortage(error):
        problem = f"a step takes {sizes[0]} on each device, of {sizes[1]} of memory"
        refuse_largest(config, bytes_computed, problem, " or mesh.runs_per_batch")


def bytes_computed(config: ConfigDict) -> int:
    """Bytes of all arrays that a run computes in its start, one step and one evaluation, at whatever time."""
    problem = problem_of(config)
    single_run = program_of(problem, config, pool_of(config))

    def run_once(seed, values, shared, feed):
        world, state = program.start(single_run, seed, values, shared)
        state = program.advance(single_run, 1, seed, values, world, state, feed, shared)
        return program.record(single_run, seed, values, world, state, shared)

    feed = problem.feed_shape(config, steps_fed(config))
    traced_run = jax.make_jaxpr(run_once)(np.uint32(0), traced(config), problem.shared_arrays(config), feed)
    return _bytes_of_results(traced_run.jaxpr)


def _bytes_of_results(jaxpr: Any) -> int:
    """Bytes of the results of a jaxpr's equations, each once."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(list(equation.params.values()))]
        total += sum(_bytes_of_results(leaf) for leaf in inner if hasattr(leaf, "eqns"))
        total += _bytes([variable.aval for variable in equation.outvars if hasattr(variable.aval, "shape")])
    return total


def refuse_largest(
    config: ConfigDict, measure: Callable[[ConfigDict], int], problem: str, other_remedy: str = ""
) -> None:
    """Refuses a config because of `problem`, and names the setting whose default would save most of `measure`.

    Raises:
      UserError: always.
    """
    settings, sizes = declared(), dict[str, int]()
    for key, value in flatten(config).items():
        if type(value) in (int, float) and value > settings[key].default:
            with contextlib.suppress(Exception):  # beside the other values a default may be impossible
                sizes[key] = measure(override(config, {key: settings[key].default}))
    key = min(sizes, key=lambda name: sizes[name], default="experts.count")
    refuse(key, value_of(config, key), f"{problem}; lower {key}{other_remedy}")


def _bytes(shapes: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
