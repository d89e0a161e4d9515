"""Time per training step of one run on the Gaussian mixture, by number of runs, beside its floor and a baseline.

The floor is the larger of FLOPs over the machine's float32 matrix rate and bytes over its memory bandwidth, both
measured in the same call. Training only, no evaluation.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from routed.bench.baseline import lines as baseline_lines
from routed.contracts import UserError
from routed.engine.compilation import Compiled, compile_group, stack_traced
from routed.engine.devices import make_mesh, split_host
from routed.plan.config import base, canonical, problem_of, traced
from routed.settings.tree import override
from routed.system.machine import matrix_rate, memory_bandwidth

#: name -> (changes to the base config, training steps of one timed call).
CASES = {
    "constant": ({"experts.name": "constant", "batch_size": 512}, 300),
    "mlp": ({"experts.name": "mlp", "batch_size": 128}, 8),
}
RUNS = (1, 32, 256)
COMMON = {
    "data.samples": 65536, "data.test_samples": 640, "optimizer.name": "adam", "router.learning_rate": 3.2e-3,
    "experts.learning_rate": 3.2e-4, "steps": 1_000_000, "eval_every": 1_000_000,
}  # fmt: skip


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """Records {experts, runs, ms_per_run_step, floor_ms} and, with a baseline, {baseline_ms, speedup} at 32 runs."""
    split_host()  # before anything asks JAX for its devices
    rate, bandwidth = matrix_rate(), memory_bandwidth()
    print(f"float32 matrix rate {rate / 1e9:.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.0f} GB/s")
    records = []
    for name, (changes, steps) in CASES.items():
        whole = override(base(), COMMON | changes)
        config, floor = canonical(whole), floor_ms(whole, rate, bandwidth)
        for runs in RUNS:
            timed = Timed(config, runs, steps)
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(timed())
                if baseline and runs == 32:
                    theirs.append(run_baseline(baseline)[name])
            record = {"experts": name, "runs": runs, "ms_per_run_step": statistics.median(ours), "floor_ms": floor}
            if theirs:
                record |= {
                    "baseline_ms": statistics.median(theirs),
                    "speedup": statistics.median(theirs) / statistics.median(ours),
                }
            print(
                ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()), flush=True
            )
            records.append(record)
    return records


class Timed:
    """A compiled batch; calling it returns milliseconds per training step of one run."""

    def __init__(self, config: ConfigDict, runs: int, steps: int):
        mesh = make_mesh(config) if runs > 1 else make_mesh(override(config, {"mesh.run": 1}))
        self.compiled: Compiled = compile_group(config, config.data.samples, runs, mesh)
        place = self.compiled.place
        self.seeds = place(np.arange(runs, dtype=np.uint32))
        self.traced = place(stack_traced([traced(config)] * runs))
        self.active = place(np.ones(runs, bool))
        self.count = self.compiled.place_shared(np.int32(steps))
        self.shared = self.compiled.place_shared(problem_of(config).shared_arrays(config))
        self.runs, self.steps = runs, steps
        self.worlds, self.states = self.compiled.start(self.seeds, self.traced, self.shared)
        self()  # the first call touches the memory

    def __call__(self) -> float:
        begun = time.perf_counter()
        self.states = jax.block_until_ready(
            self.compiled.advance(
                self.active, self.count, self.seeds, self.traced, self.worlds, self.states, (), self.shared
            )
        )
        return (time.perf_counter() - begun) / self.steps / self.runs * 1e3

    def evaluation(self) -> float:
        """Milliseconds of an evaluation of the whole batch."""
        begun = time.perf_counter()
        self.states = jax.block_until_ready(
            self.compiled.record(self.active, self.seeds, self.traced, self.worlds, self.states, self.shared)
        )
        return (time.perf_counter() - begun) * 1e3


def floor_ms(config: ConfigDict, rate: float, bandwidth: float) -> float:
    """Least time of a step: max of FLOPs / rate and bytes / bandwidth.

    Bytes: every parameter is read in the forward and the backward pass, its gradient written and read, and Adam reads and writes the
    parameter and two moments: 10 words.
    """
    return 1e3 * max(step_flops(config) / rate, 10 * 4 * _sizes(config)[0] / bandwidth)


def step_flops(config: ConfigDict) -> float:
    """FLOPs of a step of one run: 2 B P forward, 2 B P for the weights' gradients, 2 B (P - first layer) for the activations'."""
    parameters, first = _sizes(config)
    return 2 * config.batch_size * (3 * parameters - first)


def _sizes(config: ConfigDict) -> tuple[int, int]:
    """Parameters, without biases, and those that multiply data."""
    e, d, o, w = config.experts.count, config.data.dim, config.data.target_dim, config.experts.width
    inner = w * w + w * o if config.experts.name == "mlp" else o
    first = d * w if config.experts.name == "mlp" else 0
    return d * e + e * (first + inner), d * e + e * first


def run_baseline(command: str) -> dict[str, float]:
    """Milliseconds per step by kind, read from what the command prints.

    Raises:
      UserError: it failed, or printed no such lines.
    """
    form = "`constant ... MS` and `depth-3 ... MS`"
    times = {kind: ms for kind, ms in baseline_lines(command, r"(constant|depth-3)\b.*?([\d.]+)\s*$", form)}
    if set(times) != {"constant", "depth-3"}:
        raise UserError(f"--baseline={command}: expected lines {form}, got only {', '.join(times)}")
    return {"constant": float(times["constant"]), "mlp": float(times["depth-3"])}
