"""One batch of runs from its first step to its last: fed, watched, saved, resumed, stopped where it diverges."""

from __future__ import annotations

import collections
import csv
import functools
import io
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging as log

from routed.contracts import UserError
from routed.engine import checkpoint, pretrained, trackers
from routed.engine.checkpoint import Checkpoint
from routed.engine.compilation import Compiled, stack_traced
from routed.engine.limits import steps_fed
from routed.engine.profile import Profile
from routed.plan.run import Run
from routed.system import files, hosts
from routed.system.progress import Progress

#: Seconds of work after which a run checks whether it should stop: SIGTERM before a preemption leaves 30.
PATIENCE = 10.0
#: The column of the training loss in every history.
TRAIN_LOSS = "train/loss"


class Watching(NamedTuple):
    """Views of runs while they train: a name of TRACKERS, and the number of steps to profile."""

    tracker: str = ""
    profile: int = 0


class Session(NamedTuple):
    """The parts of one command that all its batches share."""

    workdir: pathlib.Path
    progress: Progress
    interrupted: Callable[[], bool]
    profile: Profile
    tracker: str  # a name of TRACKERS, or nothing


class CompiledGroup(NamedTuple):
    """The name and program of a group, and a digest of the data that its runs train on."""

    name: str
    compiled: Compiled
    data: str


def train_batch(
    group: CompiledGroup, runs: list[Run], traced: list[dict[str, Any]], session: Session, saved: Checkpoint | None
) -> list[dict[str, np.ndarray]]:
    """Trains a batch of runs, from its checkpoint if there is one, and returns the history of each run.

    Saves every `checkpoint.every` steps. Devices work in stretches of at most PATIENCE seconds. A run stops when its
    loss is no longer finite, and the last checkpoint before that is copied to diverged/.

    Raises:
      UserError: interrupted, and saved; the checkpoint is of other data.
    """
    batch = Batch(group, runs, traced, session)
    batch.resume(saved)
    for step, end in batch.stretches():
        with session.profile.recorded(end - step):
            batch.compute(step, end)
            batch.watch(step, end)
        if not batch.active.any():
            session.progress.resume((batch.config.steps - end) * len(runs))
            break
        is_due = end > 0 and end % batch.every == 0
        if is_due:
            batch.save(end)
        if session.interrupted():
            if not is_due:
                batch.save(end)
            raise interruption(session.workdir)
    histories = batch.finish()
    return [history | group.compiled.problem.offline(batch.config, history) for history in histories]


class Batch:
    """The runs of one batch on the devices: seeds, traced settings, worlds, states, and which runs still train."""

    def __init__(self, group: CompiledGroup, runs: list[Run], traced: list[dict[str, Any]], session: Session):
        compiled, config = group.compiled, runs[0].config
        self.group, self.runs, self.session = group, runs, session
        self.config, self.problem, self.every = config, compiled.problem, steps_fed(config)
        padding = compiled.runs - len(runs)
        seeds = [run.seed for run in runs] + [runs[0].seed] * padding
        self.seeds = compiled.place(np.array(seeds, np.uint32))
        self.traced = compiled.place(stack_traced(traced + [traced[0]] * padding))
        self.shared = compiled.place_shared(self.problem.shared_arrays(config))
        self.feed = _feed(compiled, runs[0], seeds)
        self.start_time = time.perf_counter()
        self.worlds, self.states = compiled.start(self.seeds, self.traced, self.shared)
        self.active = np.array([True] * len(runs) + [False] * padding)
        self.first_step: int | None = None
        self.losses: dict[str, np.ndarray] = {}  # training and validation losses [runs, evaluations so far]
        is_tracked = session.tracker and hosts.is_first()
        self.tracker = trackers.TRACKERS[session.tracker](session.workdir, runs) if is_tracked else None

    def resume(self, saved: Checkpoint | None) -> None:
        """Sets the states to those of the checkpoint, if it is one of this batch, or else to pretrained ones."""
        count, progress = len(self.runs), self.session.progress
        states = pretrained.start_from(self.group.compiled.remember, self.states, self.runs, self.session.workdir)
        self.states, self.first_step = _resumed(states, saved, self.runs, self.group.data)
        if self.first_step is not None:
            self.active[:count] = hosts.fetch(self.states["step"])[:count] == self.first_step  # others had diverged
            progress.resume(self.first_step * count)
            log.info("resuming %s from step %d", self.group.name, self.first_step)

    def stretches(self) -> Iterator[tuple[int, int]]:
        """The first and last step of each stretch of work."""
        progress, profile, every = self.session.progress, self.session.profile, self.every
        limit = lambda: hosts.min_over_processes(profile.limit(progress.steps_within(PATIENCE, every)))  # noqa: E731
        return _stretches(self.first_step, every, self.config.steps, limit)

    def compute(self, step: int, end: int) -> None:
        """Starts the steps up to `end`, and the evaluation there if one is due; prepares the next part of the feed."""
        self.since = time.perf_counter()
        compiled, every = self.group.compiled, self.every
        if self.active.any():
            active, steps = compiled.place(self.active), compiled.place_shared(np.int32(end - step))
            inputs = self.seeds, self.traced, self.worlds
            if end > step:
                feed = self.feed(step // every)
                self.states = compiled.advance(active, steps, *inputs, self.states, feed, self.shared)
            if end % self.config.eval_every == 0:
                self.states = compiled.record(active, *inputs, self.states, self.shared)
        if end and step - step % every + every < self.config.steps:
            self.feed(step // every + 1)  # while the devices work

    def watch(self, step: int, end: int) -> None:
        """Waits for the devices, then reports the losses, and stops the runs whose loss is not finite."""
        count, progress = len(self.runs), self.session.progress
        is_evaluated, row = end % self.config.eval_every == 0, end // self.config.eval_every
        history = self.states["history"]
        names = [TRAIN_LOSS, self.problem.loss]
        if is_evaluated and self.session.tracker:
            names = [name for name, values in history.items() if values.ndim == 2]  # scalars
        arrays = {name: history[name] for name in names}, self.states["total"] / self.states["unit"]
        scalars, summed = hosts.fetch(arrays)
        progress.measure_pace(end - step, time.perf_counter() - self.since)
        if is_evaluated and self.tracker is not None:
            trackers.write_row(self.tracker, scalars, row, end, self.active)
        self.losses = {name: scalars[name][:count, : row + 1] for name in (TRAIN_LOSS, self.problem.loss)}
        losses = self.losses[TRAIN_LOSS][:, row] if is_evaluated else summed[:count] / (end % self.config.eval_every)
        checked = losses if end else self.losses[self.problem.loss][:, 0]
        _drop_diverged(self.active[:count], checked, self.runs, end, self.session.workdir)
        finite = losses[self.active[:count]]
        progress.report((end - step) * count, end, float(np.median(finite)) if len(finite) else math.nan)

    def save(self, step: int) -> None:
        """Saves the states after `step` steps, and keeps the checkpoint with the lowest validation loss."""
        active = self.active[: len(self.runs)]
        best = None
        if active.any():  # the rows of a run that diverged end before
            losses = self.losses[self.problem.loss][active]
            best = int(losses.mean(0).argmin()) * self.config.eval_every
        checkpoint.save(
            self.session.workdir / "checkpoints",
            step,
            [run.key for run in self.runs],
            self.states,
            keep=self.config.checkpoint.keep,
            best=best if self.problem.watched else None,
            data=self.group.data,
        )

    def finish(self) -> list[dict[str, np.ndarray]]:
        """Writes the timing and, if asked for, the final models; returns the history of each run."""
        if self.tracker is not None:
            self.tracker.close()
        count, workdir = len(self.runs), self.session.workdir
        history, reached = jax.tree.map(np.array, hosts.fetch((self.states["history"], self.states["step"])))
        seconds, steps = time.perf_counter() - self.start_time, self.config.steps - (self.first_step or 0)
        if hosts.is_first():
            write_timing(workdir, self.group.name, count, self.group.compiled.seconds, seconds, steps * count)
        if self.config.checkpoint.final:
            models = self.states["params"] | {"state": self.states["state"]}
            for i, run in enumerate(self.runs):
                pretrained.save_final_model(workdir, run, jax.tree.map(lambda a, i=i: a[i], models))
        return [
            _cut_history(
                {name: values[i] for name, values in history.items()}, int(reached[i]) // self.config.eval_every
            )
            for i in range(count)
        ]


def interruption(workdir: pathlib.Path) -> UserError:
    """The error that ends a command after a request to stop, when everything is saved."""
    return UserError(f"interrupted and saved in {workdir}: the same command goes on from here")


def _stretches(first: int | None, every: int, steps: int, limit: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """Yields (step, end) to the next multiple of `every`, or `limit` steps on; (0, 0) first if `first` is None."""
    if first is None:
        yield 0, 0
    step = first or 0
    while step < steps:
        end = min(step - step % every + every, step + limit())
        yield step, end
        step = end


def _feed(compiled: Compiled, run: Run, seeds: list[int]) -> Callable[[int], Any]:
    """A function from the number of a part, of `checkpoint.every` steps, to its feed; keeps two parts."""
    local_runs, rows = compiled.local
    every = steps_fed(run.config)
    feeds = {seed: compiled.problem.feed(run.config, seed, rows) for seed in set(seeds[local_runs])}

    @functools.lru_cache(maxsize=2)
    def feed(part: int) -> Any:
        by_seed = {seed: make_rows(part * every, every) for seed, make_rows in feeds.items()}
        rows_of_runs = [by_seed[seed] for seed in seeds[local_runs]]
        return compiled.place_feed(jax.tree.map(lambda *leaves: np.stack(leaves), *rows_of_runs))

    return feed


def _resumed(states: Any, saved: Checkpoint | None, runs: list[Run], data: str) -> tuple[Any, int | None]:
    """The states and the step of the checkpoint, if it is one of these runs and fits; otherwise `states` and None.

    Raises:
      UserError: its runs began on other data, which are no part of a run's key.
    """
    if saved is None or saved.meta["runs"] != [run.key for run in runs]:
        return states, None
    if (data_before := saved.meta.get("data", data)) != data:  # checkpoints of early versions do not name their data
        raise UserError(
            f"checkpoint {saved.path} is of runs on other data ({data_before}; now {data}): choose another --workdir,"
            " or restore the files that the runs began on"
        )
    loaded = checkpoint.load(saved.path, saved.meta, states, len(runs))
    return (states, None) if loaded is None else (loaded, saved.meta["step"])


def _cut_history(history: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    """Overwrites the rows after `row` or the divergence: scalars by NaN, arrays by those of the last good row."""
    bad = np.flatnonzero(~np.isfinite(history[TRAIN_LOSS][1 : row + 1]))
    row = int(bad[0]) if len(bad) else row
    for values in history.values():
        values[row + 1 :] = np.nan if values.ndim == 1 else values[row]
    return history


def _drop_diverged(active: np.ndarray, losses: np.ndarray, runs: list[Run], step: int, workdir: pathlib.Path) -> None:
    """Stops runs whose loss is not finite, and copies the last checkpoint before that to diverged/."""
    lost = [runs[i] for i in np.flatnonzero(active & ~np.isfinite(losses))]
    active &= np.isfinite(losses)
    if not lost or not hosts.is_first():
        return
    good, folder = checkpoint.latest(workdir / "checkpoints"), workdir / "diverged"
    text = "there is no checkpoint before it"
    if good is not None and good.meta["runs"] == [run.key for run in runs]:
        for run in lost:
            with files.explained(copy := folder / f"{run.arm}-seed{run.seed}-{run.key}"):
                if not (copy / "meta.json").exists():
                    files.copy(good.path, copy)
        text = f"the last good checkpoint is {copy if len(lost) == 1 else folder}"
    names = ", ".join(f"{arm} {count}" for arm, count in collections.Counter(run.arm for run in lost).items())
    form = "%d of %d runs diverged (%s): their loss is not finite by step %d; they stop, %s"
    log.warning(form, len(lost), len(runs), names, step, text)


def write_timing(workdir: pathlib.Path, name: str, count: int, compile_s: float, run_s: float, run_steps: int) -> None:
    """Adds a line to timing.csv, the only table with measured times."""
    path = workdir / "timing.csv"
    header = b"group,runs,compile_s,run_s,run_steps,ms_per_run_step\n"
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(
        [name, count, f"{compile_s:.2f}", f"{run_s:.2f}", run_steps, f"{1e3 * run_s / max(run_steps, 1):.4f}"]
    )
    with files.explained(path):
        before = path.read_bytes() if path.exists() else header
    files.write(path, before + line.getvalue().encode())
