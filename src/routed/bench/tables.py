"""Cost of many runs beside their training: the bookkeeping of a batch, the report, and the most memory of both.

Rows are drawn at random; planning, grouping, scheduling, writing, merging and reporting are the functions of a command.
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging as log
from ml_collections import ConfigDict

from routed.analysis import page
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Claim, Writer
from routed.bench.harness import peak_bytes
from routed.engine import execution, results
from routed.engine.batches import write_timing
from routed.engine.devices import make_mesh, split_host
from routed.engine.schedule import Schedule
from routed.plan import Figure, Point, base, override, product
from routed.plan.config import problem_of
from routed.plan.run import Run
from routed.plan.runs import plan_runs

#: Runs are separations x samples x arms x seeds; only the number of sizes grows.
RUNS, SEPARATIONS, SEEDS = (1_000, 10_000, 100_000), 10, 10
ARMS = (
    *("learned", "frozen", "frozen_sharp", "frozen_data", "frozen_top1", "oracle", "hash"),
    *("dense_active", "dense_total", "dense_expert"),
)
#: Evaluations and metrics of a run.
EVALUATIONS, METRICS = 9, 60
SETTINGS = {"name": "tables", "arms": ARMS, "seeds": SEEDS, "steps": 4000, "eval_every": 4000 // (EVALUATIONS - 1)}
SETTINGS |= {"data.clusters": 8, "data.dim": 8, "data.test_samples": 1600}
SETTINGS |= {"experts.count": 8, "mesh.runs_per_batch": 16}


def bench(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields records {runs, seconds_per_batch, report_seconds, peak_bytes}; the peak is of the process so far."""
    del rounds  # a batch is timed thousands of times
    split_host()
    log.set_verbosity(log.WARNING)
    for runs in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            yield measure(runs, pathlib.Path(folder))


def measure(count: int, workdir: pathlib.Path) -> dict[str, Any]:
    """Plans, books and reports so many runs; returns their record."""
    config, sweep = override(base(), SETTINGS), sweep_of(count)
    started = time.perf_counter()
    runs = plan_runs(config, sweep)
    results.open_workdir(workdir, "tables", config, sweep)
    schedule = Schedule(execution.make_groups(runs, make_mesh(config)), set())
    plan_seconds = time.perf_counter() - started
    seconds = [*book(schedule, runs, workdir)]
    started = time.perf_counter()
    page.write(workdir, EXPERIMENT, config, execution.finish(workdir, runs))
    return {
        "runs": len(runs),
        "plan_seconds": plan_seconds,
        "seconds_per_batch": statistics.median(seconds[-1000:]),  # the last batches, when the tables are largest
        "slowest_batch_seconds": max(seconds),
        "report_seconds": time.perf_counter() - started,
        "peak_bytes": peak_bytes(),
    }


def book(schedule: Schedule, runs: list[Run], workdir: pathlib.Path) -> Iterator[float]:
    """Yields the seconds of bookkeeping of each batch: taking it, values from other runs, and storing its results."""
    random, by_key = np.random.default_rng(0), {run.key: run for run in runs}
    ends: dict[str, dict[str, Any]] = {}
    while schedule:
        started = time.perf_counter()
        group, batch = schedule.take()
        for run in batch:
            execution.traced_of(run, ends, [by_key[key] for key in run.needs])
        before = time.perf_counter() - started
        histories = [history_of(run, random) for run in batch]
        started = time.perf_counter()
        write_timing(workdir, group.name, len(batch), 0.0, 0.0, 0)
        ends |= execution.write_finished(workdir, group.problem, batch, histories, ["data.samples", "data.separation"])
        schedule.finish(batch)
        yield before + time.perf_counter() - started


def history_of(run: Run, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Draws the history of a run: metrics [evaluations], all positive, routing probabilities and counts."""
    columns = [*problem_of(run.config).columns(run.config)][:METRICS]
    names = columns + [f"router/further_{i}" for i in range(METRICS - len(columns))]
    history = dict(zip(names, random.lognormal(size=(METRICS, EVALUATIONS)).astype(np.float32), strict=True))
    shape = (EVALUATIONS, run.config.data.clusters, run.config.data.clusters)
    maps = {"probs": random.random(shape), "counts": random.integers(0, 100, shape)}
    return history | maps | {"router/params_changed": np.zeros(EVALUATIONS)}


def sweep_of(runs: int) -> tuple[Point, ...]:
    """Returns the points of a number of runs, arms and seeds included."""
    sizes = runs // (SEPARATIONS * len(ARMS) * SEEDS)
    return product(
        data__separation=tuple(0.5 + i / 8 for i in range(SEPARATIONS)),
        data__samples=tuple(64 + i for i in range(sizes)),
    )


def claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Returns three orders, as an experiment claims them."""
    write = Writer("same", at={"data.samples": 64, "data.separation": 1.0}, prefix="tables.")
    return (
        write.order("frozen", "learned beats frozen", "", LEARNED, FROZEN),
        write.order("fair", "learned beats the fairest control", "", LEARNED, FAIREST),
        write.order("soft", "learned beats frozen, both soft", "", LEARNED, FROZEN, metric="test/loss_soft"),
    )


PLOTS = (
    {"kind": "curves", "name": "loss", "x": "data.samples", "metrics": ("test/loss", "test/loss_soft")},
    {"kind": "training", "name": "training", "metrics": ("train/loss", "test/loss")},
    {"kind": "gap", "name": "gap", "x": "data.samples"},
    {"kind": "phase", "name": "phase", "x": "data.samples", "y": "data.separation"},
    {"kind": "routing", "name": "routing", "arms": ("learned", "frozen")},
)
FIGURE = Figure("", sweep=lambda config: (), claims=claims, plots=lambda config: PLOTS)
EXPERIMENT = types.ModuleType("tables", "Does the cost of a batch grow with the number of runs?")
EXPERIMENT.FIGURES = {"": FIGURE}  # type: ignore[attr-defined]
