"""Time per training step of one ResNet18 on images, and of a mixture of four (top-1), as in experiments/chen_images.py at its default scale.

One run of each, in turn, with the baseline behind them; training only. Artificial images of as many pixels: only the time counts. To compare
with a library that was given one core give this one core too (taskset -c 0). `ratio` is the mixture's time over that of the one network.
"""

from __future__ import annotations

import statistics
from typing import Any

from ml_collections import ConfigDict

from routed.bench.baseline import lines as baseline_lines
from routed.bench.gmm import Timed
from routed.engine.devices import split_host
from routed.experts import EXPERTS
from routed.plan import experiment
from routed.plan.config import canonical
from routed.settings.tree import override
from routed.system.machine import matrix_rate

EXPERIMENT = "experiments/chen_images.py:gates"
#: Training steps of one timed call.
STEPS = 10
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"model": "dense_expert", "optimizer.normalise": "none"},
    "mixture": {"model": "moe"},
}


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """Records {model, width, side, batch, ms_per_step, floor_ms, ratio} and, with a baseline, {baseline_ms, speedup}; medians over rounds."""
    split_host()  # before anything asks JAX for its devices
    rate = matrix_rate()
    print(f"float32 matrix rate {rate / 1e9:.0f} GFLOP/s")
    given = ["data.images=patterns", "data.samples=1024", "data.test_samples=20", "mesh.run=1", "checkpoint.every=0"]
    _, config = experiment.configure(EXPERIMENT, given)
    configs = {name: canonical(override(config, changes)) for name, changes in MODELS.items()}
    timed = {name: Timed(one, 1, STEPS) for name, one in configs.items()}
    ours: dict[str, list[float]] = {name: [] for name in timed}
    theirs: list[float] = []
    for _ in range(rounds):
        for name, run in timed.items():
            ours[name].append(run())
        if baseline:
            theirs.append(run_baseline(baseline))
    single = statistics.median(ours["resnet18"])
    records = []
    for name, times in ours.items():
        own = configs[name]
        record: dict[str, Any] = {
            "model": name,
            "width": own.experts.width,
            "side": own.data.side,
            "batch": own.batch_size,
        }
        record |= {"ms_per_step": statistics.median(times), "floor_ms": floor_ms(own, rate)}
        record["ratio"] = record["ms_per_step"] / single
        if theirs and name == "resnet18":
            record |= {"baseline_ms": statistics.median(theirs), "speedup": statistics.median(theirs) / single}
        records.append(record)
    return records


def floor_ms(config: ConfigDict, rate: float) -> float:
    """Least time of a step: three times the FLOPs forward of one network on each image, over the machine's rate."""
    count = EXPERTS[config.experts.name].flops
    assert count is not None  # the experts of this bench are networks on images
    forward = count(config.experts.width, config.data.side, 3, config.data.target_dim)
    return 3e3 * config.batch_size * forward / rate


def run_baseline(command: str) -> float:
    """Milliseconds per step, read from the line `resnet18 ms per step: MS`.

    Raises:
      UserError: it failed, or printed no such line.
    """
    found = baseline_lines(command, r"(resnet18) ms per step: ([\d.]+)", "`resnet18 ms per step: MS`")
    return float(found[0][1])
