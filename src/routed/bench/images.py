"""Time of a training step of a ResNet18 on images, and of a mixture of four (top-1), as in experiments/chen_images.py.

One run each, training only, on artificial images of as many pixels: only the time counts. A comparison with a library
that has one core needs one core here too (taskset -c 0).
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from routed.bench.batch import batch_case
from routed.bench.harness import Baseline, Lines, Work, timed
from routed.engine.devices import split_host
from routed.experts import EXPERTS
from routed.plan import experiment
from routed.settings.tree import override

LINES = Lines(r"(resnet18) ms per step: ([\d.]+)", "`resnet18 ms per step: MS`")
EXPERIMENT = "experiments/chen_images.py:gates"
CHANGES = ["data.images=patterns", "data.samples=1024", "data.test_samples=20", "mesh.run=1", "checkpoint.every=0"]
#: Training steps of one timed call.
STEPS = 10
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"model": "dense_expert", "optimizer.normalise": "none"},
    "mixture": {"model": "moe"},
}


def bench(rounds: int, baseline: Baseline) -> list[dict[str, Any]]:
    """Returns records {model, width, side, batch, ms_per_step} with floor, baseline, and `ratio` to the ResNet18."""
    split_host()  # before anything asks JAX for its devices
    _, config = experiment.configure(EXPERIMENT, CHANGES)
    about = {"width": config.experts.width, "side": config.data.image_side, "batch": config.batch_size, "runs": 1}
    cases = [
        batch_case({"model": name} | about, override(config, changes), STEPS, work_of(config), peer=name)
        for name, changes in MODELS.items()
    ]
    records = timed(cases, rounds, baseline)
    return [record | {"ratio": record["ms_per_step"] / records[0]["ms_per_step"]} for record in records]


def work_of(config: ConfigDict) -> Work:
    """Returns the least work of a step: three times the FLOPs forward of one network on each image."""
    count = EXPERTS[config.experts.name].flops
    assert count is not None  # the experts of this bench are networks on images
    forward = count(config.experts.width, config.data.image_side, 3, config.data.target_dim)
    return Work(3 * config.batch_size * forward)
