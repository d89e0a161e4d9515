"""Programs compiled for batches of runs: one mesh axis `run`, and within a device one run after the other or all at once.

Measured on 2 CPU cores (docs/measurements/gmm.md): two host devices that each map their runs one after the other are 1.4x faster
than one device for depth-3 experts, whose weights then stay in cache, and no slower than vmap for constant experts.
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
from routed.engine.limits import refuse_program, refuse_shortage, steps_fed
from routed.layer.dispatch.parallel import DATA, EXPERT
from routed.plan.config import problem_of, traced
from routed.system.platform import platform, platform_of, tracing_for
from routed.training import program

#: A run of fewer FLOPs is brief (half a second of a core), where a step counts as at least so many.
BRIEF, STEP = 5e10, 1e7
#: Compiles in a quarter of the time what then takes three times as long for a step, and seven times to start. Not among them
#: `xla_cpu_parallel_codegen_split_count=1`: a program from the cache then rounds otherwise than one just compiled.
LITTLE_EFFORT: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
#: For what happens once in a run: mostly random draws, which take LLVM two thirds of its time and are no slower without (docs/measurements/compiling.md).
LESS_EFFORT: dict[str, Any] = {"xla_backend_optimization_level": 1}


class Compiled(NamedTuple):
    """The program of a group, compiled for batches of `runs` runs.

    start(seeds, traced, shared) -> (worlds, states); advance(active, steps, seeds, traced, worlds, states, feed, shared) -> states;
    record(active, seeds, traced, worlds, states, shared) -> states with a row of history. Every argument has a leading axis [runs], but
    `steps` and `shared`, which are the same for all runs. The latter two take the memory of the states that they get. `place` and `place_shared` put arguments on the devices; with several processes each puts its own part there. Each
    process builds only its slice of the feed. `remember(params, state)` is what an evaluation keeps for the next one.
    """

    runs: int
    start: Callable[..., Any]
    advance: Callable[..., Any]
    record: Callable[..., Any]
    place: Callable[[Any], Any]
    local: LocalSlice
    place_feed: Callable[[Any], Any]
    place_shared: Callable[[Any], Any]
    remember: Callable[[Any, Any], Any]
    batching: str
    devices: int
    brief: bool
    seconds: float
    bytes: int


class Lowerings(NamedTuple):
    """The program of a group for batches of so many runs, traced for a mesh: not compiled yet, and nothing is on a device."""

    start: Lowered
    advance: Lowered
    record: Lowered
    worlds: Any  # shapes
    states: Any
    batch: NamedSharding  # of the feed, [runs, steps, rows, ...]
    remember: Callable[[Any, Any], Any]


def lower_group(config: ConfigDict, pool: int, runs: int, mesh: Mesh) -> Lowerings:
    """Traces the group's program for `runs` runs at a time, a multiple of the mesh's axis `run`.

    The devices of the mesh may be those of a machine that is not here.
    """
    problem, spread = problem_of(config), mesh.size > mesh.shape["run"]
    one = program.make_program(config, problem.build(config, pool, mesh if spread else None))
    over_runs = _one_spread_run if spread else _over_devices(config, mesh)
    # The same function twice is traced once.
    start_runs = over_runs(partial(program.start, one), (2,))
    choose = _if_active if batching_of(config, mesh) == "map" else _marked
    advance_runs = over_runs(partial(choose, partial(program.advance, one), 4), (1, 7))
    record_runs = over_runs(partial(choose, partial(program.record, one), 3), (5,))

    every = steps_fed(config)
    rows, whole = NamedSharding(mesh, PartitionSpec("run")), NamedSharding(mesh, PartitionSpec())
    batch = NamedSharding(mesh, PartitionSpec("run", None, (DATA, EXPERT))) if spread else rows
    shared = _shaped(jax.tree.map(np.asarray, problem.shared_arrays(config)), whole)
    seeds = _shaped(np.zeros(runs, np.uint32), rows)
    values = _shaped(stack_traced([traced(config)] * runs), rows)
    active, steps = _shaped(np.ones(runs, bool), rows), _shaped(np.int32(0), whole)
    feed = jax.tree.map(lambda a: jax.ShapeDtypeStruct((runs, *a.shape), a.dtype), problem.feed_shape(config, every))
    with tracing_for(mesh):
        worlds, states = jax.eval_shape(start_runs, seeds, values, shared)
        held = jax.tree_util.tree_map_with_path(lambda path, a: state_sharding(path, mesh), states) if spread else rows
        start = jax.jit(start_runs, out_shardings=(rows, held)).lower(seeds, values, shared)
        worlds = _shaped(worlds, rows)
        states = jax.tree.map(_shaped, states, held) if spread else _shaped(states, rows)
        advance = jax.jit(advance_runs, donate_argnums=5, out_shardings=held).lower(
            active, steps, seeds, values, worlds, states, _shaped(feed, batch), shared
        )
        record = jax.jit(record_runs, donate_argnums=4, out_shardings=held).lower(
            active, seeds, values, worlds, states, shared
        )
    return Lowerings(start, advance, record, worlds, states, batch, jax.vmap(one.problem.remember))


def compile_group(config: ConfigDict, pool: int, runs: int, mesh: Mesh) -> Compiled:
    """Compiles the group's program for `runs` runs at a time; `runs` is a multiple of the mesh's axis `run`.

    Raises:
      UserError: what it computes does not fit into memory.
    """
    begun = time.perf_counter()
    lowered, fuse, brief = lower_group(config, pool, runs, mesh), problem_of(config).fuse, is_brief(config)
    brief = brief and platform_of(mesh) == "cpu"

    def compiled(one: Lowered, effort: dict[str, Any]) -> Any:
        with tracing_for(mesh):  # a thread has its own context
            return compile_lowered(one, fuse, LITTLE_EFFORT if brief else effort)

    try:
        with ThreadPoolExecutor(3) as threads:
            programs = list(threads.map(compiled, lowered[:3], (LESS_EFFORT, {}, {})))
    except jax.errors.JaxRuntimeError as error:
        refuse_shortage(config, error)
        raise
    refuse_program(config, programs, mesh)
    local = local_slice(lowered.batch, (runs, steps_fed(config), config.batch_size))
    return Compiled(
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
        seconds=time.perf_counter() - begun,
        bytes=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((lowered.worlds, lowered.states))),
    )


def _shaped(tree, sharding):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def batching_of(config: ConfigDict, mesh: Mesh) -> str:
    """How runs are batched: on each device by `map`, one after the other, or `vmap`, all at once; or one spread over all devices."""
    if mesh.size > mesh.shape["run"]:
        return "spread over devices"
    if config.mesh.batching != "auto":
        return config.mesh.batching
    return "map" if platform_of(mesh) == "cpu" else "vmap"


def _if_active(change: Callable[..., Any], place: int, active, *args):
    """What `change` makes of a run, its argument at `place`, if that is active: where runs are mapped, another one costs nothing."""
    run = args[place]
    return jax.lax.cond(active, lambda run: change(*args[:place], run, *args[place + 1 :]), lambda run: run, run)


def _marked(change: Callable[..., Any], place: int, active, *args):
    """What `change` makes of a run, its argument at `place`; one that is not active keeps its step and history.

    A condition of each run would give each its own copy of what all share, such as images; and what is under a condition, or goes
    through one, a TPU does not keep on the chip. So all take their steps. Nobody reads what a padded place holds, nor what a run
    that diverged comes to.
    """
    run, new = args[place], change(*args)
    kept = {name: jax.tree.map(partial(jnp.where, active), new[name], run[name]) for name in ("step", "history")}
    return new | kept


def _over_devices(config: ConfigDict, mesh: Mesh):
    """Runs shared out over the axis `run`; the arguments at the places `common` are the same for all."""
    one_by_one = batching_of(config, mesh) == "map"

    def over_runs(function, common: tuple[int, ...]):
        def local(*args):
            def one(own):
                rest = iter(own)
                return function(*(a if i in common else next(rest) for i, a in enumerate(args)))

            own = tuple(a for i, a in enumerate(args) if i not in common)
            return jax.lax.map(one, own) if one_by_one else jax.vmap(one)(own)

        def mapped(*args):
            specs = tuple(PartitionSpec() if i in common else PartitionSpec("run") for i in range(len(args)))
            return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("run"), check_vma=False)(
                *args
            )

        return mapped

    return over_runs


def _one_spread_run(function, common: tuple[int, ...]):
    """A batch of one run, which the layer itself shares out over the axes `data` and `expert`."""

    def mapped(*args):
        own = [a if i in common else jax.tree.map(lambda leaf: leaf[0], a) for i, a in enumerate(args)]
        return jax.tree.map(lambda leaf: leaf[None], function(*own))

    return mapped


def is_brief(config: ConfigDict) -> bool:
    """Is a run's training over before its program could be compiled well?"""
    return config.steps * max(problem_of(config).cost(config).work, STEP) < BRIEF


def compile_lowered(
    lowered: Lowered, fuse: str = "LIBRARY_FUSION_TYPE_REDUCE", effort: dict[str, Any] | None = None
) -> Any:
    """Compiles; for a CPU with YNNPACK for what `fuse` names only, and with that effort (docs/decisions/dispatch-and-kernels.md).

    YNNPACK slows batched products down. Reductions: twice the speed for the softmax of a router, a third of the processor time
    lost for that of attention.
    """
    options = {"xla_cpu_experimental_ynn_fusion_type": fuse, **(effort or {})} if platform() == "cpu" else {}
    while options:
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:  # a release does not know an option: the others still hold
            known = {name: value for name, value in options.items() if f"'{name}'" not in str(error)}
            options = known if len(known) < len(options) else {}
    return lowered.compile()


def shapes_of_run(config: ConfigDict, pool: int) -> tuple[Any, dict[str, Any]]:
    """The shapes of one run's world and state."""
    problem = problem_of(config)
    one = program.make_program(config, problem.build(config, pool, None))
    return jax.eval_shape(partial(program.start, one), np.uint32(0), traced(config), problem.shared_arrays(config))


def stack_traced(runs: list[dict[str, bool | int | float]]) -> dict[str, np.ndarray]:
    """Traced settings of several runs as arrays [R]: bool, int32 or float32 by the declared type."""
    types = {bool: np.bool_, int: np.int32, float: np.float32}
    return {key: np.array([run[key] for run in runs], types[type(runs[0][key])]) for key in runs[0]}
