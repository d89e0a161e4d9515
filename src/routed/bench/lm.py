"""Time per training step of the decoder: dense, its dense twin, sparse, and with all or some of its layers competing; and beside a user's command."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed.bench.baseline import lines
from routed.bench.t5 import Program
from routed.engine.devices import allow_collectives, make_mesh
from routed.layer.selection import divisors
from routed.plan.config import base
from routed.settings.tree import override
from routed.system.machine import rates
from routed.system.platform import platform
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

#: kind -> further changes. dense: an ordinary FFN in every layer. twin: one with the weights of the experts of a token. all: every expert computes every token, and nobody competes.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"transformer.sparse_layers": 0},
    "twin": {"model": "decoder_active"},
    "smoe": {},
    "compete_0": {"selection.name": "compete", "selection.share": 0.0},
    "compete_1": {"selection.name": "compete", "selection.share": 1.0},
    "all": {"selection.name": "soft", "dispatch": "dense"},
}


#: Kinds that are also timed, on a CPU, with a device for each core, which share the rows of a step: alone a run leaves cores idle.
SHARED = ("dense", "twin", "smoe")


def config_of(shape: str, kind: str) -> ConfigDict:
    """The config of a kind of a shape."""
    return override(base(), COMMON | SHAPES[shape] | KINDS[kind])


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """A record for each shape and kind, for the kinds whose steps the cores share, and for each line of the baseline, measured in turn.

    `floor_s` is what the model FLOPs take at the rate of a large product, `mfu` the share of that rate that a step has, `over_dense` and
    `over_twin` the time of a step over those of an ordinary dense decoder and of one with as many active FLOPs. The baseline prints lines `SHAPE KIND s per step: SECONDS tokens per s: COUNT`; its floor, `ours_over_baseline`
    and `shared_over_baseline` are of our model of that shape and kind.

    Raises:
      UserError: the baseline failed, or printed no such line.
    """
    programs = {(shape, kind): program_of(shape, kind) for shape in SHAPES for kind in KINDS}
    shared: dict[tuple[str, str], list[float]] = {}
    if platform() == "cpu" and len(os.sched_getaffinity(0)) > 1:
        shared = {(shape, kind): [] for shape in SHAPES for kind in SHARED}
    theirs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for program in programs.values():
            program.measure()
        for case, times in shared.items():
            times.append(apart(*case))
        for shape, kind, seconds, tokens in run_baseline(baseline) if baseline else ():
            theirs.setdefault((shape, kind), []).append((seconds, tokens))
    peak = rates().peak["float32"]
    ours = {key: record_of(program, peak) for key, program in programs.items()}
    for (shape, kind), times in shared.items():
        seconds, program = statistics.median(times), programs[shape, kind]
        floor = ours[shape, kind]["floor_s"]
        ours[shape, f"{kind}, shared"] = timed(shape, f"{kind}, shared", seconds, program.tokens / seconds, floor)
    for (shape, kind), record in ours.items():
        for other in ("dense", "twin"):
            beside_it = ours[shape, f"{other}, shared" if kind.endswith(", shared") else other]
            record[f"over_{other}"] = record["seconds_per_step"] / beside_it["seconds_per_step"]
    records = [*ours.values(), *(beside(*key, times, ours) for key, times in theirs.items())]
    for record in records:
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()), flush=True)
    return records


def program_of(shape: str, kind: str, mesh: Mesh | None = None) -> Program:
    """The compiled training of a kind of a shape."""
    config, about = config_of(shape, kind), {"shape": shape, "kind": kind}
    tokens = DECODER.cost(config).tokens
    return Program(config, config.data.input_length, about, of=DECODER, tokens=tokens, mesh=mesh)


def record_of(program: Program, peak: float) -> dict[str, Any]:
    """What was measured of a program, beside the floor of its FLOPs at a rate of `peak` a second."""
    record = program.record()
    shape, kind = record["shape"], record["kind"]
    return record | timed(shape, kind, record["seconds_per_step"], record["tokens_per_second"], program.flops / peak)


def timed(shape: str, kind: str, seconds: float, tokens: float, floor: float) -> dict[str, Any]:
    """What every record says: seconds a step, tokens a second, and the floor of its FLOPs."""
    return {
        "shape": shape, "kind": kind, "seconds_per_step": seconds, "tokens_per_s": tokens, "floor_s": floor, "mfu": floor / seconds
    }  # fmt: skip


def beside(
    shape: str, kind: str, times: list[tuple[float, float]], ours: dict[tuple[str, str], dict[str, Any]]
) -> dict[str, Any]:
    """The record of a baseline's rounds of (seconds per step, tokens per second), beside ours of that shape and kind."""
    seconds, tokens = map(statistics.median, zip(*times, strict=True))
    if (shape, kind) not in ours:
        return {"shape": shape, "kind": f"baseline {kind}", "seconds_per_step": seconds, "tokens_per_s": tokens}
    record = timed(shape, f"baseline {kind}", seconds, tokens, ours[shape, kind]["floor_s"])
    for name, of in (("ours_over_baseline", kind), ("shared_over_baseline", f"{kind}, shared")):
        if (shape, of) in ours:
            record[name] = ours[shape, of]["seconds_per_step"] / seconds
    return record


def apart(shape: str, kind: str) -> float:
    """Seconds a step where the cores share its rows, in a process of its own: here JAX has one device."""
    code = f"from routed.bench import lm; print(lm.seconds_shared({shape!r}, {kind!r}))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return float(done.stdout.split()[-1])


def seconds_shared(shape: str, kind: str) -> float:
    """Seconds a step of a program whose rows as many devices share as there are cores, and divide them; before JAX's first use only."""
    cores, rows = len(os.sched_getaffinity(0)), SHAPES[shape]["batch_size"]
    devices = max(n for n in divisors(rows) if n <= cores)
    config = override(config_of(shape, kind), {"mesh.data": devices})
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    allow_collectives([config])
    program = program_of(shape, kind, make_mesh(config))
    program.measure()
    return program.times[-1]


def run_baseline(command: str) -> list[tuple[str, str, float, float]]:
    """Shape, kind, seconds per step and tokens per second of each line that the command prints of that form.

    Raises:
      UserError: it failed, or printed no such line.
    """
    form = "`SHAPE KIND s per step: SECONDS tokens per s: COUNT`"
    found = lines(command, r"(\S+) (\S+) s per step: ([\d.]+) tokens per s: ([\d.]+)\s*$", form)
    return [(shape, kind, float(seconds), float(tokens)) for shape, kind, seconds, tokens in found]
