"""Time per training step of the decoder: its dense twin, sparse, and with all or some of its layers competing; and beside a user's command."""

from __future__ import annotations

import statistics
from typing import Any

from ml_collections import ConfigDict

from routed.bench.baseline import lines
from routed.bench.t5 import Program
from routed.plan.config import base
from routed.settings.tree import override
from routed.system.machine import rates
from routed.training.decoder import DECODER

#: What all shapes share.
COMMON = {
    "model": "decoder", "data.tokens": "characters", "transformer.ffn": "ffn", "transformer.layers": 3, "transformer.sparse_layers": 3,
    "experts.name": "mlp", "experts.depth": 2, "experts.count": 16, "selection.name": "top_k", "selection.k": 2, "dispatch": "auto",
}  # fmt: skip


def _shape(dim: int, heads: int, length: int, rows: int, vocabulary: int) -> dict[str, Any]:
    return {
        "transformer.dim": dim, "transformer.heads": heads, "transformer.head_dim": dim // heads, "transformer.width": dim,
        "experts.width": dim, "data.input_length": length, "batch_size": rows, "data.vocabulary": vocabulary,
    }  # fmt: skip


#: name -> changes to the base config: large batches, small ones, the paper's tiny model.
SHAPES = {
    "default": _shape(96, 4, 256, 32, 30),
    "small": _shape(96, 4, 128, 8, 30),
    "tiny": _shape(264, 8, 512, 8, 205),
}

#: kind -> further changes. dense: an ordinary FFN in every layer. all: every expert computes every token, and nobody competes.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"transformer.sparse_layers": 0},
    "smoe": {},
    "compete_0": {"selection.name": "compete", "selection.share": 0.0},
    "compete_1": {"selection.name": "compete", "selection.share": 1.0},
    "all": {"selection.name": "soft", "dispatch": "dense"},
}


def config_of(shape: str, kind: str) -> ConfigDict:
    """The config of a kind of a shape."""
    return override(base(), COMMON | SHAPES[shape] | KINDS[kind])


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """A record for each shape and kind, and one for each line of the baseline, measured in turn.

    `floor_s` is what the model FLOPs take at the rate of a large product, `mfu` the share of that rate that a step has. The baseline prints lines
    `SHAPE KIND s per step: SECONDS tokens per s: COUNT`; its floor and `ours_over_baseline` are of our model of that shape and kind.

    Raises:
      UserError: the baseline failed, or printed no such line.
    """
    cases = {(shape, kind): config_of(shape, kind) for shape in SHAPES for kind in KINDS}
    programs = {
        (shape, kind): Program(
            config,
            config.data.input_length,
            {"shape": shape, "kind": kind},
            of=DECODER,
            tokens=DECODER.cost(config).tokens,
        )
        for (shape, kind), config in cases.items()
    }
    theirs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for program in programs.values():
            program.measure()
        for shape, kind, seconds, tokens in run_baseline(baseline) if baseline else ():
            theirs.setdefault((shape, kind), []).append((seconds, tokens))
    peak = rates().peak["float32"]
    ours = {key: record_of(program, peak) for key, program in programs.items()}
    for (shape, _), record in ours.items():
        record["over_dense"] = record["seconds_per_step"] / ours[shape, "dense"]["seconds_per_step"]
    records = [*ours.values()]
    records += [beside(*key, times, ours.get(key)) for key, times in theirs.items()]
    for record in records:
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()), flush=True)
    return records


def record_of(program: Program, peak: float) -> dict[str, Any]:
    """What was measured of a program, beside the floor of its FLOPs at a rate of `peak` a second."""
    record = program.record()
    floor = program.flops / peak
    return record | {
        "tokens_per_s": record["tokens_per_second"], "floor_s": floor, "mfu": floor / record["seconds_per_step"]
    }  # fmt: skip


def beside(shape: str, kind: str, times: list[tuple[float, float]], ours: dict[str, Any] | None) -> dict[str, Any]:
    """The record of a baseline's rounds of (seconds per step, tokens per second), beside ours of that shape and kind."""
    seconds, tokens = map(statistics.median, zip(*times, strict=True))
    record = {"shape": shape, "kind": f"baseline {kind}", "seconds_per_step": seconds, "tokens_per_s": tokens}
    if ours is None:
        return record
    floor, ratio = ours["floor_s"], ours["seconds_per_step"] / seconds
    return record | {"floor_s": floor, "mfu": floor / seconds, "ours_over_baseline": ratio}


def run_baseline(command: str) -> list[tuple[str, str, float, float]]:
    """Shape, kind, seconds per step and tokens per second of each line that the command prints of that form.

    Raises:
      UserError: it failed, or printed no such line.
    """
    form = "`SHAPE KIND s per step: SECONDS tokens per s: COUNT`"
    found = lines(command, r"(\S+) (\S+) s per step: ([\d.]+) tokens per s: ([\d.]+)\s*$", form)
    return [(shape, kind, float(seconds), float(tokens)) for shape, kind, seconds, tokens in found]
