"""What a command would do: points, groups, parameters, memory and time, estimated from a few timed steps of some programs."""

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
from routed.plan.config import problem_of, traced
from routed.plan.run import Run
from routed.settings.tree import flatten

#: Training steps that are timed for the estimate: this many, then more until they take this long.
STEPS, SECONDS = 4, 1.0
#: Seconds of compiling after which what is left is scaled.
COMPILING = 10.0


class Timed(NamedTuple):
    """What was measured of a group: seconds to compile its program, of a step of `runs` runs and of their evaluation."""

    group: Group
    runs: int
    compiling: float
    step: float
    evaluation: float


def describe(runs: list[Run], mesh: Mesh) -> str:
    """The plan as text. Compiles the largest groups and times a few of their steps, scales the others; writes nothing."""
    arms: dict[str, dict[str, None]] = {}
    for run in runs:
        for point in run.points:
            arms.setdefault(", ".join(f"{k}={v}" for k, v in point.items()) or "the base config", {})[run.arm] = None
    lines = [f"point {point}: {', '.join(names)}" for point, names in arms.items()]
    tuning = sum(run.tuning for run in runs)
    lines.append(f"{len(runs)} runs, {tuning} of them tuning, on {mesh.size} devices ({mesh.devices.flat[0].platform})")
    groups, total = make_groups(runs, mesh), 0.0
    timed = _time_largest(groups, mesh)
    for group in groups:
        worlds, states = shapes_of_run(group.config, group.pool)
        parameters = sum(a.size for a in jax.tree.leaves(states["params"]))
        each = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((worlds, states)))
        like = max(timed, key=lambda one: (one.group is group, _alike(one.group, group)))
        seconds = _seconds(group, like)
        total += seconds + like.compiling
        how = (
            f"compiled in {like.compiling:.1f} s"
            if like.group is group
            else f"not compiled, scaled from {like.group.name} by FLOPs"
        )
        lines.append(
            f"group {group.name}: {len(group.runs)} runs in batches of {group.size}, {parameters:,} parameters a run,"
            f" {group.size * each / 1e6:.0f} MB a batch, {how}, about {seconds:.0f} s"
        )
    lines.append(f"estimated time: {total / 60:.1f} minutes")
    return "\n".join(lines)


def _time_largest(groups: list[Group], mesh: Mesh) -> list[Timed]:
    """Measurements of the groups with the most work, as many as are compiled in COMPILING seconds, and of one at least."""
    timed: list[Timed] = []
    for group in sorted(groups, key=work_of, reverse=True):
        if sum(one.compiling for one in timed) >= COMPILING:
            break
        log.info("compiling %d of %d programs, to time it: %s", len(timed) + 1, len(groups), group.name)
        # Runs that are mapped take their turns, so one on each device tells what a batch takes.
        size = mesh.shape["run"] if batching_of(group.config, mesh) == "map" else group.size
        timed.append(_time(group, compile_group(group.config, group.pool, size, mesh)))
    if others := len(groups) - len(timed):
        log.info("the other %d programs are scaled by FLOPs", others)
    return timed


def _alike(one: Group, other: Group) -> int:
    """In how many settings two groups agree."""
    return len(flatten(one.config).items() & flatten(other.config).items())


def _seconds(group: Group, like: Timed) -> float:
    """Of all runs of a group, from what was measured of one like it: batches x (steps, evaluations), by FLOPs of a batch."""
    config = group.config
    mine, its = (problem_of(one.config).cost(one.config).work for one in (group, like.group))
    scale = mine * group.size / (its * like.runs)
    batch = config.steps * like.step + (config.steps // config.eval_every + 1) * like.evaluation
    return math.ceil(len(group.runs) / group.size) * scale * batch


def _time(group: Group, compiled: Compiled) -> Timed:
    config, count, problem = group.config, compiled.runs, problem_of(group.config)
    seeds = compiled.place(np.zeros(count, np.uint32))
    values = compiled.place(stack_traced([traced(run.config) for run in (group.runs * count)[:count]]))
    active, shared = np.ones(count, bool), compiled.place_shared(problem.shared_arrays(config))
    worlds, states = compiled.start(seeds, values, shared)
    largest = steps_fed(config)
    mine, rows = compiled.local
    fed = problem.feed(config, 0, rows)(0, largest)
    feed = compiled.place_feed(jax.tree.map(lambda a: np.stack([a] * (mine.stop - mine.start)), fed))

    def timed(steps: int, evaluated: bool) -> float:
        nonlocal states
        here, now = compiled.place(active), compiled.place_shared(np.int32(steps))
        begun = time.perf_counter()
        states = compiled.advance(here, now, seeds, values, worlds, states, feed, shared)
        if evaluated:
            states = compiled.record(here, seeds, values, worlds, states, shared)
        jax.block_until_ready(states)
        return time.perf_counter() - begun

    timed(1, False)  # the first call touches the memory
    evaluation, steps = timed(0, True), min(STEPS, largest)
    while (taken := timed(steps, False)) < SECONDS and steps < largest:
        steps = min(4 * steps, largest)
    return Timed(group, count, compiled.seconds, taken / steps, evaluation)
