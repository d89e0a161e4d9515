"""One batch of runs from its first step to its last: fed, watched, saved, resumed, stopped where it diverges."""

from __future__ import annotations

import csv
import io
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging as log

from routed import checkpoint, files, hosts
from routed.events import Events
from routed.kinds import kind_of
from routed.layout import Compiled, stack_settings
from routed.points import Run
from routed.progress import Progress

#: Seconds between two moments at which a run can be saved, above which the user is told.
PATIENCE = 20.0


def advance(
    compiled: Compiled,
    name: str,
    batch: list[Run],
    settings: list[dict[str, Any]],
    workdir: pathlib.Path,
    saved: tuple[pathlib.Path, dict] | None,
    progress: Progress,
    stop: Callable[[], None],
) -> list[dict[str, np.ndarray]]:
    """All steps of a batch, from its checkpoint if there is one; the history of each run.

    `stop` is asked after every checkpoint and may raise. A run whose loss is no longer finite takes no further step, and
    the checkpoint before that is kept under diverged/.
    """
    config, count = batch[0].config, len(batch)
    kind, every = kind_of(config), config.checkpoint.every or config.eval_every
    padding = compiled.runs - count
    seeds = [run.seed for run in batch] + [batch[0].seed] * padding
    placed = compiled.place(np.array(seeds, np.uint32))
    stacked = compiled.place(stack_settings(settings + [settings[0]] * padding))
    active = np.array([True] * count + [False] * padding)
    given = compiled.place_given(kind.given(config))
    begun = time.perf_counter()
    worlds, states = compiled.start(placed, stacked, given)
    states = _transplanted(states, batch, workdir)
    first = 0
    if saved is not None and saved[1]["runs"] == [run.key for run in batch]:
        loaded = checkpoint.load(saved[0], saved[1], states, count)
        if loaded is not None:
            states, first = loaded, saved[1]["part"] + 1
            done = (first - 1) * every
            active[:count] &= hosts.fetch(states["step"])[:count] == done  # the others had diverged
            progress.advance(done * count, name, done, math.nan, resumed=True)
            log.info("resuming %s from step %d", name, done)
    own, rows = compiled.fed
    feeds = {seed: kind.feed(config, seed, rows) for seed in set(seeds[own])}

    def feed(part: int) -> Any:
        made = {seed: one((part - 1) * every, every) for seed, one in feeds.items()}
        return compiled.place_feed(jax.tree.map(lambda *leaves: np.stack(leaves), *[made[seed] for seed in seeds[own]]))

    events = Events(workdir, batch) if kind.watched and hosts.first() else None
    parts, upcoming, best = config.steps // every, feed(max(first, 1)), None
    for part in range(first, parts + 1):  # part 0 only evaluates
        chunk = time.perf_counter()
        steps, evaluated = every if part else 0, part * every % config.eval_every == 0
        states = compiled.advance(
            compiled.place(active),
            compiled.place(np.full(compiled.runs, steps, np.int32)),
            compiled.place(np.full(compiled.runs, evaluated)),
            placed, stacked, worlds, states, upcoming, given,
        )  # fmt: skip
        if 0 < part < parts:
            upcoming = feed(part + 1)  # while the devices work
        step = part * every
        row = step // config.eval_every
        watched = {n: states["history"][n] for n in ("train/loss", kind.loss)}
        if evaluated and kind.watched:
            watched = {n: values for n, values in states["history"].items() if values.ndim == 2}  # scalars
        watched, summed = hosts.fetch((watched, states["total"]))
        if evaluated and events is not None:
            events.write(watched, row, step, active)
        history, summed = {n: watched[n][:count, : row + 1] for n in ("train/loss", kind.loss)}, summed[:count]
        losses = history["train/loss"][:, row] if evaluated else summed / (step % config.eval_every)
        _drop_diverged(active[:count], losses if part else history[kind.loss][:, 0], batch, step, workdir)
        progress.advance(steps * count, name, step, float(np.median(losses)))
        if part:
            if active.any():  # a run that diverged has no row since
                best = int(history[kind.loss][active[:count]].mean(0).argmin()) * config.eval_every // every
            checkpoint.save(
                workdir / "checkpoints", part, [r.key for r in batch], states, count,
                keep=config.checkpoint.keep, best=best if kind.watched else None,
            )  # fmt: skip
        if part == max(first, 1) and (taken := time.perf_counter() - chunk) > PATIENCE:
            log.warning(
                "%d steps take %.0f s, and SIGTERM is answered after them: where less is granted (30 s before a preemption),"
                " lower checkpoint.every", every, taken,
            )  # fmt: skip
        stop()
    history, reached = jax.tree.map(np.array, hosts.fetch((states["history"], states["step"])))
    seconds = time.perf_counter() - begun
    if hosts.first():
        _write_timing(workdir, name, count, compiled.seconds, seconds, (parts - max(first, 1) + 1) * every * count)
    if config.checkpoint.final:
        for i, run in enumerate(batch):
            checkpoint.save_model(workdir / "models" / run.key, jax.tree.map(lambda a, i=i: a[i], states["params"]))
    ran = [
        _until({n: values[i] for n, values in history.items()}, int(reached[i]) // config.eval_every)
        for i in range(count)
    ]
    return [one | kind.offline(config, one) for one in ran]


def _until(history: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    """The history of a run that went as far as `row`: what it never saw is NaN, in arrays what it saw last."""
    for values in history.values():
        values[row + 1 :] = np.nan if values.ndim == 1 else values[row]
    return history


def _transplanted(states, batch: list[Run], workdir: pathlib.Path):
    """Gives the runs of the arm `transplant` the trained routers of their sources."""
    for i, run in enumerate(batch):
        if run.transplant is None:
            continue
        like = jax.tree.map(lambda a, i=i: a[i], states["params"]["router"])
        router = checkpoint.load_model(workdir / "models" / run.transplant, like)

        def put(held, i=i, router=router):
            return jax.tree.map(lambda old, new: jax.device_put(old.at[i].set(new), old.sharding), held, router)

        before, layer = states["before"]
        states = states | {
            "params": states["params"] | {"router": put(states["params"]["router"])},
            "router0": put(states["router0"]),
            "before": (put(before), layer),
        }
    return states


def _drop_diverged(active: np.ndarray, losses: np.ndarray, batch: list[Run], step: int, workdir: pathlib.Path) -> None:
    """Stops runs whose loss is not finite, and puts the last checkpoint before that aside."""
    for i in np.flatnonzero(active & ~np.isfinite(losses)):
        active[i] = False
        if not hosts.first():
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


def _write_timing(workdir: pathlib.Path, name: str, count: int, compile_s: float, run_s: float, run_steps: int) -> None:
    """Adds a line to timing.csv, the only table with a clock in it."""
    path = workdir / "timing.csv"
    header = b"group,runs,compile_s,run_s,run_steps,ms_per_run_step\n"
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(
        [name, count, f"{compile_s:.2f}", f"{run_s:.2f}", run_steps, f"{1e3 * run_s / max(run_steps, 1):.4f}"]
    )
    files.write(path, (path.read_bytes() if path.exists() else header) + line.getvalue().encode())
