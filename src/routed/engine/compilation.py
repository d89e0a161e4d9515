"""Programs compiled for batches of runs: a mesh axis `run`, and within a device one run after the other or all at once.

Two host devices that each map their runs one after the other were 1.4x faster on 2 CPU cores than one device for
depth-3 experts, whose weights then stay in cache, and no slower than vmap for constant experts
(docs/measurements/gmm.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from ml_collections import ConfigDict

from routed.engine.devices import LocalSlice, local_slice, place, place_feed, state_sharding
from routed.engine.limits import program_of, refuse_program, refuse_shortage, steps_fed
from routed.layer.dispatch.parallel import DATA, EXPERT
from routed.plan.config import problem_of, traced
from routed.system.platform import platform, platform_of, tracing_for
from routed.training import program
from routed.training.problem import ProblemPart

#: A run of fewer FLOPs is brief: half a second of a core. Each step counts as STEP FLOPs at least.
BRIEF, STEP = 5e10, 1e7
#: Compiles in a quarter of the time; a step then takes three times as long, a start seven times. Without
#: `xla_cpu_parallel_codegen_split_count=1`: with it a program from the cache rounds otherwise than a fresh one.
LITTLE_EFFORT: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
#: For the start of a run: mostly random draws, on which LLVM spends two thirds of its time for no speed
#: (docs/measurements/compiling.md).
LESS_EFFORT: dict[str, Any] = {"xla_backend_optimization_level": 1}


class Compiled(NamedTuple):
    """The program of a group, compiled for batches of `runs` runs.

    All arguments have a leading axis [runs], but `steps` and `shared`, which are the same for all runs. Each process
    builds the slice `local` of the feed only. `bytes` are those of worlds and states, `seconds` the time of the
    compilation.
    """

    problem: ProblemPart
    runs: int
    #: (seeds, traced, shared): draws the worlds of all runs and their states at step 0, and returns both.
    start: Callable[..., Any]
    #: (active, steps, seeds, traced, worlds, states, feed, shared): takes `steps` training steps of the active runs,
    #: and returns the new states. Takes the memory of the old ones.
    advance: Callable[..., Any]
    #: (active, seeds, traced, worlds, states, shared): evaluates the active runs, and returns states with one more row
    #: of history. Takes the memory of the old ones.
    record: Callable[..., Any]
    #: Put a tree of the host's arrays on the devices; with several processes, each puts its own part.
    place: Callable[..., Any]
    local: LocalSlice
    place_feed: Callable[..., Any]
    place_shared: Callable[..., Any]
    #: (params, state): extracts the memory that the next evaluation compares with.
    remember: Callable[..., Any]
    batching: str
    devices: int
    brief: bool
    seconds: float
    bytes: int


class Lowerings(NamedTuple):
    """The program of a group, traced for batches of runs on a mesh: not compiled yet, and nothing is on a device."""

    start: Lowered
    advance: Lowered
    record: Lowered
    worlds: Any  # shapes
    states: Any
    batch: NamedSharding  # of the feed, [runs, steps, rows, ...]
    remember: Callable[..., Any]
    problem: ProblemPart


def lower_group(config: ConfigDict, pool: int, runs: int, mesh: Mesh) -> Lowerings:
    """Traces the group's program for `runs` runs at a time, a multiple of the mesh's axis `run`.

    The devices of the mesh may be those of another machine.
    """
    problem, is_spread = problem_of(config), mesh.size > mesh.shape["run"]
    traceable = program_of(problem, config, pool, mesh if is_spread else None)
    over_runs = _one_spread_run if is_spread else _over_devices(config, mesh)
    if_active = _skip_inactive if batching_of(config, mesh) == "map" else _mark_inactive
    start_runs = over_runs(partial(program.start, traceable), (2,))
    advance_runs = over_runs(partial(if_active, partial(program.advance, traceable), 4), (1, 7))
    record_runs = over_runs(partial(if_active, partial(program.record, traceable), 3), (5,))

    by_run, replicated = NamedSharding(mesh, PartitionSpec("run")), NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec("run", None, (DATA, EXPERT))) if is_spread else by_run
    shared = _shaped(jax.tree.map(np.asarray, problem.shared_arrays(config)), replicated)
    seeds = _shaped(np.zeros(runs, np.uint32), by_run)
    values = _shaped(stack_traced([traced(config)] * runs), by_run)
    active, steps = _shaped(np.ones(runs, bool), by_run), _shaped(np.int32(0), replicated)
    feed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((runs, *a.shape), a.dtype), problem.feed_shape(config, steps_fed(config))
    )
    with tracing_for(mesh):
        worlds, states = jax.eval_shape(start_runs, seeds, values, shared)
        by_state = by_run
        if is_spread:
            by_state = jax.tree_util.tree_map_with_path(lambda path, a: state_sharding(path, a, mesh), states)
        start = jax.jit(start_runs, out_shardings=(by_run, by_state)).lower(seeds, values, shared)
        worlds = _shaped(worlds, by_run)
        states = jax.tree.map(_shaped, states, by_state) if is_spread else _shaped(states, by_run)
        advance = jax.jit(advance_runs, donate_argnums=5, out_shardings=by_state).lower(
            active, steps, seeds, values, worlds, states, _shaped(feed, by_row), shared
        )
        record = jax.jit(record_runs, donate_argnums=4, out_shardings=by_state).lower(
            active, seeds, values, worlds, states, shared
        )
    remember = jax.vmap(traceable.problem.remember)
    return Lowerings(start, advance, record, worlds, states, by_row, remember, problem)


def compile_group(config: ConfigDict, pool: int, runs: int, mesh: Mesh) -> Compiled:
    """Compiles the group's program for `runs` runs at a time; `runs` is a multiple of the mesh's axis `run`.

    Raises:
      UserError: the arrays of the program do not fit into memory.
    """
    start_time = time.perf_counter()
    lowered = lower_group(config, pool, runs, mesh)
    problem = lowered.problem
    brief = is_brief(config, problem) and platform_of(mesh) == "cpu"

    def compile_one(stage: Lowered, effort: dict[str, Any]) -> Any:
        with tracing_for(mesh):  # a thread has its own context
            return compile_lowered(stage, problem.fuse, LITTLE_EFFORT if brief else effort)

    try:
        with ThreadPoolExecutor(3) as threads:
            programs = list(threads.map(compile_one, lowered[:3], (LESS_EFFORT, {}, {})))
    except jax.errors.JaxRuntimeError as error:
        refuse_shortage(config, error)
        raise
    refuse_program(config, programs, mesh)
    local = local_slice(lowered.batch, (runs, steps_fed(config), config.batch_size))
    return Compiled(
        problem=problem,
        runs=runs,
        start=programs[0],
        advance=programs[1],
        record=programs[2],
        place=partial(place, NamedSharding(mesh, PartitionSpec("run"))),
        local=local,
        place_feed=partial(place_feed, lowered.batch, local, (runs, config.batch_size)),
        place_shared=partial(place, NamedSharding(mesh, PartitionSpec())),
        remember=lowered.remember,
        batching=batching_of(config, mesh),
        devices=mesh.size,
        brief=brief,
        seconds=time.perf_counter() - start_time,
        bytes=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((lowered.worlds, lowered.states))),
    )


def _shaped(tree, sharding):
    """The shapes and types of a tree of arrays, with a sharding."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def batching_of(config: ConfigDict, mesh: Mesh) -> str:
    """Returns how a device computes its runs: `map` (in turn), `vmap` (at once), or that one run is spread over all."""
    if mesh.size > mesh.shape["run"]:
        return "spread over devices"
    if config.mesh.batching != "auto":
        return config.mesh.batching
    return "map" if platform_of(mesh) == "cpu" else "vmap"


def _skip_inactive(change: Callable[..., Any], position: int, active, *args):
    """Applies `change` to a run, its argument at `position`, if the run is active: mapped runs can skip work."""
    run = args[position]
    return jax.lax.cond(active, lambda run: change(*args[:position], run, *args[position + 1 :]), lambda run: run, run)


def _mark_inactive(change: Callable[..., Any], position: int, active, *args):
    """Applies `change` to a run, its argument at `position`; an inactive run keeps its step and history.

    All runs take their steps: a condition of each run would copy the arrays that all share, such as images, and a TPU
    keeps nothing on the chip that is under a condition or goes through one. Nobody reads the state of a padded slot,
    nor that of a run after it diverged.
    """
    run, new = args[position], change(*args)
    return new | {name: jax.tree.map(partial(jnp.where, active), new[name], run[name]) for name in ("step", "history")}


def _over_devices(config: ConfigDict, mesh: Mesh):
    """Distributes runs over the axis `run`; the arguments at the positions `common` are the same for all runs."""
    in_turn = batching_of(config, mesh) == "map"

    def over_runs(function, common: tuple[int, ...]):
        def local(*args):
            def single_run(of_run):
                rest = iter(of_run)
                return function(*(a if i in common else next(rest) for i, a in enumerate(args)))

            of_runs = tuple(a for i, a in enumerate(args) if i not in common)
            return jax.lax.map(single_run, of_runs) if in_turn else jax.vmap(single_run)(of_runs)

        def mapped(*args):
            specs = tuple(PartitionSpec() if i in common else PartitionSpec("run") for i in range(len(args)))
            return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("run"), check_vma=False)(
                *args
            )

        return mapped

    return over_runs


def _one_spread_run(function, common: tuple[int, ...]):
    """A batch of one run, which the layer itself distributes over the axes `data` and `expert`."""

    def mapped(*args):
        of_run = [a if i in common else jax.tree.map(lambda leaf: leaf[0], a) for i, a in enumerate(args)]
        return jax.tree.map(lambda leaf: leaf[None], function(*of_run))

    return mapped


def is_brief(config: ConfigDict, problem: ProblemPart) -> bool:
    """True if a run's training is over before its program could be compiled well."""
    return config.steps * max(problem.cost(config).work, STEP) < BRIEF


def compile_lowered(
    lowered: Lowered, fuse: str = "LIBRARY_FUSION_TYPE_REDUCE", effort: dict[str, Any] | None = None
) -> Any:
    """Compiles with the options of `effort`; on a CPU, YNNPACK fuses the operations that `fuse` names, and no others.

    YNNPACK slows batched products down. Reductions: twice the speed for the softmax of a router, a third of the
    processor time lost for the softmax of attention (docs/decisions/dispatch-and-kernels.md).
    """
    options = {"xla_cpu_experimental_ynn_fusion_type": fuse, **(effort or {})} if platform() == "cpu" else {}
    while options:
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:  # a release may lack an option: the remaining ones still apply
            supported = {name: value for name, value in options.items() if f"'{name}'" not in str(error)}
            options = supported if len(supported) < len(options) else {}
    return lowered.compile()


def shapes_of_run(config: ConfigDict, pool: int) -> tuple[Any, dict[str, Any]]:
    """The shapes of one run's world and state."""
    problem = problem_of(config)
    start = partial(program.start, program_of(problem, config, pool))
    return jax.eval_shape(start, np.uint32(0), traced(config), problem.shared_arrays(config))


def stack_traced(runs: list[dict[str, bool | int | float]]) -> dict[str, np.ndarray]:
    """Traced settings of several runs as arrays [R]: bool, int32 or float32 by the declared type."""
    types = {bool: np.bool_, int: np.int32, float: np.float32}
    return {key: np.array([run[key] for run in runs], types[type(runs[0][key])]) for key in runs[0]}
