"""Time of a training step of the T5: dense and sparse in turn, and a command of the user's.

A step is forward, backward and Adam on one batch, several steps in one program, as training runs them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed.bench.harness import Baseline, Case, Lines, Work, restricted, timed
from routed.bench.trainings import TextTraining
from routed.plan.config import base
from routed.settings.tree import override
from routed.training import ENCODER_DECODER

LINES = Lines(r"(\S+) s per step: ([\d.]+) parameters: (\d+)\s*$", "`NAME s per step: SECONDS parameters: COUNT`")


class Shape(NamedTuple):
    """A shape: changes to the base config, target tokens of a row, and (kind, experts, k) of its cases."""

    changes: dict[str, Any]
    targets: int
    cases: tuple[tuple[str, int, int], ...]


GATED = {"experts.name": "gated_ffn", "experts.activation": "gelu", "experts.width": 128}
NARROW = {"batch_size": 16, "data.vocabulary": 512, "experts.name": "ffn", "experts.width": 256}
NARROW |= {"transformer.ffn": "ffn", "transformer.width": 256, "transformer.heads": 12, "transformer.head_dim": 64}
NARROW |= {"transformer.layers": 12, "transformer.sparse_layers": 3, "transformer.tied": True}
TOP_K = {"selection.name": "top_k", "dispatch": "auto"}
SHAPES = {
    "small": Shape(
        {"batch_size": 64} | GATED | TOP_K,
        29,
        (("dense", 16, 2), ("sparse", 4, 2), ("sparse", 16, 2), ("sparse", 64, 2)),
    ),
    # 12 + 12 layers at width 32, the shape of which transformers offers both a T5 and a Switch (top-1) transformer.
    "narrow12": Shape(
        NARROW | TOP_K | {"selection.renormalise": False}, 32, (("dense", 0, 0), ("sparse", 16, 1), ("sparse", 16, 2))
    ),
}


def bench(rounds: int, baseline: Baseline, only: str = "") -> list[dict[str, Any]]:
    """Returns a record of each shape and case, and of each line of the baseline.

    The dense case of `small` is its dense twin of equal FLOPs; the dense case of `narrow12` has its ordinary FFN in
    every layer (0 experts). A baseline is compared with the first case of the most similar number of parameters.
    """
    cases, trainings = [], []
    every = {(name, *case): shape.targets for name, shape in SHAPES.items() for case in shape.cases}
    for (name, kind, experts, k), targets in restricted(every, only).items():
        training = TextTraining(config_of(name, kind, experts, k), ENCODER_DECODER, targets)
        about = {"kind": kind, "shape": name, "experts": experts, "k": k} | training.about
        cases.append(Case(about, {"seconds_per_step": training.step}, Work(training.flops)))
        trainings.append(training)
    ours = timed(cases, rounds, baseline)
    dense = {record["shape"]: record["seconds_per_step"] for record in ours if record["kind"] == "dense"}
    for record, training in zip(ours, trainings, strict=True):
        seconds, config = record["seconds_per_step"], training.config
        tokens = config.batch_size * (config.data.input_length + SHAPES[record["shape"]].targets)
        record |= training.rates(seconds, tokens)
        if record["shape"] in dense:
            record["over_dense"] = seconds / dense[record["shape"]]
    return ours + [
        _beside(name, seconds, parameters, ours) for name, (seconds, parameters) in baseline.medians().items()
    ]


def _beside(name: str, seconds: float, parameters: float, ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the record of a baseline beside the record of ours with the most similar number of parameters."""
    peer = min(ours, key=lambda record: abs(math.log(record["parameters"] / parameters)))
    about = {key: peer[key] for key in ("shape", "experts", "k")} | {"parameters": round(parameters)}
    ratio = peer["seconds_per_step"] / seconds
    return {"kind": f"baseline {name}"} | about | {"seconds_per_step": seconds, "ours_over_baseline": ratio}


def config_of(shape: str, kind: str, experts: int, k: int) -> ConfigDict:
    """Returns the config of a case of a shape."""
    changes = SHAPES[shape].changes | ({"transformer.sparse_layers": 0} if not experts else {})
    changes |= {"experts.count": experts, "selection.k": k} if experts else {}
    return override(base(), changes | ({"model": "dense_active"} if kind == "dense" else {}))
