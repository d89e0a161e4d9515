"""What a run of many thousands costs beside its training: the bookkeeping of a batch, the report, and the most memory of both.

Rows are drawn at random; planning, grouping, scheduling, writing, merging and reporting are the functions that a command calls.
"""

from __future__ import annotations

import pathlib
import resource
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
from routed.engine import execution, results
from routed.engine.batches import write_timing
from routed.engine.devices import make_mesh, split_host
from routed.engine.schedule import Schedule
from routed.plan import Figure, Point, base, override, product
from routed.plan.config import problem_of
from routed.plan.run import Run
from routed.plan.runs import plan_runs

#: Runs are separations x samples x arms x seeds; only the number of samples' values grows.
RUNS, SEPARATIONS, SEEDS = (1_000, 10_000, 100_000), 10, 10
ARMS = (
    "learned", "frozen", "frozen_sharp", "frozen_data", "frozen_top1", "oracle", "hash", "dense_active", "dense_total",
    "dense_expert",
)  # fmt: skip
#: What a run leaves.
EVALUATIONS, METRICS = 9, 60
SETTINGS = {
    "name": "tables", "arms": ARMS, "seeds": SEEDS, "steps": 4000, "eval_every": 4000 // (EVALUATIONS - 1),
    "data.clusters": 8, "data.dim": 8, "data.test_samples": 1600, "experts.count": 8, "mesh.runs_per_batch": 16,
}  # fmt: skip


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """Records {runs, seconds_per_batch, report_seconds, peak_bytes}: of 16 runs, with merging, and of the process so far."""
    del rounds, baseline  # a batch is timed thousands of times
    split_host()
    log.set_verbosity(log.WARNING)
    records = []
    for runs in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            records.append(measure(runs, pathlib.Path(folder)))
    return records


def measure(count: int, workdir: pathlib.Path) -> dict[str, Any]:
    """One record, and a line that says it."""
    config, sweep = override(base(), SETTINGS), sweep_of(count)
    begun = time.perf_counter()
    runs = plan_runs(config, sweep)
    results.open_workdir(workdir, "tables", config, sweep)
    schedule = Schedule(execution.make_groups(runs, make_mesh(config)), set())
    planned = time.perf_counter() - begun
    seconds = [*book(schedule, runs, workdir)]
    begun = time.perf_counter()
    page.write(workdir, EXPERIMENT, config, execution.finish(workdir, runs))
    record = {
        "runs": len(runs),
        "seconds_per_batch": statistics.median(seconds[-1000:]),  # the last ones, when most is there
        "report_seconds": time.perf_counter() - begun,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    print(
        f"{len(runs):,} runs: planned in {planned:.1f} s, a batch {1e3 * record['seconds_per_batch']:.1f} ms (slowest"
        f" {1e3 * max(seconds):.0f}), report {record['report_seconds']:.1f} s, peak {record['peak_bytes'] / 2**30:.2f} GiB",
        flush=True,
    )
    return record


def book(schedule: Schedule, runs: list[Run], workdir: pathlib.Path) -> Iterator[float]:
    """Seconds of bookkeeping of each batch: to find it, to settle what its runs take from others, to keep what they leave."""
    random, wanted = np.random.default_rng(0), {run.key: run for run in runs}
    ends: dict[str, dict[str, Any]] = {}
    while schedule:
        begun = time.perf_counter()
        group, batch = schedule.take()
        for run in batch:
            execution.traced_of(run, ends, [wanted[key] for key in run.needs])
        found = time.perf_counter() - begun
        histories = [history_of(run, random) for run in batch]
        begun = time.perf_counter()
        write_timing(workdir, group.name, len(batch), 0.0, 0.0, 0)
        ends |= execution.write_finished(workdir, group.problem, batch, histories, ["data.samples", "data.separation"])
        schedule.finish(batch)
        yield found + time.perf_counter() - begun


def history_of(run: Run, random: np.random.Generator) -> dict[str, np.ndarray]:
    """What a run of random numbers leaves: metrics [evaluations], all positive, and routing probabilities."""
    columns = [*problem_of(run.config).columns(run.config)][:METRICS]
    names = columns + [f"router/further_{i}" for i in range(METRICS - len(columns))]
    history = dict(zip(names, random.lognormal(size=(METRICS, EVALUATIONS)).astype(np.float32), strict=True))
    size = run.config.data.clusters
    return history | {"router/moved": np.zeros(EVALUATIONS), "probs": random.random((EVALUATIONS, size, size))}


def sweep_of(runs: int) -> tuple[Point, ...]:
    """The points of so many runs, arms and seeds included."""
    sizes = runs // (SEPARATIONS * len(ARMS) * SEEDS)
    return product(
        data__separation=tuple(0.5 + i / 8 for i in range(SEPARATIONS)),
        data__samples=tuple(64 + i for i in range(sizes)),
    )


def claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The orders that an experiment asks for."""
    del config
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
EXPERIMENT = types.ModuleType("tables", "Does the cost of a batch grow with what is there?")
EXPERIMENT.FIGURES = {"": Figure("", sweep=lambda config: (), claims=claims, plots=lambda config: PLOTS)}  # type: ignore[attr-defined]
