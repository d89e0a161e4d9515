"""Time of a training step of the networks of Chowdhury et al. (2023), at the sizes of its Section 5.1 and Table 2.

Joint: 8 experts of 5 neurons take 6 of 16 patches of 28 x 28 pixels, softmax over these; CNN: 40 neurons on all
patches. Batches of 20 of 1,000 collages of random pixels: only the time counts. Wide ResNet: alone and as a mixture,
one run each, as experiments/patch_wrn.py has them. Training only.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from routed.bench.harness import Baseline, Lines, Work, timed
from routed.bench.trainings import batch_case
from routed.engine.devices import split_host
from routed.models import SAMPLE_MODELS
from routed.plan import experiment
from routed.plan.config import base
from routed.settings.tree import override
from routed.tasks.image_files import SETS, ImageSet, Split

LINES = Lines(
    r"(joint|cnn) ms per step: ([\d.]+)", "`joint ms per step: MS` and `cnn ms per step: MS`", labels=("joint", "cnn")
)
#: Numbers of runs, 20 as the seeds of Fig. 5 -> training steps of one timed call.
RUNS = {1: 400, 20: 100}
#: Training steps of one timed call of a wide ResNet, its file and changes.
STEPS, EXPERIMENT = 10, "experiments/patch_wrn.py"
CHANGES = ["data.images=patterns", "data.samples=1000", "data.test_samples=100"]
#: Set of images that only this bench has.
PIXELS = "random pixels"
COLLAGES = {"name": "collages", "images": PIXELS, "target": "sign", "target_dim": 1, "positions": 16}
COLLAGES |= {"samples": 1000, "test_samples": 100}
COMMON = {f"data.{key}": value for key, value in COLLAGES.items()} | {"batch_size": 20, "loss": "logistic"}
COMMON |= {"experts.name": "neurons", "experts.count": 8, "experts.width": 5, "mesh.batching": "auto"}
COMMON |= {"optimizer.name": "sgd", "optimizer.momentum": 0.0, "steps": 1_000_000, "eval_every": 1_000_000}
COMMON |= {"router.learning_rate": 0.2, "experts.learning_rate": 0.2}
TAKEN = {
    "name": "patch_choice",
    "patches": 6,
    "patch_weights": "chosen",
    "eval.name": "patch_choice",
    "eval.patches": 6,
}
MODELS: dict[str, dict[str, Any]] = {
    "cnn": {"model": "patch_cnn"},
    "joint": {"model": "patch_moe", **{f"selection.{key}": value for key, value in TAKEN.items()}},
}


def bench(rounds: int, baseline: Baseline) -> list[dict[str, Any]]:
    """Returns records {model, runs, ms_per_step} with floor and baseline."""
    split_host()  # before anything asks JAX for its devices
    SETS[PIXELS] = ImageSet(_random_pixels)
    _, wide = experiment.configure(EXPERIMENT, CHANGES)
    small = {name: override(base(), COMMON | changes) for name, changes in MODELS.items()}
    batches = [(name, config, runs, steps) for name, config in small.items() for runs, steps in RUNS.items()]
    batches += [(name, override(wide, {"model": name}), 1, STEPS) for name in ("wide_resnet", "wide_resnet_moe")]
    cases = [
        batch_case({"model": name, "runs": runs}, config, steps, work_of(config), peer=name)
        for name, config, runs, steps in batches
    ]
    return timed(cases, rounds, baseline)


def _random_pixels(folder: pathlib.Path) -> tuple[Split, Split, int]:
    """Draws 50 training and 10 test images of 28 x 28 of each class."""
    rng = np.random.default_rng(0)

    def split(each: int, name: str) -> Split:
        return Split(rng.integers(0, 256, (10 * each, 28, 28, 1), np.uint8), np.arange(10 * each) % 10, name)

    return split(50, "random training pixels"), split(10, "random test pixels"), 10


def work_of(config: ConfigDict) -> Work:
    """Returns the least work of a step, with the chosen patches only.

    FLOPs: 2 P D H forward and as many for the gradient of H neurons on P patches of D pixels; a router scores all
    patches and gets its gradient from the chosen patches. Pixels have no gradient. Bytes: a digit has a byte a pixel,
    the batch is written once as floats and read once in each direction; weights are read twice and written once. A wide
    ResNet: three times the FLOPs forward.
    """
    if (count := SAMPLE_MODELS[config.model].flops) is not None:
        return Work(3 * config.batch_size * count(config))
    experts, each, dim = config.experts, config.data.positions, 784
    samples, neurons = config.batch_size, experts.count * experts.width
    if config.model == "patch_moe":
        taken = config.selection.patches
        flops = 4 * taken * neurons + 2 * (each + taken) * experts.count
        columns = neurons + experts.count
    else:
        flops, columns = 4 * each * neurons, neurons
    return Work(samples * dim * flops, samples * each * dim * (1 + 3 * 4) + 3 * 4 * dim * columns)
