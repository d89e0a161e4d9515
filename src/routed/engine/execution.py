"""Executes a plan: compiles each group once, advances its runs in batches, writes rows as they finish."""

from __future__ import annotations

import math
import os
import pathlib
import signal
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from absl import logging as log
from jax.sharding import Mesh

from routed.engine import checkpoint, limits, results
from routed.engine.batches import advance, interruption
from routed.engine.compilation import Compiled, compile_group
from routed.engine.rows import fill_places, merge, rows_of
from routed.plan.arms import ARMS
from routed.plan.config import problem_of, traced
from routed.plan.runs import Run, groups
from routed.settings.tree import override
from routed.system import hosts
from routed.system.forecast import Course
from routed.system.progress import Progress

#: Further arrays of the base seed that figures of classes are drawn from, and how they are kept.
PICTURED = (("counts", np.int32), ("products", np.float32), ("choices", np.int16), ("right", np.bool_))


class Group(NamedTuple):
    """Runs that one compiled program serves."""

    name: str
    runs: list[Run]
    pool: int  # training samples in a world
    size: int  # runs that advance together

    @property
    def config(self):
        """Any run's config: they differ in traced settings only."""
        return self.runs[0].config


def make_groups(runs: list[Run], mesh: Mesh) -> list[Group]:
    """Groups with the size of their batches: as many runs as the config says, fewer if memory is short.

    Raises:
      UserError: not even one run a device fits into memory.
    """
    made, memory, here = [], limits.memory(), limits.devices_here(mesh)
    for members in groups(runs):
        config = members[0].config
        problem = problem_of(config)
        largest = max((run.config for run in members), key=limits.pool_of)
        pool = limits.pool_of(largest)
        devices = mesh.shape["run"]
        each = limits.refuse_if_too_large(largest, here, memory)
        fits = int(memory * limits.USABLE // each) * (devices // here)
        most = 1 if mesh.size > devices else max(min(config.mesh.runs_per_batch, fits), 1)
        # Batches of equal size: what pads the last one are places on the last devices, which would have nothing to do.
        equal = math.ceil(len(members) / math.ceil(len(members) / most))
        size = math.ceil(equal / devices) * devices
        name = "/".join(dict.fromkeys(run.arm for run in members))
        made.append(
            Group(
                f"{name} E={config.experts.count}" if problem.models[config.model].routed else name, members, pool, size
            )
        )
    return made


def execute(runs: list[Run], table: pd.DataFrame, workdir: pathlib.Path, mesh: Mesh) -> pd.DataFrame:
    """Runs what is missing from `table` and returns the full table. Stops on SIGINT or SIGTERM, within seconds.

    Raises:
      UserError: the disk failed, or the user interrupted; everything finished is saved.
    """
    table = fill_places(table, runs)
    done = set(table.run) if len(table) else set()
    pending = [r for r in runs if r.key not in done]
    if not pending:
        hosts.once(lambda: checkpoint.clear(workdir / "checkpoints"))
        return table
    made, wanted = make_groups(runs, mesh), {run.key: run for run in runs}
    saved = checkpoint.agreed(workdir / "checkpoints")
    swept = results.swept_keys(workdir)
    problem = problem_of(runs[0].config)
    cost = problem.cost(runs[0].config) if problem.watched else (0, None)
    courses, places = [_course(group, done) for group in made], {id(group): i for i, group in enumerate(made)}
    progress = Progress(courses, count_batches(pending, made, done, saved, wanted), *cost)
    compiled: dict[int, Compiled] = {}
    with _interruptions() as interrupted:
        try:
            while pending:
                if hosts.any_process(interrupted()):
                    raise interruption(workdir)
                ready = {r.key for r in pending if done.issuperset(r.needs)}
                batch, group = _resumed(saved, ready, wanted, made) or _next_batch(ready, made)
                progress.begin(places[id(group)])
                if id(group) not in compiled:
                    compiled.clear()  # groups come one after the other: one program in memory is enough
                    compiled[id(group)] = _compile(group, mesh)
                    progress.compiled(compiled[id(group)].seconds)
                traced_of_runs = [traced_of(run, table, [wanted[key] for key in run.needs]) for run in batch]
                history = advance(
                    compiled[id(group)], group.name, batch, traced_of_runs, workdir, saved, progress,
                    lambda: hosts.any_process(interrupted()),
                )  # fmt: skip
                saved = None
                rows, maps = [], {}
                for run, one in zip(batch, history, strict=True):
                    rows += rows_of(run, one, swept)
                    if run.seed == run.config.seed and "probs" in one:
                        maps[run.key] = one["probs"].astype(np.float16)
                        if "right" in one:
                            maps |= {f"{run.key}/{n}": one[n].astype(dtype) for n, dtype in PICTURED if n in one}
                table = merge(table, rows, swept)
                hosts.once(partial(_keep, workdir, table, maps))
                done |= {run.key for run in batch}
                pending = [r for r in pending if r.key not in done]
        finally:
            progress.close()
    return table


def _keep(workdir: pathlib.Path, table: pd.DataFrame, maps: dict[str, np.ndarray]) -> None:
    """Finished runs are in the tables before their checkpoint goes."""
    results.write_heatmaps(workdir, maps)
    results.write_table(workdir, table)
    checkpoint.clear(workdir / "checkpoints")


def _course(group: Group, done: set[str]) -> Course:
    """What the group's runs have to do that are not done."""
    config, count = group.config, sum(run.key not in done for run in group.runs)
    cost = problem_of(config).cost(config)[1]
    return Course(
        group.name, count * config.steps, count * (config.steps // config.eval_every + 1), count * config.steps * cost
    )


def count_batches(pending: list[Run], made: list[Group], done: set[str], saved, wanted: dict[str, Run]) -> int:
    """How many batches it takes to do all that is pending."""
    done, count = {*done}, 0
    while pending:
        ready = {run.key for run in pending if done.issuperset(run.needs)}
        batch, _ = _resumed(None if count else saved, ready, wanted, made) or _next_batch(ready, made)
        done |= {run.key for run in batch}
        pending, count = [run for run in pending if run.key not in done], count + 1
    return count


def _next_batch(ready: set[str], made: list[Group]) -> tuple[list[Run], Group]:
    """The first runs that are ready, of the first group that has any."""
    for group in made:
        members = [run for run in group.runs if run.key in ready]
        if members:
            return members[: group.size], group
    raise AssertionError("runs wait for each other in a circle")


def _resumed(saved, ready: set[str], wanted: dict[str, Run], made: list[Group]) -> tuple[list[Run], Group] | None:
    """The batch of the checkpoint, if this command still wants all of it."""
    if saved is None or not all(key in ready for key in saved[1]["runs"]):
        return None
    batch = [wanted[key] for key in saved[1]["runs"]]
    group = next(g for g in made if batch[0] in g.runs)
    return (batch, group) if len(batch) <= group.size else None


def _compile(group: Group, mesh: Mesh) -> Compiled:
    made = compile_group(group.config, group.pool, group.size, mesh)
    log.info(
        "compiled %s in %.1f s: %d runs in batches of %d over %d devices (%s), %.0f MB a batch",
        group.name, made.seconds, len(group.runs), group.size, mesh.size, made.batching, made.bytes / 1e6,
    )  # fmt: skip
    return made


def traced_of(run: Run, table: pd.DataFrame, needed: list[Run]) -> dict[str, Any]:
    """The run's traced settings, with what depends on finished runs filled in: its tuned rate, its matched setting."""
    config = run.config
    tuning = [r for r in needed if r.tuning and r.arm == run.arm]
    if tuning and not run.tuning:
        config = override(config, {"optimizer.rate_scale": best_scale(tuning, table)})
    values = traced(config)
    if (match := ARMS[run.arm].match) is not None:
        source = next(r for r in needed if r.arm == match.source and r.tuning == run.tuning)
        rows = table[table.run == source.key]
        values[match.setting] = float(rows.loc[rows.step.idxmax(), match.metric])
    return values


def best_scale(tuning: list[Run], table: pd.DataFrame) -> float:
    """The candidate with the lowest mean final test loss over the tuning seeds; one that diverged never wins."""
    losses: dict[float, list[float]] = {}
    for run in tuning:
        rows = table[table.run == run.key]
        loss = float(rows.loc[rows.step.idxmax(), problem_of(run.config).loss])
        losses.setdefault(run.config.optimizer.rate_scale, []).append(loss if np.isfinite(loss) else math.inf)
    return min(losses, key=lambda scale: np.mean(losses[scale]))


class _interruptions:
    """Turns SIGINT and SIGTERM into a question that is asked every few seconds; another SIGINT stops at once.

    Another SIGTERM does not: schedulers send it to every process of a group, and a parent passes it on.
    """

    def __enter__(self):
        self.caught = False
        self.before = {s: signal.signal(s, self._catch) for s in (signal.SIGINT, signal.SIGTERM)}
        return lambda: self.caught

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _catch(self, number, frame):
        if self.caught and number == signal.SIGINT and callable(before := self.before[number]):
            before(number, frame)
        self.caught = True
        # Not the log: a handler may interrupt the log's own writing, which must not be entered twice.
        below = "\n" if os.isatty(2) else ""  # the bar
        os.write(2, f"{below}{signal.Signals(number).name}: saving after the steps under way\n".encode())
