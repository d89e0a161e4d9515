"""Plan of a command on this machine: points, groups, parameters, memory, and time, from timed steps of some."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import logging as log
from jax.sharding import Mesh

from routed.engine.compilation import Compiled, batching_of, compile_group, shapes_of_run, stack_traced
from routed.engine.execution import make_groups
from routed.engine.limits import steps_fed
from routed.engine.schedule import Group, work_of
from routed.plan import checks
from routed.plan.config import problem_of, traced
from routed.plan.run import Run
from routed.settings.tree import flatten

#: Training steps that are timed first; four times as many are timed again until they take SECONDS.
STEPS, SECONDS = 4, 1.0
#: Seconds of compiling after which the other programs are scaled.
COMPILING = 10.0


class Timed(NamedTuple):
    """Seconds of a group's program: to compile it, of a step of `runs` runs, and of their evaluation."""

    group: Group
    runs: int
    compiling: float
    step: float
    evaluation: float


def describe(runs: list[Run], mesh: Mesh) -> str:
    """Returns the plan as text; compiles and times the largest groups, scales the others, writes nothing."""
    checks.check_values(run.config for run in runs)
    lines = _points(runs)
    tuning = sum(run.tuning for run in runs)
    lines.append(f"{len(runs)} runs, {tuning} of them tuning, on {mesh.size} devices ({mesh.devices.flat[0].platform})")
    groups, total = make_groups(runs, mesh), 0.0
    timings = _time_largest(groups, mesh)
    for group in groups:
        worlds, states = shapes_of_run(group.config, group.pool)
        parameters = sum(a.size for a in jax.tree.leaves(states["params"]))
        size = group.size * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((worlds, states)))
        settings = flatten(group.config).items()
        timed = max(timings, key=lambda each: (each.group is group, len(settings & flatten(each.group.config).items())))
        seconds = _seconds(group, timed)
        total += seconds + timed.compiling
        source = f"not compiled, scaled from {timed.group.name} by FLOPs"
        if timed.group is group:
            source = f"compiled in {timed.compiling:.1f} s"
        lines.append(
            f"group {group.name}: {len(group.runs)} runs in batches of {group.size}, {parameters:,} parameters a run,"
            f" {size / 1e6:.0f} MB a batch, {source}, about {seconds:.0f} s"
        )
    lines.append(f"estimated time: {total / 60:.1f} minutes")
    return "\n".join(lines)


def _points(runs: list[Run]) -> list[str]:
    """Lists the points of a sweep with their arms."""
    arms: dict[str, dict[str, None]] = {}
    for run in runs:
        for point in run.points:
            name = ", ".join(f"{key}={value}" for key, value in point.items()) or "the base config"
            arms.setdefault(name, {})[run.arm] = None
    return [f"point {point}: {', '.join(names)}" for point, names in arms.items()]


def _time_largest(groups: list[Group], mesh: Mesh) -> list[Timed]:
    """Times the groups with the most work: as many as are compiled in COMPILING seconds, one at least."""
    timings: list[Timed] = []
    for group in sorted(groups, key=work_of, reverse=True):
        if sum(timed.compiling for timed in timings) >= COMPILING:
            break
        log.info("compiling %d of %d programs, to time it: %s", len(timings) + 1, len(groups), group.name)
        # Mapped runs take turns, so that one run on each device has the time of a step of any number.
        size = mesh.shape["run"] if batching_of(group.config, mesh) == "map" else group.size
        timings.append(_time(group, compile_group(group.config, group.pool, size, mesh)))
    if scaled := len(groups) - len(timings):
        log.info("the other %d programs are scaled by FLOPs", scaled)
    return timings


def _seconds(group: Group, timed: Timed) -> float:
    """Scales a timed group to all runs of another group: batches x (steps, evaluations) x FLOPs of a batch."""
    config, source = group.config, timed.group.config
    work, timed_work = problem_of(config).cost(config).work, problem_of(source).cost(source).work
    scale = work * group.size / (timed_work * timed.runs)
    batch = config.steps * timed.step + (config.steps // config.eval_every + 1) * timed.evaluation
    return math.ceil(len(group.runs) / group.size) * scale * batch


def _time(group: Group, compiled: Compiled) -> Timed:
    """Times a step and an evaluation of a compiled group."""
    config, count, problem = group.config, compiled.runs, problem_of(group.config)
    seeds = compiled.place(np.zeros(count, np.uint32))
    values = compiled.place(stack_traced([traced(run.config) for run in (group.runs * count)[:count]]))
    active, shared = np.ones(count, bool), compiled.place_shared(problem.shared_arrays(config))
    worlds, states = compiled.start(seeds, values, shared)
    largest = steps_fed(config)
    local, rows = compiled.local
    fed = problem.feed(config, 0, rows)(0, largest)
    feed = compiled.place_feed(jax.tree.map(lambda a: np.stack([a] * (local.stop - local.start)), fed))

    def seconds(steps: int, evaluated: bool) -> float:
        nonlocal states
        runs, count = compiled.place(active), compiled.place_shared(np.int32(steps))
        started = time.perf_counter()
        states = compiled.advance(runs, count, seeds, values, worlds, states, feed, shared)
        if evaluated:
            states = compiled.record(runs, seeds, values, worlds, states, shared)
        jax.block_until_ready(states)
        return time.perf_counter() - started

    seconds(1, False)  # the first call touches the memory
    evaluation, steps = seconds(0, True), min(STEPS, largest)
    while (taken := seconds(steps, False)) < SECONDS and steps < largest:
        steps = min(4 * steps, largest)
    return Timed(group, count, compiled.seconds, taken / steps, evaluation)
