"""Time of a training step of one run on the Gaussian mixture, by number of runs: no evaluation."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from routed.bench.harness import Baseline, Lines, Work, timed
from routed.bench.trainings import batch_case
from routed.engine.devices import split_host
from routed.plan.config import base
from routed.settings.tree import override

LINES = Lines(
    r"(constant|depth-3)\b.*?([\d.]+)\s*$", "`constant ... MS` and `depth-3 ... MS`", labels=("constant", "depth-3")
)
#: name -> changes to the base config, training steps of one timed call, label of the baseline's line. `headline` is the
#: learned arm of gmm_router.
HEADLINE = {"optimizer.name": "sgd", "router.learning_rate": 1e-1, "experts.learning_rate": 1e-2, "batch_size": 32}
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "constant": ({"experts.name": "constant", "batch_size": 512}, 300, "constant"),
    "mlp": ({"experts.name": "mlp", "batch_size": 128}, 8, "depth-3"),
    "headline": ({"experts.name": "mlp"} | HEADLINE, 32, ""),
}
#: Numbers of runs, and the number that is compared with the baseline.
RUNS, COMPARED = (1, 32, 256), 32
COMMON: dict[str, Any] = {"data.samples": 65536, "data.test_samples": 640, "steps": 1_000_000, "eval_every": 1_000_000}
COMMON |= {"optimizer.name": "adam", "router.learning_rate": 3.2e-3, "experts.learning_rate": 3.2e-4}


def bench(rounds: int, baseline: Baseline) -> list[dict[str, Any]]:
    """Returns records {experts, runs, ms_per_run_step} with floor and baseline."""
    split_host()  # before anything asks JAX for its devices
    cases = []
    for name, (changes, steps, label) in CASES.items():
        config = override(base(), COMMON | changes)
        for runs in RUNS:
            about, peer = {"experts": name, "runs": runs}, label if runs == COMPARED else ""
            cases.append(batch_case(about, config, steps, work_of(config), peer, "ms_per_run_step"))
    return timed(cases, rounds, baseline)


def work_of(config: ConfigDict) -> Work:
    """Returns the least work of a step of one run.

    Every parameter is read forward and backward, its gradient is written and read, the optimiser reads and writes the
    parameter and its moments, of which Adam has two and momentum one: 10 and 8 words.
    """
    numbers = 10 if config.optimizer.name == "adam" else 8
    return Work(step_flops(config), numbers * 4 * _sizes(config)[0])


def step_flops(config: ConfigDict) -> float:
    """Returns the FLOPs of a step of one run with B samples and P parameters.

    2 B P forward, 2 B P for the gradients of the weights, 2 B (P - first layer) for the gradients of the activations.
    """
    parameters, first = _sizes(config)
    return 2 * config.batch_size * (3 * parameters - first)


def _sizes(config: ConfigDict) -> tuple[int, int]:
    """Counts the parameters without biases, and the parameters that multiply data."""
    e, d, o, w = config.experts.count, config.data.dim, config.data.target_dim, config.experts.width
    inner = w * w + w * o if config.experts.name == "mlp" else o
    first = d * w if config.experts.name == "mlp" else 0
    return d * e + e * (first + inner), d * e + e * first
