"""Executes a plan: compiles each group once, advances its runs in batches, writes rows as they finish."""

from __future__ import annotations

import math
import os
import pathlib
import signal
from typing import Any

import numpy as np
import pandas as pd
from absl import logging as log
from jax.sharding import Mesh

from routed.engine import checkpoint, initial, limits, results, tables
from routed.engine.batches import advance, interruption
from routed.engine.compilation import Compiled, compile_group
from routed.engine.rows import fill_places, rows_of
from routed.engine.schedule import Group, Schedule
from routed.plan.arms import ARMS
from routed.plan.config import problem_of, traced
from routed.plan.runs import Run, groups
from routed.settings.tree import override
from routed.system import hosts
from routed.system.forecast import Course
from routed.system.platform import platform_of
from routed.system.progress import Progress

#: Runs of a batch where the config does not say: on a CPU, and on each device of another platform (docs/measurements/pods.md).
TOGETHER, TOGETHER_EACH = 16, 4

#: Further arrays of the base seed that figures of classes are drawn from, and how they are kept.
PICTURED = (
    ("counts", np.int32),
    ("products", np.float32),
    ("choices", np.int16),
    ("right", np.bool_),
    ("embeddings", np.float32),
)
#: What the choices of a run are kept under for its traces (`trace.every`), and that setting, which may be another one later.
TRACED, STRIDE = "trace", "trace.every"


def make_groups(runs: list[Run], mesh: Mesh, memory: int = 0) -> list[Group]:
    """Groups with the size of their batches: as many runs as the config says, fewer if memory is short.

    `memory` is what the devices of a host have together; 0: those here.

    Raises:
      UserError: not even one run a device fits into memory.
    """
    made, memory, here = [], memory or limits.memory(mesh), limits.devices_here(mesh)
    together = TOGETHER if platform_of(mesh) == "cpu" else TOGETHER_EACH * mesh.shape["run"]
    for members in groups(runs):
        config = members[0].config
        problem = problem_of(config)
        largest = max((run.config for run in members), key=limits.pool_of)
        pool = limits.pool_of(largest)
        devices = mesh.shape["run"]
        each = limits.refuse_if_too_large(largest, here, memory)
        fits = int(memory * limits.USABLE // each) * (devices // here)
        most = 1 if mesh.size > devices else max(min(config.mesh.runs_per_batch or together, fits), 1)
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
    """Runs what is missing from `table`, the workdir's rows, and returns the full table. Stops on SIGINT or SIGTERM, within seconds.

    Raises:
      UserError: the disk failed, or the user interrupted; everything finished is saved.
    """
    done = set(table.run) if len(table) else set()
    pending = [run for run in runs if run.key not in done]
    ends = _ends(table, {key for run in pending for key in run.needs})
    del table  # it is on the disk, and may be large
    hosts.once(lambda: initial.claim(workdir, runs))
    if pending:
        initial.check(pending)
        _run(runs, pending, done, ends, workdir, mesh)
    else:
        hosts.once(lambda: checkpoint.clear(workdir / "checkpoints"))
    return hosts.first_process_first(lambda: finish(workdir, runs))


def _run(
    runs: list[Run],
    pending: list[Run],
    done: set[str],
    ends: dict[str, dict[str, Any]],
    workdir: pathlib.Path,
    mesh: Mesh,
) -> None:
    """Runs what is `pending`, batch by batch. `ends` are the last rows of finished runs that others need."""
    every_group, wanted = make_groups(runs, mesh), {run.key: run for run in runs}
    schedule, saved = Schedule(every_group, done), checkpoint.agreed(workdir / "checkpoints")
    needed = {key for run in pending for key in run.needs}
    swept = results.swept_keys(workdir)
    courses, places = (
        [_course(group, done) for group in every_group],
        {id(group): i for i, group in enumerate(every_group)},
    )
    progress = Progress(courses, count_batches(Schedule(every_group, done), saved))
    compiled: dict[int, Compiled] = {}
    data = ""  # a digest of those of the group that is compiled
    with _interruptions() as interrupted:
        try:
            while schedule:
                if hosts.any_process(interrupted()):
                    raise interruption(workdir)
                group, batch = (saved and schedule.take_again(saved[1]["runs"])) or schedule.take()
                progress.begin(places[id(group)])
                if id(group) not in compiled:
                    compiled.clear()  # groups come one after the other: one program in memory is enough
                    data = problem_of(group.config).digest(group.config)
                    compiled[id(group)] = _compile(group, mesh)
                    progress.compiled(compiled[id(group)].seconds)
                traced_of_runs = [traced_of(run, ends, [wanted[key] for key in run.needs]) for run in batch]
                history = advance(
                    compiled[id(group)], group.name, batch, traced_of_runs, data, workdir, saved, progress,
                    lambda: hosts.any_process(interrupted()),
                )  # fmt: skip
                saved = None
                last = keep(workdir, batch, history, swept)
                ends |= {key: row for key, row in last.items() if key in needed}
                schedule.finish(batch)
        finally:
            progress.close()


def _ends(table: pd.DataFrame, keys: set[str]) -> dict[str, dict[str, Any]]:
    """The last rows of some of these runs, by key."""
    if not len(table) or not keys:
        return {}
    rows = table[table.run.isin(keys)].sort_values("step").drop_duplicates("run", keep="last")
    return rows.set_index("run").to_dict("index")  # type: ignore[return-value]


def _course(group: Group, done: set[str]) -> Course:
    """What the group's runs have to do that are not done."""
    config, count = group.config, sum(run.key not in done for run in group.runs)
    problem = problem_of(config)
    cost = problem.cost(config)
    course = Course(
        group.name,
        count * config.steps,
        count * (config.steps // config.eval_every + 1),
        count * config.steps * cost.work,
    )
    return course._replace(tokens=cost.tokens, flops=cost.flops) if problem.watched else course


def count_batches(schedule: Schedule, saved: tuple[pathlib.Path, dict] | None) -> int:
    """How many batches it takes to do all that is pending, the saved one first; the schedule is used up."""
    count = 0
    while schedule:
        _, batch = (saved and schedule.take_again(saved[1]["runs"])) or schedule.take()
        schedule.finish(batch)
        saved, count = None, count + 1
    return count


def keep(
    workdir: pathlib.Path, batch: list[Run], histories: list[dict[str, np.ndarray]], swept: list[str]
) -> dict[str, dict[str, Any]]:
    """Writes the rows and maps of finished runs, before their checkpoint goes; the last row of each by key."""
    rows, ends, maps = [], {}, dict[str, np.ndarray]()
    for run, history in zip(batch, histories, strict=True):
        rows += rows_of(run, history, swept)
        ends[run.key] = rows[-1]
        if run.seed == run.config.seed:
            maps |= {f"{run.key}/{name}".rstrip("/"): array for name, array in maps_of(history).items()}

        if run.seed == run.config.seed and (every := run.config.trace.every):
            names = [name for name in history if name.rpartition("/")[2] == "choices"]
            maps |= {f"{run.key}/{TRACED}/{name}": history[name][::every].astype(np.int16) for name in names}
            maps |= {f"{run.key}/{STRIDE}": np.array(every, np.int32)}

    def write() -> None:
        tables.add_part(workdir, rows, maps)
        checkpoint.clear(workdir / "checkpoints")

    hosts.once(write)
    return ends


def maps_of(history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a run that figures show, by name: mean probabilities of experts for each cluster ("") or language, and loads.

    [evaluations, rows, experts] and [evaluations, experts]; of a language model with a stack before the name and an axis of layers. Then
    also `sample`, probabilities of one row's tokens after training [layers, tokens, experts].
    """
    found = {name: history[name].astype(np.float16) for name in history if name.endswith(("/maps", "/load"))}
    found |= {name: history[name][-1].astype(np.float16) for name in history if name.endswith("/sample")}
    if "probs" in history:
        assigned = history["counts"].sum(1)
        found |= {"": history["probs"].astype(np.float16)}
        found |= {"load": (assigned / np.maximum(assigned.sum(1, keepdims=True), 1)).astype(np.float32)}
        if "right" in history:
            found |= {name: history[name].astype(dtype) for name, dtype in PICTURED if name in history}
    return found


def finish(workdir: pathlib.Path, runs: list[Run]) -> pd.DataFrame:
    """All rows, merged, with those that finished runs have at further points."""
    table, settled = tables.gather(workdir)
    filled = fill_places(table, runs)
    if hosts.is_first() and len(filled) and (filled is not table or not settled):
        tables.merge(workdir, filled)
    return filled


def _compile(group: Group, mesh: Mesh) -> Compiled:
    log.info("compiling %s, for %d runs in batches of %d", group.name, len(group.runs), group.size)
    made = compile_group(group.config, group.pool, group.size, mesh)
    log.info(
        "compiled %s in %.1f s%s: over %d devices (%s), %.0f MB a batch",
        group.name, made.seconds, ", with little effort, as its runs are brief" if made.brief else "", made.devices,
        made.batching, made.bytes / 1e6,
    )  # fmt: skip
    return made


def traced_of(run: Run, ends: dict[str, dict[str, Any]], needed: list[Run]) -> dict[str, Any]:
    """The run's traced settings, with what depends on finished runs filled in: its tuned rate, its matched setting."""
    config = run.config
    tuning = [r for r in needed if r.tuning and r.arm == run.arm]
    if tuning and not run.tuning:
        config = override(config, {"optimizer.rate_scale": best_scale(tuning, ends)})
    values = traced(config)
    if (match := ARMS[run.arm].match) is not None:
        source = next(r for r in needed if r.arm == match.source and r.tuning == run.tuning)
        values[match.setting] = float(ends[source.key][match.metric])
    return values


def best_scale(tuning: list[Run], ends: dict[str, dict[str, Any]]) -> float:
    """The candidate with the lowest mean final test loss over the tuning seeds; one that diverged never wins."""
    losses: dict[float, list[float]] = {}
    for run in tuning:
        loss = float(ends[run.key][problem_of(run.config).loss])
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
        if self.caught and number == signal.SIGINT:
            if callable(before := self.before[number]):
                before(number, frame)
            raise KeyboardInterrupt  # a process in the background begins with SIGINT ignored
        self.caught = True
        # Not the log: a handler may interrupt the log's own writing, which must not be entered twice.
        below = "\n" if os.isatty(2) else ""  # the bar
        os.write(2, f"{below}{signal.Signals(number).name}: saving after the steps under way\n".encode())
