"""Time per training step of one run of the networks of Chowdhury et al. (2023) at the sizes of its Section 5.1, beside floor and baseline.

Joint: 8 experts of 5 neurons take 6 of 16 patches of 28 x 28 pixels, softmax over these; CNN: 40 neurons on all patches. Batches of 20
of 1,000 collages of random pixels: only the time counts. Then the wide ResNet and its mixture of experiments/patch_wrn.py, default scale,
one run (seconds of Table 2). Training only, no evaluation.
"""

from __future__ import annotations

import pathlib
import statistics
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from routed.bench.baseline import lines as baseline_lines
from routed.bench.gmm import Timed
from routed.contracts import UserError
from routed.engine.devices import split_host
from routed.models import SAMPLE_MODELS
from routed.plan import experiment
from routed.plan.config import base, canonical
from routed.settings.tree import override
from routed.system.machine import matrix_rate, memory_bandwidth
from routed.tasks.image_files import SETS, ImageSet, Split

#: One run alone, and the seeds of Fig. 5 at once; training steps of one timed call for each.
RUNS = {1: 400, 20: 100}
#: Training steps of one timed call of a wide ResNet, and its file.
STEPS, EXPERIMENT = 10, "experiments/patch_wrn.py"
#: The set of images that only this bench has.
PIXELS = "random pixels"

COMMON = {
    "data.name": "collages", "data.images": PIXELS, "data.target": "sign", "data.target_dim": 1, "data.positions": 16,
    "data.samples": 1000, "data.test_samples": 100, "batch_size": 20, "loss": "logistic", "optimizer.name": "sgd",
    "optimizer.momentum": 0.0, "router.learning_rate": 0.2, "experts.learning_rate": 0.2, "experts.name": "neurons",
    "experts.count": 8, "experts.width": 5, "steps": 1_000_000, "eval_every": 1_000_000, "mesh.batching": "auto",
}  # fmt: skip
TAKEN = {"name": "patch_choice", "patches": 6, "gate": "chosen", "eval.name": "patch_choice", "eval.patches": 6}
MODELS: dict[str, dict[str, Any]] = {
    "cnn": {"model": "patch_cnn"},
    "joint": {"model": "patch_moe", **{f"selection.{key}": value for key, value in TAKEN.items()}},
}


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """Records {model, runs, ms_per_step, floor_ms} and, with a baseline, {baseline_ms, speedup}; medians over rounds."""
    split_host()  # before anything asks JAX for its devices
    SETS[PIXELS] = ImageSet(_random_pixels)
    rate, bandwidth = matrix_rate(), memory_bandwidth()
    print(f"float32 matrix rate {rate / 1e9:.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.0f} GB/s")
    configs = {name: override(base(), COMMON | changes) for name, changes in MODELS.items()}
    timed = {(n, runs): Timed(canonical(c), runs, steps) for n, c in configs.items() for runs, steps in RUNS.items()}
    _, wide = experiment.configure(EXPERIMENT, ["data.images=patterns", "data.samples=1000", "data.test_samples=100"])
    for name in ("wide_resnet", "wide_resnet_moe"):
        configs[name] = override(wide, {"model": name})
        timed[name, 1] = Timed(canonical(configs[name]), 1, STEPS)
    ours: dict[tuple[str, int], list[float]] = {case: [] for case in timed}
    theirs: dict[str, list[float]] = {name: [] for name in MODELS}
    for _ in range(rounds):
        for case, run in timed.items():
            ours[case].append(run())
        for name, ms in run_baseline(baseline).items() if baseline else ():
            theirs[name].append(ms)
    records = []
    for (name, runs), times in ours.items():
        record: dict[str, Any] = {"model": name, "runs": runs, "ms_per_step": statistics.median(times)}
        record["floor_ms"] = floor_ms(configs[name], rate, bandwidth)
        if theirs.get(name):
            record["baseline_ms"] = statistics.median(theirs[name])
            record["speedup"] = record["baseline_ms"] / record["ms_per_step"]
        records.append(record)
    return records


def _random_pixels(folder: pathlib.Path) -> tuple[Split, Split, int]:
    """50 training and 10 test images of 28 x 28 of each class."""
    del folder
    rng = np.random.default_rng(0)

    def part(each: int, name: str) -> Split:
        return Split(rng.integers(0, 256, (10 * each, 28, 28, 1), np.uint8), np.arange(10 * each) % 10, name)

    return part(50, "random training pixels"), part(10, "random test pixels"), 10


def floor_ms(config: ConfigDict, rate: float, bandwidth: float) -> float:
    """Least time of a step on the whole machine: max of FLOPs / rate and bytes / bandwidth, of the patches that are chosen only.

    FLOPs: 2 P D H forward and as many for the gradient of H neurons on P patches, of D pixels; a router's scores are of all patches,
    their gradient of the chosen ones. Pixels have no gradient. Bytes: a digit is a byte a pixel, the batch is written once as floats and read
    once for each direction; weights are read twice and written once. Of a wide ResNet: three times the FLOPs forward.
    """
    if (counted := SAMPLE_MODELS[config.model].flops) is not None:
        return 1e3 * 3 * config.batch_size * counted(config) / rate
    experts, each, dim = config.experts, config.data.positions, 784
    samples, neurons = config.batch_size, experts.count * experts.width
    if config.model == "patch_moe":
        taken = config.selection.patches
        flops = 4 * taken * neurons + 2 * (each + taken) * experts.count
        columns = neurons + experts.count
    else:
        flops, columns = 4 * each * neurons, neurons
    moved = samples * each * dim * (1 + 3 * 4) + 3 * 4 * dim * columns
    return 1e3 * max(samples * dim * flops / rate, moved / bandwidth)


def run_baseline(command: str) -> dict[str, float]:
    """Milliseconds per step by model, read from what the command prints.

    Raises:
      UserError: it failed, or printed no such lines.
    """
    form = "`joint ms per step: MS` and `cnn ms per step: MS`"
    times = {name: float(ms) for name, ms in baseline_lines(command, r"(joint|cnn) ms per step: ([\d.]+)", form)}
    if set(times) != set(MODELS):
        raise UserError(f"--baseline={command}: expected lines {form}, got only {', '.join(times)}")
    return times
