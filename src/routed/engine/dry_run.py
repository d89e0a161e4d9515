"""What a command would do: points, compiled groups, parameters, memory and time, estimated from a few timed steps."""

from __future__ import annotations

import math
import time

import jax
import numpy as np
from jax.sharding import Mesh

from routed.engine.compilation import Compiled, compile_group, stack_traced
from routed.engine.execution import Group, make_groups
from routed.engine.limits import steps_fed
from routed.plan.config import problem_of, traced
from routed.plan.runs import Run

#: Training steps that are timed for the estimate: this many, then more until they take this long.
STEPS, SECONDS = 4, 1.0


def describe(runs: list[Run], mesh: Mesh) -> str:
    """The plan as text. Compiles every group and times a few of its steps; writes nothing."""
    arms: dict[str, dict[str, None]] = {}
    for run in runs:
        for point in run.points:
            arms.setdefault(", ".join(f"{k}={v}" for k, v in point.items()) or "the base config", {})[run.arm] = None
    lines = [f"point {point}: {', '.join(names)}" for point, names in arms.items()]
    tuning = sum(run.tuning for run in runs)
    lines.append(f"{len(runs)} runs, {tuning} of them tuning, on {mesh.size} devices ({mesh.devices.flat[0].platform})")
    total = 0.0
    for group in make_groups(runs, mesh):
        compiled = compile_group(group.config, group.pool, group.size, mesh)
        seconds, parameters = _estimate(group, compiled)
        total += seconds + compiled.seconds
        lines.append(
            f"group {group.name}: {len(group.runs)} runs in batches of {group.size}, {parameters:,} parameters a run,"
            f" {compiled.bytes / 1e6:.0f} MB a batch, compiled in {compiled.seconds:.1f} s, about {seconds:.0f} s"
        )
    lines.append(f"estimated time: {total / 60:.1f} minutes")
    return "\n".join(lines)


def _estimate(group: Group, compiled: Compiled) -> tuple[float, int]:
    """Seconds for all runs of the group, and parameters of one run."""
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
        counts, flags = compiled.place(np.full(count, steps, np.int32)), compiled.place(active & evaluated)
        begun = time.perf_counter()
        states = jax.block_until_ready(
            compiled.advance(compiled.place(active), counts, flags, seeds, values, worlds, states, feed, shared)
        )
        return time.perf_counter() - begun

    timed(1, True)  # the first call touches the memory
    evaluation, steps = timed(0, True), min(STEPS, largest)
    while (taken := timed(steps, False)) < SECONDS and steps < largest:
        steps = min(4 * steps, largest)
    batch = (config.steps // config.eval_every + 1) * evaluation + config.steps * taken / steps
    parameters = sum(a.size for a in jax.tree.leaves(states["params"])) // count
    return math.ceil(len(group.runs) / count) * batch, parameters
