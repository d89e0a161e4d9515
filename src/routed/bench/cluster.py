"""Time to train one seed of experiments/cluster_cnn.py (setting 1, cubic experts, the released protocol).

Training only: data are drawn and test samples evaluated outside of the clock, as in the baseline. A seed that stopped
early costs nothing more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from routed.bench.harness import Baseline, Case, Lines, Work, beside_floor, timed
from routed.bench.trainings import Batch
from routed.engine.devices import make_mesh, split_host
from routed.plan import experiment
from routed.plan.config import canonical
from routed.settings.tree import override

LINES = Lines(r"(seed) \d+: ([\d.]+) s, (\d+) steps", "`seed I: SECONDS s, N steps, ...`")
EXPERIMENT = "experiments/cluster_cnn.py"
SEEDS = 10


def bench(rounds: int, baseline: Baseline) -> list[dict[str, Any]]:
    """Returns one record {seconds_per_seed, steps, steps_max, accuracy, entropy} of ten seeds, with floor and baseline.

    A baseline adds {baseline_steps, speedup_per_step}.
    """
    split_host()  # before anything asks JAX for its devices
    _, config = experiment.configure(EXPERIMENT, [])
    config = canonical(override(config, {"eval_every": config.steps, "checkpoint.every": 0}))
    devices = make_mesh(config).size
    batch = Batch(config, -(-SEEDS // devices) * devices, config.steps, active=SEEDS)

    def seconds() -> float:
        batch.start()
        return batch.train() / SEEDS

    (record,) = timed([Case({"seeds": SEEDS}, {"seconds_per_seed": seconds}, peer="seed")], rounds, baseline)
    batch.evaluation()
    history = {name: np.asarray(a)[:SEEDS, -1] for name, a in batch.states["history"].items()}
    steps = history["train/steps"]
    record |= {
        "steps": float(steps.mean()),
        "steps_max": float(steps.max()),
        "accuracy": float(history["test/accuracy"].mean()),
        "entropy": float(history["train/dispatch_entropy"].mean()),
    }
    work = step_work(config)
    work = Work(work.flops * record["steps"], work.moved * record["steps"])
    record |= beside_floor(record["seconds_per_seed"], work, "seconds")
    if "speedup" in record:
        record["baseline_steps"] = baseline.medians()["seed"][1]
        record["speedup_per_step"] = record["speedup"] * record["steps"] / record["baseline_steps"]
    return [record]


def step_work(config: ConfigDict) -> Work:
    """Returns the least work of a step of one run on the whole machine.

    FLOPs: 2 N P D F forward and as many for the gradient of the F filters of the chosen expert; 2 N D E twice for the
    router. Bytes: every sample is read once in each direction.
    """
    samples, experts = config.batch_size, config.experts
    size = config.data.patches * config.data.dim
    filters = experts.width * config.data.target_dim
    flops = 4 * samples * (size * filters + config.data.dim * experts.count)
    return Work(flops, 2 * 4 * samples * size)
