"""Executes a plan: compiles each group once, advances its runs in batches, saves every chunk, writes rows as they finish."""

from __future__ import annotations

import csv
import io
import math
import os
import pathlib
import signal
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from absl import logging as log
from jax.sharding import Mesh

from routed import checkpoint, files, results
from routed.arms import MATCHED
from routed.config import override
from routed.data import TASKS
from routed.layout import Compiled, bytes_of_run, compile_group, stack_settings, traced
from routed.metrics import agreement, churn
from routed.points import Run, groups
from routed.progress import Progress
from routed.words import UserError

#: Share of the memory that worlds and states may take; the rest is for what a step computes.
USABLE = 1 / 3


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
    made = []
    for members in groups(runs):
        config = members[0].config
        pool = max(run.config.data.samples for run in members)
        devices = mesh.size
        samples = TASKS[config.data.name].bytes_per_sample(config.data) * (pool + config.data.test_samples)
        _refuse_if_too_large("data.samples", pool, samples, devices)
        each = bytes_of_run(config, pool)
        _refuse_if_too_large("experts.count", config.experts.count, each, devices)
        fits = int(_memory() * USABLE // each)
        wanted = min(config.mesh.runs_per_batch, len(members), fits)
        size = max(devices, math.ceil(wanted / devices) * devices)
        name = "/".join(dict.fromkeys(run.arm for run in members))
        made.append(Group(f"{name} E={config.experts.count}" if config.model == "moe" else name, members, pool, size))
    return made


def _refuse_if_too_large(key: str, value: int, bytes_each: int, devices: int) -> None:
    if bytes_each * devices > _memory() * USABLE:
        raise UserError(
            f"config key {key}={value}: a run takes {bytes_each / 2**30:.1f} GiB and {devices} devices hold one each,"
            f" of {_memory() / 2**30:.1f} GiB of memory; lower {key} or set mesh.run=1"
        )


def execute(runs: list[Run], table: pd.DataFrame, workdir: pathlib.Path, mesh: Mesh) -> pd.DataFrame:
    """Runs what is missing from `table` and returns the full table. Stops between chunks on SIGINT or SIGTERM.

    Raises:
      UserError: the disk failed, or the user interrupted; everything finished is saved.
    """
    done = set(table.run) if len(table) else set()
    pending = [r for r in runs if r.key not in done]
    if not pending:
        checkpoint.clear(workdir / "checkpoints")
        return table
    made, wanted = make_groups(runs, mesh), {run.key: run for run in runs}
    swept = results.swept_keys(workdir)
    progress = Progress(sum(r.config.steps for r in pending))
    compiled: dict[int, Compiled] = {}
    saved = checkpoint.latest(workdir / "checkpoints")
    with _interruptions() as interrupted:
        try:
            while pending:
                _stop_if(interrupted, workdir)
                ready = {r.key for r in pending if done.issuperset(r.needs)}
                batch, group = _resumed(saved, ready, wanted, made) or _next_batch(ready, made)
                if id(group) not in compiled:
                    compiled.clear()  # groups come one after the other: one program in memory is enough
                    compiled[id(group)] = _compile(group, mesh)
                settings = [_settle(run, table, [wanted[key] for key in run.needs]) for run in batch]
                history = _advance(compiled[id(group)], group, batch, settings, workdir, saved, progress, interrupted)
                saved = None
                rows, maps = [], {}
                for run, one in zip(batch, history, strict=True):
                    rows += results.rows_of(run, one, swept)
                    if run.seed == run.config.seed and "probs" in one:
                        maps[run.key] = one["probs"].astype(np.float16)
                table = results.merge(table, rows, swept)
                results.write_heatmaps(workdir, maps)
                results.write_table(workdir, table)
                checkpoint.clear(workdir / "checkpoints")
                done |= {run.key for run in batch}
                pending = [r for r in pending if r.key not in done]
        finally:
            progress.close()
    return table


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


def _settle(run: Run, table: pd.DataFrame, needed: list[Run]) -> dict[str, Any]:
    """The run's traced settings, with what depends on finished runs filled in: its tuned rate, its matched setting."""
    config = run.config
    tuning = [r for r in needed if r.tuning and r.arm == run.arm]
    if tuning and not run.tuning:
        config = override(config, {"optimizer.rate_scale": best_scale(tuning, table)})
    settings = traced(config)
    if run.arm in MATCHED:
        match = MATCHED[run.arm]
        source = next(r for r in needed if r.arm == match.source and r.tuning == run.tuning)
        rows = table[table.run == source.key]
        settings[match.setting] = float(rows.loc[rows.step.idxmax(), match.metric])
    return settings


def best_scale(tuning: list[Run], table: pd.DataFrame) -> float:
    """The candidate with the lowest mean final test loss over the tuning seeds; one that diverged never wins."""
    losses: dict[float, list[float]] = {}
    for run in tuning:
        rows = table[table.run == run.key]
        loss = float(rows.loc[rows.step.idxmax(), "test/loss"])
        losses.setdefault(run.config.optimizer.rate_scale, []).append(loss if np.isfinite(loss) else math.inf)
    return min(losses, key=lambda scale: np.mean(losses[scale]))


def _advance(
    compiled: Compiled, group: Group, batch, settings, workdir, saved, progress, interrupted
) -> list[dict[str, np.ndarray]]:
    """All chunks of one batch, from its checkpoint if there is one; the history of each run."""
    config, count = group.config, len(batch)
    padding = compiled.runs - count
    seeds = compiled.place(np.array([r.seed for r in batch] + [batch[0].seed] * padding, np.uint32))
    stacked = compiled.place(stack_settings(settings + [settings[0]] * padding))
    active = compiled.place(np.array([True] * count + [False] * padding))
    begun = time.perf_counter()
    worlds, states = compiled.start(seeds, stacked)
    first = 0
    if saved is not None and saved[1]["runs"] == [r.key for r in batch]:
        loaded = checkpoint.load(saved[0], saved[1], checkpoint.abstract(states))
        if loaded is not None:
            states, first = loaded, saved[1]["chunk"] + 1
            progress.advance(
                (first - 1) * config.eval_every * count, group.name, (first - 1) * config.eval_every, math.nan
            )
            log.info("resuming %s from step %d", group.name, (first - 1) * config.eval_every)
    chunks = config.steps // config.eval_every
    for chunk in range(first, chunks + 1):  # chunk 0 only evaluates
        steps = config.eval_every if chunk else 0
        states = compiled.advance(
            active, compiled.place(np.full(compiled.runs, steps, np.int32)), seeds, stacked, worlds, states
        )
        losses = np.asarray(states["history"]["train/loss"])[:count, chunk]
        progress.advance(steps * count, group.name, chunk * steps, float(np.median(losses)))
        if chunk:
            checkpoint.save(workdir / "checkpoints", chunk, [r.key for r in batch], states)
        _stop_if(interrupted, workdir)
    history = jax.tree.map(np.asarray, states["history"])
    seconds = time.perf_counter() - begun
    _write_timing(
        workdir, group, count, compiled.seconds, seconds, (chunks - max(first, 1) + 1) * config.eval_every * count
    )
    ran = [{name: values[i] for name, values in history.items()} for i in range(count)]
    return [one | _offline(one) for one in ran]


def _offline(history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns that need several evaluations at once, or scikit-learn."""
    if "choices" not in history:
        return {}
    choices = history["choices"]
    columns = [agreement(counts) for counts in history["counts"]]
    found = {f"router/{name}": np.array([one[name] for one in columns]) for name in columns[0]}
    found["router/churn"] = np.array([np.nan] + [churn(a, b) for a, b in zip(choices[1:], choices[:-1], strict=True)])
    found["router/churn_to_final"] = np.array([churn(one, choices[-1]) for one in choices])
    return found


def _write_timing(
    workdir: pathlib.Path, group: Group, count: int, compile_s: float, run_s: float, run_steps: int
) -> None:
    """Adds a line to timing.csv, the only table with a clock in it."""
    path = workdir / "timing.csv"
    header = b"group,runs,compile_s,run_s,run_steps,ms_per_run_step\n"
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(
        [group.name, count, f"{compile_s:.2f}", f"{run_s:.2f}", run_steps, f"{1e3 * run_s / max(run_steps, 1):.4f}"]
    )
    files.write(path, (path.read_bytes() if path.exists() else header) + line.getvalue().encode())


def _stop_if(interrupted, workdir: pathlib.Path) -> None:
    if interrupted():
        raise UserError(f"interrupted and saved in {workdir}: the same command goes on from here")


class _interruptions:
    """Turns SIGINT and SIGTERM into a question that is asked between chunks; a second signal stops at once."""

    def __enter__(self):
        self.caught = False
        self.before = {s: signal.signal(s, self._catch) for s in (signal.SIGINT, signal.SIGTERM)}
        return lambda: self.caught

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _catch(self, number, frame):
        if self.caught:
            raise KeyboardInterrupt
        self.caught = True
        # Not the log: a handler may interrupt the log's own writing, which must not be entered twice.
        os.write(2, f"{signal.Signals(number).name}: saving after this chunk\n".encode())


def _memory() -> int:
    """Bytes of memory of this machine: all of it, not what is free now, so that a plan is the same on every start."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
