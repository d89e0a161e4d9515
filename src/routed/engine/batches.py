"""One batch of runs from its first step to its last: fed, watched, saved, resumed, stopped where it diverges."""

from __future__ import annotations

import csv
import functools
import io
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.engine import checkpoint, initial
from routed.engine.compilation import Compiled, stack_traced
from routed.engine.events import Events
from routed.engine.limits import steps_fed
from routed.plan.config import problem_of
from routed.plan.runs import Run
from routed.system import files, hosts
from routed.system.progress import Progress

#: Seconds of work after which a run asks whether it should stop: SIGTERM before a preemption leaves 30.
PATIENCE = 10.0


def advance(
    compiled: Compiled,
    name: str,
    batch: list[Run],
    traced: list[dict[str, Any]],
    data: str,
    workdir: pathlib.Path,
    saved: tuple[pathlib.Path, dict] | None,
    progress: Progress,
    interrupted: Callable[[], bool],
) -> list[dict[str, np.ndarray]]:
    """All steps of a batch, from its checkpoint if there is one; the history of each run.

    Saves every `checkpoint.every` steps. Devices work in stretches of at most PATIENCE seconds, after each of which
    `interrupted` is asked. A run whose loss is no longer finite takes no further step, and the checkpoint before that is kept
    under diverged/. `data` is a digest of what the batch trains on.

    Raises:
      UserError: interrupted, and saved; the checkpoint is of other data.
    """
    config, count = batch[0].config, len(batch)
    problem, every = problem_of(config), steps_fed(config)
    padding = compiled.runs - count
    seeds = [run.seed for run in batch] + [batch[0].seed] * padding
    placed = compiled.place(np.array(seeds, np.uint32))
    stacked = compiled.place(stack_traced(traced + [traced[0]] * padding))
    shared = compiled.place_shared(problem.shared_arrays(config))
    feed = _feed(compiled, config, seeds)
    begun = time.perf_counter()
    worlds, states = compiled.start(placed, stacked, shared)
    states, first = _resumed(initial.begun(compiled, states, batch, workdir), saved, batch, data)
    active = np.array([True] * count + [False] * padding)
    if first is not None:
        active[:count] = hosts.fetch(states["step"])[:count] == first  # the others had diverged
        progress.resume(first * count, (first // config.eval_every + 1) * count)
        log.info("resuming %s from step %d", name, first)
    events = Events(workdir, batch) if problem.watched and hosts.is_first() else None

    def save(step: int, history: dict[str, np.ndarray]) -> None:
        # Rows of a run that diverged end before; without any run left, no row is best.
        best = int(history[problem.loss][active[:count]].mean(0).argmin()) * config.eval_every if active.any() else None
        checkpoint.save(
            workdir / "checkpoints", step, [r.key for r in batch], states,
            keep=config.checkpoint.keep, best=best if problem.watched else None, data=data,
        )  # fmt: skip

    for step, end in _stretches(
        first, every, config.steps, lambda: hosts.min_over_processes(progress.within(PATIENCE, every))
    ):
        evaluated, since = end % config.eval_every == 0, time.perf_counter()
        if active.any():
            here, steps = compiled.place(active), compiled.place_shared(np.int32(end - step))
            if end > step:
                states = compiled.advance(here, steps, placed, stacked, worlds, states, feed(step // every), shared)
            if evaluated:
                states = compiled.record(here, placed, stacked, worlds, states, shared)
        if end and step - step % every + every < config.steps:
            feed(step // every + 1)  # while the devices work
        row = end // config.eval_every
        watched = {n: states["history"][n] for n in ("train/loss", problem.loss)}
        if evaluated and problem.watched:
            watched = {n: values for n, values in states["history"].items() if values.ndim == 2}  # scalars
        watched, summed = hosts.fetch((watched, states["total"]))
        progress.paced(end - step, time.perf_counter() - since)
        if evaluated and events is not None:
            events.write(watched, row, end, active)
        history, summed = {n: watched[n][:count, : row + 1] for n in ("train/loss", problem.loss)}, summed[:count]
        losses = history["train/loss"][:, row] if evaluated else summed / (end % config.eval_every)
        _drop_diverged(active[:count], losses if end else history[problem.loss][:, 0], batch, end, workdir)
        progress.advance((end - step) * count, evaluated * count, end, float(np.median(losses)))
        if due := end > 0 and end % every == 0:
            save(end, history)
        if interrupted():
            if not due:
                save(end, history)
            raise interruption(workdir)
    history, reached = jax.tree.map(np.array, hosts.fetch((states["history"], states["step"])))
    seconds = time.perf_counter() - begun
    if hosts.is_first():
        write_timing(workdir, name, count, compiled.seconds, seconds, (config.steps - (first or 0)) * count)
    if config.checkpoint.final:
        for i, run in enumerate(batch):
            kept = states["params"] | {"state": states["state"]}
            model = jax.tree.map(lambda a, i=i: a[i], kept)
            initial.keep(workdir, run, model)
    ran = [
        _until({n: values[i] for n, values in history.items()}, int(reached[i]) // config.eval_every)
        for i in range(count)
    ]
    return [one | problem.offline(config, one) for one in ran]


def interruption(workdir: pathlib.Path) -> UserError:
    """What a run ends with that was asked to stop, when everything is saved."""
    return UserError(f"interrupted and saved in {workdir}: the same command goes on from here")


def _stretches(first: int | None, every: int, steps: int, limit: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """(step, end) up to `steps`: to the next multiple of `every` if `limit` allows. From None on, one without a step comes first."""
    if first is None:
        yield 0, 0
    step = first or 0
    while step < steps:
        end = min(step - step % every + every, step + limit())
        yield step, end
        step = end


def _feed(compiled: Compiled, config: ConfigDict, seeds: list[int]) -> Callable[[int], Any]:
    """The feed of `checkpoint.every` steps, by the number of the part; two are kept."""
    problem, every = problem_of(config), steps_fed(config)
    mine, rows = compiled.local
    feeds = {seed: problem.feed(config, seed, rows) for seed in set(seeds[mine])}

    @functools.lru_cache(maxsize=2)
    def feed(part: int) -> Any:
        made = {seed: one(part * every, every) for seed, one in feeds.items()}
        return compiled.place_feed(
            jax.tree.map(lambda *leaves: np.stack(leaves), *[made[seed] for seed in seeds[mine]])
        )

    return feed


def _resumed(
    states: Any, saved: tuple[pathlib.Path, dict] | None, batch: list[Run], data: str
) -> tuple[Any, int | None]:
    """The states of the checkpoint and its step, if it is one of this batch and fits; else `states` as they are and None.

    Raises:
      UserError: its runs began on other data, which no key of a run tells.
    """
    if saved is None or saved[1]["runs"] != [run.key for run in batch]:
        return states, None
    if (before := saved[1].get("data", data)) != data:  # none: saved before there was one
        raise UserError(
            f"checkpoint {saved[0]} is of runs on other data ({before}; now {data}): choose another --workdir, or restore"
            " data.directory"
        )
    loaded = checkpoint.load(saved[0], saved[1], states, len(batch))
    return (states, None) if loaded is None else (loaded, saved[1]["step"])


def _until(history: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    """The history of a run that went as far as `row`, or diverged: later rows are NaN, in arrays those of the last good one."""
    bad = np.flatnonzero(~np.isfinite(history["train/loss"][1 : row + 1]))
    row = int(bad[0]) if len(bad) else row
    for values in history.values():
        values[row + 1 :] = np.nan if values.ndim == 1 else values[row]
    return history


def _drop_diverged(active: np.ndarray, losses: np.ndarray, batch: list[Run], step: int, workdir: pathlib.Path) -> None:
    """Stops runs whose loss is not finite, and puts the last checkpoint before that aside."""
    for i in np.flatnonzero(active & ~np.isfinite(losses)):
        active[i] = False
        if not hosts.is_first():
            continue
        run, good = batch[i], checkpoint.latest(workdir / "checkpoints")
        text = "there is no checkpoint before it"
        if good is not None and good[1]["runs"] == [r.key for r in batch]:
            kept = workdir / "diverged" / f"{run.arm}-seed{run.seed}-{run.key}"
            with files.explained(kept):
                if not kept.exists():
                    files.copy(good[0], kept)
            text = f"the last good checkpoint is {kept}"
        log.warning(
            "run %s (%s, seed %d): the loss is not finite by step %d; it stops, %s",
            run.key,
            run.arm,
            run.seed,
            step,
            text,
        )


def write_timing(workdir: pathlib.Path, name: str, count: int, compile_s: float, run_s: float, run_steps: int) -> None:
    """Adds a line to timing.csv, the only table with a clock in it."""
    path = workdir / "timing.csv"
    header = b"group,runs,compile_s,run_s,run_steps,ms_per_run_step\n"
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(
        [name, count, f"{compile_s:.2f}", f"{run_s:.2f}", run_steps, f"{1e3 * run_s / max(run_steps, 1):.4f}"]
    )
    files.write(path, (path.read_bytes() if path.exists() else header) + line.getvalue().encode())
