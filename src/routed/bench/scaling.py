"""How runs scale over devices: what collectives move, predicted steps of pods, and the throughput of a sweep.

Measured: bytes of the T5's training step on 8 virtual devices, runs an hour of the Gaussian bench on 1 to 8 cores. Predicted from
these bytes: steps on TPUs and GPUs that nobody ran. Every assumption is a constant here, or a default of `torus` and `nodes`.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed.bench import gmm
from routed.bench.collectives import MESHES, SMALL, collectives, formula, parameters, slots_of
from routed.contracts import UserError
from routed.models import expert_axis
from routed.models.t5_sizes import blocks_of, flops_per_row, shared_group, tokens_of
from routed.plan import experiment
from routed.plan.config import base, canonical
from routed.settings.tree import override
from routed.system.chips import CHIPS, Chip

EXPERIMENT = "experiments/t5_mc4.py:fig5,paper"


#: Chips that are predicted.
NAMES = ("v4", "v5e", "h100")
COUNTS, EXPERTS, STEPS = (8, 32, 64, 128, 256), (64, 512), 500_000
#: Share of the peak that products reach: heads of 64 and a trunk of 32 fill a half and a quarter of a 128 x 128 unit.
MFU = 0.25
#: Memory traffic of a step. Attention is not fused: a score is written and read forward, again for the gradient (16 bytes each), and
#: backward (32). A slot: 16 words for each hidden unit of its expert. A parameter: read twice, gradient, two moments, 10 words.
SCORE_BYTES, LOGIT_BYTES, HIDDEN_WORDS, PARAMETER_BYTES = 64, 32, 16, 40


class Step(NamedTuple):
    """A predicted step: seconds of its parts, which do not overlap; bytes of memory a chip; the mesh."""

    compute: float
    update: float
    exchange: float
    sums: float
    memory: float
    data: int
    expert: int

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute + self.update + self.exchange + self.sums


def step_time(config: ConfigDict, chip: Chip, data: int, expert: int) -> Step:
    """The step of a T5 on data x expert chips.

    compute: the larger of FLOPs / (peak MFU) and traffic of scores, logits and slots / bandwidth; FLOPs as `flops_per_row`, with all
    slots for the k experts of a token. update: Adam's traffic for what a chip holds. exchange, sums: the all-to-alls and all-reduces of
    `formula`. memory: float32 parameters, moments and gradients, a copy in transformer.dtype, the history of choices, and at most the
    activations of a chip's rows: 12 vectors and 6 hidden layers a token and layer, 8 scores of one layer (attention is computed
    again), 4 logits, float32. Of the compiled program on one CPU device a row of `paper` takes 208 MB, here 217.
    """
    t, d, count, chips = config.transformer, config.data, config.experts.count, data * expert
    blocks, width, rows = blocks_of(config)[1], jnp.dtype(t.dtype).itemsize, config.batch_size / chips
    length, targets = tokens_of(override(config, {"batch_size": 1}))
    shared = sum(leaf.size for path, leaf in parameters(config) if expert_axis(path) is None)
    own = sum(leaf.size for path, leaf in parameters(config)) - shared
    held = shared + own / expert
    slots = sum(slots_of(config, n) for n in tokens_of(config)) / chips  # of a layer in each stack
    idle = slots - config.selection.k * rows * (length + targets)
    flops = rows * flops_per_row(config) + 6 * idle * own / (2 * count)
    scores, logits = t.heads * (length**2 + targets**2 + length * targets), targets * d.vocabulary
    traffic = rows * (SCORE_BYTES * t.layers * scores + LOGIT_BYTES * logits)
    traffic += HIDDEN_WORDS * width * blocks * slots * config.experts.width
    kept = (length + targets) * t.layers * (12 * t.dim + 6 * t.width) + 8 * t.heads * length**2 + 4 * logits
    choices = 4 * blocks * d.eval_rows * (length + targets) * config.selection.k  # of one evaluation and the one before
    moved = formula(config, data, expert)
    return Step(
        compute=max(flops / (chip.peak[t.dtype] * MFU), traffic / chip.bandwidth),
        update=PARAMETER_BYTES * held / chip.bandwidth,
        exchange=sum(chip.seconds(one) for one in moved if one.kind == "all-to-all"),
        sums=sum(chip.seconds(one) for one in moved if one.kind == "all-reduce"),
        memory=(16 + width) * held + (config.steps // config.eval_every + 1) * choices + 4 * rows * kept,
        data=data,
        expert=expert,
    )


def shared_by(config: ConfigDict, chips: int) -> ConfigDict:
    """`config` as so many chips can share it: a row each at least, and the largest groups of which each has whole ones."""
    config = override(config, {"batch_size": max(config.batch_size, chips)})
    return override(config, {"selection.group_size": shared_group(config, chips)})


def predict(config: ConfigDict, name: str, chips: int, experts: int, rows: int = 0) -> dict[str, Any]:
    """A record of the fastest mesh whose memory suffices, for so many experts; `rows` a chip, or 0 for the config's batch.

    Raises:
      UserError: no mesh's does.
    """
    config = override(config, {"experts.count": experts, "batch_size": rows * chips or config.batch_size})
    config, chip = shared_by(config, chips), CHIPS[name]
    meshes = [(chips // n, n) for n in range(1, chips + 1) if chips % n == 0 and experts % n == 0]
    steps = [step for mesh in meshes if (step := step_time(config, chip, *mesh)).memory <= chip.memory]
    if not steps:
        raise UserError(f"batch_size={config.batch_size}: too large for the memory of {chips} {name}")
    step, tokens = min(steps, key=lambda step: step.seconds), sum(tokens_of(config))
    hours = STEPS * step.seconds / 3600
    return {
        "chip": name, "chips": chips, "experts": experts, "batch": config.batch_size, "mesh": f"{step.data} x {step.expert}",
        "group": config.selection.group_size, "slots a token": sum(slots_of(config, n) for n in tokens_of(config)) / tokens,
        "ms": 1e3 * step.seconds, "all-to-all %": 100 * step.exchange / step.seconds, "all-reduce %": 100 * step.sums / step.seconds,
        "M tokens/s": tokens / step.seconds / 1e6, "GB": step.memory / 1e9, "hours": hours, "$": hours * chips * chip.price,
    }  # fmt: skip


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row for each chip, number of chips and batch, with a slash between numbers of experts."""
    rows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        rows[record["chip"], record["chips"], record["batch"]].append(record)
    show = lambda value: f"{float(f'{value:.2g}'):,g}" if isinstance(value, float) else str(value)  # noqa: E731
    heads = [name for name in records[0] if name != "experts"]
    lines = [heads, ["---"] * len(heads)]
    for same in rows.values():
        lines.append([" / ".join(dict.fromkeys(show(record[name]) for record in same)) for name in heads])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def runs_per_hour(devices: int, rounds: int) -> float:
    """Runs an hour of the Gaussian bench with constant experts (4,000 steps of 512) on so many cores, a device each.

    For a process of its own, which it keeps to these cores: one device would use the others too.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:devices])
    jax.config.update("jax_num_cpu_devices", devices)
    changes, steps = gmm.CASES["constant"]
    timed = gmm.Timed(canonical(override(base(), gmm.COMMON | changes)), 32, steps)
    return 3600e3 / base().steps / statistics.median(timed() for _ in range(rounds))


def sweep(rounds: int) -> list[dict[str, Any]]:
    """Records {devices, cores, runs_per_hour, share_of_linear}; devices beyond the cores cannot be faster."""
    records: list[dict[str, Any]] = []
    for devices in (1, 2, 4, 8):
        code = f"from routed.bench import scaling; print(scaling.runs_per_hour({devices}, {rounds}))"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8", check=True)
        rate = float(done.stdout.split()[-1])
        share = rate / devices / (records[0]["runs_per_hour"] if records else rate)
        cores = len(os.sched_getaffinity(0))
        records.append({"devices": devices, "cores": cores, "runs_per_hour": rate, "share_of_linear": share})
    return records


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """Records of `collectives`, `predict` (the last ones for more rows a chip) and `sweep`; predictions also as tables."""
    del baseline
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the sweep's processes
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # before anything asks JAX for its devices
    _, config = experiment.configure(EXPERIMENT, [])
    pods = [predict(config, *key) for key in itertools.product(NAMES, COUNTS, EXPERTS)]
    batches = [predict(config, "v5e", 256, experts, rows) for rows in (1, 4, 16, 64) for experts in EXPERTS]
    print(f"{table(pods)}\n\n{table(batches)}", flush=True)
    moved = [record for mesh in MESHES for record in collectives(override(base(), SMALL), *mesh)]
    return [*moved, *pods, *batches, *sweep(rounds)]
