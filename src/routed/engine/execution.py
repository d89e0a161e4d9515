"""Executes a plan: compiles each group once, advances its runs in batches, writes rows as they finish."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd
from absl import logging as log
from jax.sharding import Mesh

from routed.contracts import UserError, nearest
from routed.engine import checkpoint, limits, pretrained, results, tables
from routed.engine.batches import CompiledGroup, Session, Watching, interruption, train_batch
from routed.engine.checkpoint import Checkpoint
from routed.engine.compilation import compile_group
from routed.engine.early_pages import EarlyPages, Report
from routed.engine.profile import Profile
from routed.engine.rows import fill_points, rows_of
from routed.engine.schedule import Group, Schedule
from routed.plan import checks, tuning
from routed.plan.arms import ARMS
from routed.plan.config import problem_of, traced
from routed.plan.run import Run
from routed.plan.runs import groups
from routed.settings.tree import override
from routed.system import files, hosts, signals
from routed.system.platform import platform_of
from routed.system.progress import Progress, Work
from routed.training.problem import ProblemPart

#: Default number of runs of a batch: on a CPU, and on each device of another platform (docs/measurements/pods.md).
TOGETHER, TOGETHER_EACH = 16, 4

#: Further arrays of the base seed for figures of classes, and the types that store them.
PICTURED = (
    ("counts", np.int32),
    ("products", np.float32),
    ("choices", np.int16),
    ("right", np.bool_),
    ("embeddings", np.float32),
)
#: Names in the stored maps: of a run's choices for its traces, and of the setting `trace.every` at that time.
TRACED, STRIDE = "trace", "trace.every"

#: The last row of each finished run, by its key.
LastRows = Mapping[str, dict[str, Any]]


def make_groups(runs: list[Run], mesh: Mesh, memory: int = 0, saved: Collection[str] = ()) -> list[Group]:
    """Groups with the size of their batches: as many runs as the config says, fewer if memory is short.

    `memory`: of a host's devices together; 0: of this machine. The runs `saved` in a checkpoint stay one batch.

    Raises:
      UserError: not even one run a device fits into memory, or not the batch of the checkpoint.
    """
    memory, devices, local_devices = memory or limits.memory(mesh), mesh.shape["run"], limits.devices_here(mesh)
    default = TOGETHER if platform_of(mesh) == "cpu" else TOGETHER_EACH * devices
    result = []
    for members in groups(runs):
        config = members[0].config
        problem = problem_of(config)
        largest = max((run.config for run in members), key=limits.pool_of)
        bytes_each = limits.refuse_if_too_large(largest, local_devices, memory)
        fitting = int(memory * limits.USABLE // bytes_each) * (devices // local_devices)
        fitting = devices if mesh.size > devices else max(fitting, devices)
        if (begun := sum(run.key in saved for run in members)) > fitting:
            raise UserError(
                f"the checkpoint has {begun} runs side by side, and {fitting} fit here: go on with more memory, or with"
                " mesh.data=1 and mesh.expert=1 if devices share a run; or remove the folder checkpoints"
            )
        most = min(config.mesh.runs_per_batch or default, fitting)
        most = max(most // devices, 1) * devices
        # Batches of equal size: padding falls on the last devices, which would have nothing to do.
        equal = math.ceil(len(members) / math.ceil(len(members) / most))
        name = "/".join(dict.fromkeys(run.arm for run in members))
        if problem.models[config.model].routed:
            name = f"{name} E={config.experts.count}"
        size = math.ceil(max(equal, begun) / devices) * devices
        result.append(Group(name, members, limits.pool_of(largest), size, problem))
    return result


def execute(
    runs: list[Run],
    table: pd.DataFrame,
    workdir: pathlib.Path,
    mesh: Mesh,
    report: Report | None = None,
    watching: Watching = Watching(),  # noqa: B008 (immutable)
) -> pd.DataFrame:
    """Runs everything that `table`, the workdir's rows, lacks, and returns the full table.

    `report` writes a page of finished runs while others train. SIGINT and SIGTERM stop the execution within seconds.

    Raises:
      UserError: the disk failed, or the user interrupted; everything finished is saved.
    """
    done = set(table.run) if len(table) else set()
    pending = [run for run in runs if run.key not in done]
    last_rows = _last_rows(table, {key for run in pending for key in run.needs})
    del table  # it is on the disk, and may be large
    hosts.once(lambda: pretrained.record_models(workdir, runs))
    hosts.once(lambda: pretrained.check_kept([run for run in runs if run.key in done], workdir))
    if pending:
        pretrained.check(pending)
        checks.check_values(run.config for run in pending)
        pages = EarlyPages(report) if report and hosts.is_first() else None
        _run(runs, done, last_rows, workdir, mesh, pages, watching)
    else:
        if watching != Watching():
            log.warning("all runs are done, so --tracker and --profile have nothing to record: use a new --workdir")
        hosts.once(lambda: files.remove(workdir / "checkpoints"))
    return hosts.first_process_first(lambda: finish(workdir, runs))


def _run(
    runs: list[Run],
    done: set[str],
    last_rows: dict[str, dict[str, Any]],
    workdir: pathlib.Path,
    mesh: Mesh,
    pages: EarlyPages | None,
    watching: Watching,
) -> None:
    """Trains the runs that are not `done`, batch by batch. `last_rows` are those of finished runs that others need."""
    by_key, saved = {run.key: run for run in runs}, checkpoint.agreed(workdir / "checkpoints")
    all_groups = make_groups(runs, mesh, saved={*saved.meta["runs"]} - done if saved else ())
    schedule = Schedule(all_groups, done)
    if saved and (lost := {*saved.meta["runs"]} - by_key.keys() - done):
        raise UserError(
            f"{workdir}/checkpoints holds {len(lost)} unfinished runs of another command, which this one would lose:"
            " choose another --workdir, finish them by their command, or remove that folder"
        )
    needed = {key for run in runs if run.key not in done for key in run.needs}
    swept = results.swept_keys(workdir)
    index = {id(group): i for i, group in enumerate(all_groups)}
    progress = Progress(
        [work_left(group, done) for group in all_groups], count_batches(Schedule(all_groups, done), saved)
    )
    alive = bool(done)  # or a run had a finite loss at step 0: else no second program is compiled
    program: tuple[Group, CompiledGroup] | None = None  # of one group: groups come one after the other
    with signals.Interruptions() as interrupted:
        session = Session(
            workdir,
            progress,
            lambda: hosts.any_process(interrupted()),
            Profile(workdir, watching.profile),
            watching.tracker,
        )
        try:
            while schedule:
                if session.interrupted():
                    raise interruption(workdir)
                group, batch = _take(schedule, saved)
                if program is not None and program[0] is not group and not alive:
                    return log.warning("stopped: no loss was finite at step 0; the same command runs the others too")
                progress.begin(index[id(group)])
                if program is None or program[0] is not group:
                    program = None  # frees the memory of the program before
                    program = group, _compile(group, mesh)
                    progress.compiled(program[1].compiled.seconds)
                traced_of_runs = [traced_of(run, last_rows, [by_key[key] for key in run.needs]) for run in batch]
                histories = train_batch(program[1], batch, traced_of_runs, session, saved)
                saved = None
                alive |= any(np.isfinite(history[group.problem.loss][0]) for history in histories)
                for run, history, values in zip(batch, histories, traced_of_runs, strict=True):
                    history |= tuning.column(run, values, len(history["train/rate_scale"]))
                rows = write_finished(workdir, group.problem, batch, histories, swept)
                last_rows |= {key: row for key, row in rows.items() if key in needed}
                schedule.finish(batch)
                if pages and schedule:
                    pages.write_again(workdir, runs)
        finally:
            progress.close()


def _take(schedule: Schedule, saved: Checkpoint | None) -> tuple[Group, list[Run]]:
    """Takes the batch of the checkpoint if the schedule has it, or else the next batch."""
    return (saved and schedule.take_again(saved.meta["runs"])) or schedule.take()


def _last_rows(table: pd.DataFrame, keys: set[str]) -> dict[str, dict[str, Any]]:
    """The last rows of the runs with these keys."""
    if not len(table) or not keys:
        return {}
    rows = table[table.run.isin(keys)].sort_values("step").drop_duplicates("run", keep="last")
    return rows.set_index("run").to_dict("index")  # type: ignore[return-value]


def work_left(group: Group, done: set[str]) -> Work:
    """The work of those runs of a group that are not done."""
    config, count = group.config, sum(run.key not in done for run in group.runs)
    cost = group.problem.cost(config)
    work = Work(group.name, count * config.steps, count * config.steps * cost.work)
    return work._replace(tokens=cost.tokens, flops=cost.flops) if group.problem.watched else work


def count_batches(schedule: Schedule, saved: Checkpoint | None) -> int:
    """Counts the batches of all pending runs, the saved one first; uses the schedule up."""
    count = 0
    while schedule:
        _, batch = _take(schedule, saved)
        schedule.finish(batch)
        saved, count = None, count + 1
    return count


def write_finished(
    workdir: pathlib.Path,
    problem: ProblemPart,
    runs: list[Run],
    histories: list[dict[str, np.ndarray]],
    swept: list[str],
) -> dict[str, dict[str, Any]]:
    """Writes the rows and maps of finished runs, then removes their checkpoint; returns the last row of each by key."""
    rows, last_rows, maps = [], {}, dict[str, np.ndarray]()
    for run, history in zip(runs, histories, strict=True):
        rows += rows_of(run, history, swept, problem)
        last_rows[run.key] = rows[-1]
        if run.seed == run.config.seed:
            maps |= {f"{run.key}/{name}".rstrip("/"): array for name, array in maps_of(history).items()}
            maps |= {f"{run.key}/{name}": array for name, array in _choices_of(history, run.config.trace.every).items()}

    def write() -> None:
        tables.add_part(workdir, rows, maps)
        files.remove(workdir / "checkpoints")

    hosts.once(write)
    return last_rows


def maps_of(history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a run for figures, by name: mean probabilities of experts for each cluster ("") or language, and loads.

    [evaluations, rows, experts] and [evaluations, experts]; of a language model with a stack before the name and an
    axis of layers, and with `sample`: probabilities of one row's tokens after training [layers, tokens, experts].
    """
    maps = {name: history[name].astype(np.float16) for name in history if name.endswith(("/maps", "/load"))}
    maps |= {name: history[name][-1].astype(np.float16) for name in history if name.endswith("/sample")}
    if "probs" in history:
        assigned = history["counts"].sum(1)
        maps |= {"": history["probs"].astype(np.float16)}
        maps |= {"load": (assigned / np.maximum(assigned.sum(1, keepdims=True), 1)).astype(np.float32)}
        if "right" in history:
            maps |= {name: history[name].astype(dtype) for name, dtype in PICTURED if name in history}
    return maps


def _choices_of(history: dict[str, np.ndarray], every: int) -> dict[str, np.ndarray]:
    """The choices of experts at every `every`-th evaluation, for traces; none if `every` is 0."""
    if not every:
        return {}
    names = [name for name in history if name.rpartition("/")[2] == "choices"]
    choices = {f"{TRACED}/{name}": history[name][::every].astype(np.int16) for name in names}
    return choices | {STRIDE: np.array(every, np.int32)}


def finish(workdir: pathlib.Path, runs: list[Run]) -> pd.DataFrame:
    """Merges all rows, and adds those of finished runs at further points."""
    table, settled = tables.gather(workdir)
    filled = fill_points(table, runs)
    if hosts.is_first() and len(filled) and (filled is not table or not settled):
        tables.merge(workdir, filled)
    return filled


def _compile(group: Group, mesh: Mesh) -> CompiledGroup:
    """Compiles the program of a group, and takes a digest of its data."""
    data = group.problem.digest(group.config)
    log.info("compiling %s, for %d runs in batches of %d", group.name, len(group.runs), group.size)
    compiled = compile_group(group.config, group.pool, group.size, mesh)
    effort = ", with little effort, as its runs are brief" if compiled.brief else ""
    how = f"over {compiled.devices} devices ({compiled.batching}), {compiled.bytes / 1e6:.0f} MB a batch"
    log.info("compiled %s in %.1f s%s: %s", group.name, compiled.seconds, effort, how)
    return CompiledGroup(group.name, compiled, data)


def traced_of(run: Run, last_rows: LastRows, needed: list[Run]) -> dict[str, Any]:
    """The run's traced settings, with its tuned rate and its matched setting from the finished runs that it needs."""
    config = run.config
    candidates = [r for r in needed if r.tuning and r.arm == run.arm]
    if candidates and not run.tuning:
        config = override(config, tuning.best_rates(candidates, last_rows))
    values = traced(config)
    if (match := ARMS[run.arm].match) is not None:
        source = next(r for r in needed if r.arm == match.source and r.tuning == run.tuning)
        if match.metric not in (row := last_rows[source.key]):
            hint = nearest(match.metric, [name for name in row if "/" in name])
            raise UserError(f"the arm {run.arm} matches {match.metric}, which no run has{hint}")
        values[match.setting] = float(row[match.metric])
    return values
