"""Time per training step of the T5: dense and sparse side by side, and beside a command of the user's.

A step is forward, backward and Adam on one batch, several steps in one program, as training runs them. All cases are timed in turn.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from routed.bench.baseline import lines as baseline_lines
from routed.contracts import TextBatch
from routed.engine.compilation import compile_lowered
from routed.layer.dispatch import DATA, EXPERT
from routed.layer.rule import rule_of
from routed.plan.config import base
from routed.settings.tree import override
from routed.training import ENCODER_DECODER, ProblemPart
from routed.training.objective import selection_loss


class Shape(NamedTuple):
    """A shape: changes to the base config, target tokens of a row, and (kind, experts, k) of its cases."""

    changes: dict[str, Any]
    targets: int
    cases: tuple[tuple[str, int, int], ...]


SHAPES = {
    "small": Shape(
        {
            "batch_size": 64, "experts.name": "gated_ffn", "experts.activation": "gelu", "experts.width": 128,
            "selection.name": "top_k", "dispatch": "auto",
        },
        29,
        (("dense", 16, 2), ("sparse", 4, 2), ("sparse", 16, 2), ("sparse", 64, 2)),
    ),
    # 12 + 12 layers at width 32, the shape of which transformers offers both a T5 and a Switch (top-1) transformer.
    "narrow12": Shape(
        {
            "batch_size": 16, "data.vocabulary": 512, "transformer.layers": 12, "transformer.sparse_layers": 3,
            "transformer.heads": 12, "transformer.head_dim": 64, "transformer.ffn": "ffn", "transformer.width": 256,
            "transformer.tied": True, "experts.name": "ffn", "experts.width": 256, "selection.name": "top_k",
            "selection.renormalise": False, "dispatch": "auto",
        },
        32,
        (("dense", 0, 0), ("sparse", 16, 1), ("sparse", 16, 2)),
    ),
}  # fmt: skip


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """A record for each shape and case, and one for each line of the baseline.

    The dense case of `small` is its dense twin of equal FLOPs, that of `narrow12` has its ordinary FFN in every layer (experts
    0). The baseline prints lines `NAME s per step: SECONDS parameters: COUNT`; each is compared with the first case of the
    number of parameters closest to its own.

    Raises:
      UserError: the baseline failed, or printed no such line.
    """
    programs = [
        Program(
            config_of(shape, kind, experts, k),
            about.targets,
            {"kind": kind, "shape": shape, "experts": experts, "k": k},
        )
        for shape, about in SHAPES.items()
        for kind, experts, k in about.cases
    ]
    theirs: dict[str, tuple[int, list[float]]] = {}
    for _ in range(rounds):
        for program in programs:
            program.measure()
        for name, seconds, count in run_baseline(baseline) if baseline else ():
            theirs.setdefault(name, (count, []))[1].append(seconds)
    records = [program.record() for program in programs]
    dense = {r["shape"]: r for r in records if r["kind"] == "dense"}
    for record in records:
        record["over_dense"] = record["seconds_per_step"] / dense[record["shape"]]["seconds_per_step"]
    for name, (count, times) in theirs.items():
        ours = min(records[: len(programs)], key=lambda r: abs(math.log(r["parameters"] / count)))
        seconds = statistics.median(times)
        peer = {key: ours[key] for key in ("shape", "experts", "k")} | {"parameters": count}
        records.append(
            {"kind": f"baseline {name}"} | peer
            | {"seconds_per_step": seconds, "ours_over_baseline": ours["seconds_per_step"] / seconds}
        )  # fmt: skip
    for record in records:
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()), flush=True)
    return records


def config_of(shape: str, kind: str, experts: int, k: int) -> ConfigDict:
    """The config of a case of a shape."""
    changes = SHAPES[shape].changes | ({"transformer.sparse_layers": 0} if not experts else {})
    changes |= {"experts.count": experts, "selection.k": k} if experts else {}
    return override(base(), changes | ({"model": "dense_active"} if kind == "dense" else {}))


class Program:
    """The training of one config, compiled, and what was measured of it: `steps` at once, or as many as take two seconds.

    Its problem is that `of` an encoder-decoder, whose stacks read inputs and targets, or of another with so many `tokens` a step; the devices of a
    mesh share its rows.
    """

    def __init__(
        self,
        config: ConfigDict,
        targets: int,
        about: dict[str, Any],
        steps: int = 0,
        of: ProblemPart = ENCODER_DECODER,
        tokens: int = 0,
        mesh: Mesh | None = None,
    ):
        self.config, self.about, self.mesh = config, dict(about), mesh
        self.tokens, self.flops = (
            tokens or config.batch_size * (config.data.input_length + targets),
            of.cost(config).flops,
        )
        self.model, self.optimiser = of.models[config.model].build(config, mesh), optax.adam(1e-3)
        batch = self._batch(targets)
        params, layer = jax.jit(self.model.init)(jax.random.key(0), batch)
        self.about["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.state = (params, layer, self.optimiser.init(params))
        begun = time.perf_counter()
        lowered = jax.jit(self._steps, donate_argnums=0).lower(self.state, jnp.int32(1), batch)
        self.compiled = compile_lowered(lowered, of.fuse)
        self.compiling = time.perf_counter() - begun
        self.run = lambda count: self.compiled(self.state, jnp.int32(count), batch)
        self.times: list[float] = []
        self.count = 1
        self._time()  # the first call touches the memory
        self.count = steps or max(1, min(16, round(2 / self._time())))

    def _batch(self, targets: int) -> TextBatch:
        rng, rows = np.random.default_rng(0), self.config.batch_size
        draw = lambda n: rng.integers(2, self.config.data.vocabulary, (rows, n), np.int32)  # noqa: E731
        batch = TextBatch(
            jnp.asarray(draw(self.config.data.input_length)), jnp.asarray(draw(targets)), jnp.zeros(rows, jnp.int32)
        )
        return batch if self.mesh is None else jax.device_put(batch, NamedSharding(self.mesh, P((DATA, EXPERT))))

    def _loss(self, params, layer, batch: TextBatch):
        rule = rule_of(self.config.selection)
        logits, sites, layer = self.model.apply(params, layer, batch, rule, self.config.dispatch, jax.random.key(0))
        right = jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - right).mean() + selection_loss(rule, sites), layer

    def _steps(self, state, count, batch: TextBatch):
        def one(_, state):
            params, layer, moments = state
            grads, layer = jax.grad(self._loss, has_aux=True)(params, layer, batch)
            updates, moments = self.optimiser.update(grads, moments, params)
            return optax.apply_updates(params, updates), layer, moments

        return jax.lax.fori_loop(0, count, one, state)

    def _time(self) -> float:
        begun = time.perf_counter()
        self.state = jax.block_until_ready(self.run(self.count))
        return (time.perf_counter() - begun) / self.count

    def measure(self) -> None:
        self.times.append(self._time())

    def record(self) -> dict[str, Any]:
        seconds = statistics.median(self.times)
        return self.about | {
            "seconds_per_step": seconds,
            "fastest_step": min(self.times),
            "tokens_per_second": self.tokens / seconds,
            "gflops_per_second": self.flops / seconds / 1e9,
            "compile_seconds": self.compiling,
        }


def run_baseline(command: str) -> list[tuple[str, float, int]]:
    """Name, seconds per step and number of parameters of each line that the command prints of that form.

    Raises:
      UserError: it failed, or printed no such line.
    """
    form = "`NAME s per step: SECONDS parameters: COUNT`"
    lines = baseline_lines(command, r"(\S+) s per step: ([\d.]+) parameters: (\d+)\s*$", form)
    return [(name, float(seconds), int(count)) for name, seconds, count in lines]
