"""Time of a training step of the decoder: dense, its dense twin, sparse, with competing layers; a user's command."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import routed.papers.pham2024  # noqa: F401 (its competing layers)
from routed.bench.harness import Baseline, Case, Lines, Work, in_new_process, restricted, timed
from routed.bench.trainings import TextTraining
from routed.engine.devices import allow_collectives, make_mesh
from routed.layer.selection import divisors
from routed.plan.config import base
from routed.settings.tree import override
from routed.system.platform import platform
from routed.training.language import DECODER

LINES = Lines(
    r"(\S+ \S+) s per step: ([\d.]+) tokens per s: ([\d.]+)\s*$", "`SHAPE KIND s per step: SECONDS tokens per s: COUNT`"
)
#: Changes to the base config in all shapes.
COMMON: dict[str, Any] = {
    "model": "decoder",
    "data.name": "artificial",
    "data.tokens": "characters",
    "dispatch": "auto",
}
COMMON |= {"transformer.ffn": "ffn", "transformer.layers": 3, "transformer.sparse_layers": 3}
COMMON |= {"experts.name": "mlp", "experts.depth": 2, "experts.count": 16, "selection.name": "top_k", "selection.k": 2}


def _shape(dim: int, heads: int, length: int, rows: int, vocabulary: int) -> dict[str, Any]:
    width = dict.fromkeys(("transformer.dim", "transformer.width", "experts.width"), dim)
    text = {"data.input_length": length, "batch_size": rows, "data.vocabulary": vocabulary}
    return width | {"transformer.heads": heads, "transformer.head_dim": dim // heads} | text


#: name -> changes to the base config: large batches, small batches, the paper's tiny model.
SHAPES = {
    "default": _shape(96, 4, 256, 32, 30),
    "small": _shape(96, 4, 128, 8, 30),
    "tiny": _shape(264, 8, 512, 8, 205),
}
#: kind -> further changes. dense: an ordinary FFN in every layer. twin: an FFN with the weights of the experts of a
#: token. all: every expert computes every token, without a competition.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"transformer.sparse_layers": 0},
    "twin": {"model": "decoder_active"},
    "smoe": {},
    "compete_0": {"selection.name": "compete", "selection.competition_rate": 0.0},
    "compete_1": {"selection.name": "compete", "selection.competition_rate": 1.0},
    "all": {"selection.name": "soft", "dispatch": "dense"},
}
#: Cores of this process.
CORES = len(os.sched_getaffinity(0))
#: Kinds that are also timed on a CPU with a device for each core, which share the rows of a step: one run leaves cores
#: idle.
SHARED = ("dense", "twin", "smoe")
Records = dict[tuple[str, str], dict[str, Any]]


def config_of(shape: str, kind: str) -> ConfigDict:
    """Returns the config of a kind of a shape."""
    return override(base(), COMMON | SHAPES[shape] | KINDS[kind])


def bench(rounds: int, baseline: Baseline, only: str = "") -> list[dict[str, Any]]:
    """Returns a record of each shape and kind, of the kinds whose steps cores share, and of each line of the baseline.

    `mfu` is the share of the machine's peak that a step reaches; `over_dense` and `over_twin` are its time over the
    times of an ordinary dense decoder and of a decoder with as many active FLOPs. A baseline is compared with ours of
    its shape and kind.
    """
    names = {(shape, kind): kind for shape in SHAPES for kind in KINDS}
    if platform() == "cpu" and CORES > 1:
        names |= {(shape, f"{kind}, shared"): kind for shape in SHAPES for kind in SHARED}
    names = restricted(names, only)
    trainings = {(shape, kind): training_of(shape, kind) for (shape, _), kind in names.items()}
    times: dict[tuple[str, str], Callable[[], float]] = {
        case: trainings[case].step if case[1] == kind else partial(shared, case[0], kind)
        for case, kind in names.items()
    }
    cases = []
    for (shape, kind), step in times.items():
        training = trainings[shape, kind.partition(",")[0]]
        about = {"shape": shape, "kind": kind} | (training.about if kind in KINDS else {})
        cases.append(Case(about, {"seconds_per_step": step}, Work(training.flops)))
    ours = dict(zip(times, timed(cases, rounds, baseline), strict=True))
    for (shape, kind), record in ours.items():
        name, _, suffix = kind.partition(",")
        training, seconds = trainings[shape, name], record["seconds_per_step"]
        record |= training.rates(seconds, DECODER.cost(training.config).tokens) | {"mfu": 1 / record["over_floor"]}
        for peer in ("dense", "twin"):
            if theirs := ours.get((shape, f"{peer},{suffix}" if suffix else peer)):
                record[f"over_{peer}"] = seconds / theirs["seconds_per_step"]
    return [
        *ours.values(),
        *(beside(label, seconds, count, ours) for label, (seconds, count) in baseline.medians().items()),
    ]


def training_of(shape: str, kind: str, mesh: Mesh | None = None) -> TextTraining:
    """Compiles the training of a kind of a shape."""
    config = config_of(shape, kind)
    return TextTraining(config, DECODER, config.data.input_length, mesh=mesh)


def beside(label: str, seconds: float, tokens: float, ours: Records) -> dict[str, Any]:
    """Returns the record of a baseline's median seconds per step and tokens per second, beside ours of its label."""
    shape, kind = label.split()
    record = {"shape": shape, "kind": f"baseline {kind}", "seconds_per_step": seconds, "tokens_per_second": tokens}
    if (shape, kind) in ours:
        least = ours[shape, kind]["floor_seconds"]
        record |= {"floor_seconds": least, "mfu": least / seconds}
    for column, name in (("ours_over_baseline", kind), ("shared_over_baseline", f"{kind}, shared")):
        if (shape, name) in ours:
            record[column] = ours[shape, name]["seconds_per_step"] / seconds
    return record


def shared(shape: str, kind: str) -> float:
    """Returns the seconds of a step whose rows the cores share, in a new process: this process has one device."""
    return in_new_process(f"from routed.bench import lm; print(lm.seconds_shared({shape!r}, {kind!r}))")


def seconds_shared(shape: str, kind: str) -> float:
    """Times a step whose rows are divided over as many devices as cores allow; before JAX's first use only."""
    devices = max(n for n in divisors(SHAPES[shape]["batch_size"]) if n <= CORES)
    config = override(config_of(shape, kind), {"mesh.data": devices})
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    allow_collectives([config])
    return training_of(shape, kind, make_mesh(config)).step()
