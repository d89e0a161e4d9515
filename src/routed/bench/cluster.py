"""Time to train one seed of experiments/cluster_cnn.py (setting 1, cubic experts, the released protocol), beside a baseline.

Training only: data are made and test samples looked at outside of the clock, as the baseline does. Seeds that stopped early cost
nothing more.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from routed.bench.baseline import lines as baseline_lines
from routed.engine.compilation import compile_group, stack_traced
from routed.engine.devices import make_mesh, split_host
from routed.plan import experiment
from routed.plan.config import canonical, traced
from routed.settings.tree import override
from routed.system.machine import matrix_rate, memory_bandwidth

EXPERIMENT = "experiments/cluster_cnn.py"
SEEDS = 10


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """One record {seconds_per_seed, steps, steps_max, accuracy, entropy, floor_seconds} of ten seeds, medians over rounds.

    With a baseline also its {baseline_seconds, baseline_steps, speedup, speedup_per_step}.
    """
    split_host()  # before anything asks JAX for its devices
    rate, bandwidth = matrix_rate(), memory_bandwidth()
    print(f"float32 matrix rate {rate / 1e9:.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.0f} GB/s")
    _, config = experiment.configure(EXPERIMENT, [])
    config = canonical(override(config, {"eval_every": config.steps, "checkpoint.every": 0}))
    mesh = make_mesh(config)
    runs = -(-SEEDS // mesh.size) * mesh.size
    compiled = compile_group(config, config.data.samples, runs, mesh)
    place, theirs, seconds = compiled.place, [], []
    seeds = place(np.arange(runs, dtype=np.uint32))
    values = place(stack_traced([traced(config)] * runs))
    active = place(np.arange(runs) < SEEDS)

    count = compiled.place_shared(np.int32(config.steps))
    for _ in range(rounds):
        worlds, states = jax.block_until_ready(compiled.start(seeds, values, ()))
        begun = time.perf_counter()
        states = jax.block_until_ready(compiled.advance(active, count, seeds, values, worlds, states, (), ()))
        seconds.append((time.perf_counter() - begun) / SEEDS)
        if baseline:
            theirs.append(run_baseline(baseline))
    kept = compiled.record(active, seeds, values, worlds, states, ())["history"]
    history = {name: np.asarray(a)[:SEEDS, -1] for name, a in kept.items()}
    steps = history["train/steps"]
    record = {
        "seconds_per_seed": statistics.median(seconds),
        "steps": float(steps.mean()),
        "steps_max": float(steps.max()),
        "accuracy": float(history["test/accuracy"].mean()),
        "entropy": float(history["train/dispatch_entropy"].mean()),
        "floor_seconds": float(steps.mean()) * floor(config, rate, bandwidth),
    }
    if theirs:
        wall, count = (statistics.median(values) for values in zip(*theirs, strict=True))
        record |= {"baseline_seconds": wall, "baseline_steps": count, "speedup": wall / record["seconds_per_seed"]}
        record["speedup_per_step"] = record["speedup"] * record["steps"] / count
    return [record]


def floor(config: ConfigDict, rate: float, bandwidth: float) -> float:
    """Least seconds of a step of one run on the whole machine: the larger of FLOPs / rate and bytes / bandwidth.

    FLOPs: 2 N P D F forward and as many for the gradient of the F filters of the one chosen expert; 2 N D E twice for the
    router. Bytes: every sample is read once in each direction.
    """
    samples, experts = config.batch_size, config.experts
    size = config.data.patches * config.data.dim
    filters = experts.width * config.data.target_dim
    flops = 4 * samples * (size * filters + config.data.dim * experts.count)
    return max(flops / rate, 2 * 4 * samples * size / bandwidth)


def run_baseline(command: str) -> tuple[float, float]:
    """Mean seconds and steps per seed, read from lines `seed I: S s, N steps, ...`.

    Raises:
      UserError: it failed, or printed no such line.
    """
    lines = baseline_lines(command, r"seed \d+: ([\d.]+) s, (\d+) steps", "`seed I: S s, N steps, ...`")
    seconds, steps = (float(np.mean([float(value) for value in column])) for column in zip(*lines, strict=True))
    return seconds, steps
