"""What each config key may be on its own: one visible table. What keys mean together is in `routed.validate`."""

from __future__ import annotations

import math
from collections import ChainMap

from routed.data import TASKS, image_files, patches
from routed.data.text import SOURCES
from routed.dispatch import DISPATCHES
from routed.experts import ACTIVATIONS, EXPERTS
from routed.losses import TASK_LOSSES
from routed.models import MODELS
from routed.routers import KINDS, ROUTERS
from routed.run import STREAMS
from routed.selection import SELECTIONS
from routed.train import NORMALISED

#: Tuning seeds start this far behind the evaluation seeds, so the two never meet.
TUNING_OFFSET = 1_000_000


def _at_least(low):
    return lambda v: low <= v < math.inf, f"must be at least {low}"


def _one_of(names):
    return lambda v: v in names, f"must be one of {', '.join(names)}"


_FRACTION = (lambda v: 0 <= v < 1, "must be in [0, 1)")
_ABOVE_ZERO = (lambda v: 0 < v < math.inf, "must be positive")
_INT32 = (lambda v: 1 <= v < 2**31, "must be in [1, 2^31)")

#: key -> (is it possible?, what to do).
RULES = {
    "seed": (lambda v: 0 <= v < TUNING_OFFSET, f"must be in [0, {TUNING_OFFSET})"),
    "seeds": (lambda v: 1 <= v <= 10_000, "must be in [1, 10000]"),  # more would take minutes to plan
    "held": (lambda v: set(v) <= set(STREAMS), f"must name streams: {', '.join(STREAMS)}"),
    "steps": _INT32,
    "eval_every": _INT32,
    "batch_size": _at_least(1),
    "arms": (lambda v: len(v) >= 1, "must name at least one arm"),
    "rates": _one_of(("paper", "tuned")),
    "model": _one_of(MODELS),
    "loss": _one_of(TASK_LOSSES),
    "data.name": _one_of(ChainMap(TASKS, SOURCES)),  # live: users add tasks
    "data.images": (
        lambda v: v in image_files.KINDS or (v.startswith("tfds:") and v != "tfds:"),
        f"must be one of {', '.join(image_files.KINDS)}, tfds:NAME",
    ),
    "data.temperature": _ABOVE_ZERO,
    "data.vocabulary": _INT32,
    "data.input_length": _at_least(8),
    "data.noise_density": (lambda v: 0 < v < 1, "must be in (0, 1)"),
    "data.mean_span": _at_least(1),
    "data.damaged": _one_of(("skip", "refuse")),
    "data.eval_rows": _at_least(1),
    "data.patch_noise": _at_least(0),
    "data.patches": _at_least(patches.SIGNALS),
    "data.alpha_low": _at_least(0),
    "data.beta_low": _at_least(0),
    "data.gamma_low": _at_least(0),
    "data.input_scale": _ABOVE_ZERO,
    "data.clusters": _at_least(2),
    "data.dim": _at_least(1),
    "data.spurious_dims": _at_least(0),
    "data.rank": _at_least(1),
    "data.noise": _ABOVE_ZERO,
    "data.radius": (lambda v: 0 < v < 1, "must be in (0, 1)"),
    "data.positions": _at_least(1),
    "data.target_dim": _at_least(1),
    "data.separation": _ABOVE_ZERO,
    "data.samples": _INT32,
    "data.test_samples": _at_least(1),
    "router.name": _one_of(ROUTERS),
    "router.depth": _at_least(1),
    "router.width": _at_least(1),
    "router.window": _at_least(1),
    "router.dim": _at_least(1),
    "router.vocabulary": _at_least(1),
    "router.choices": _at_least(1),
    "router.noise": _one_of(KINDS),
    "router.noise_scale": _at_least(0),
    "router.entropy": _at_least(0),
    "router.init_scale": _at_least(0),
    "router.learning_rate": _at_least(0),
    "transformer.layers": _at_least(1),
    "transformer.sparse_layers": _at_least(0),
    "transformer.dim": _at_least(1),
    "transformer.heads": _at_least(1),
    "transformer.head_dim": _at_least(1),
    "transformer.ffn": _one_of(("ffn", "gated_ffn")),
    "transformer.width": _at_least(1),
    "transformer.buckets": (lambda v: v >= 4 and v % 4 == 0, "must be a multiple of 4"),
    "transformer.max_distance": _at_least(2),
    "transformer.init_scale": _ABOVE_ZERO,
    "transformer.dtype": _one_of(("float32", "bfloat16")),
    "experts.name": _one_of(EXPERTS),
    "experts.count": _at_least(1),
    "experts.depth": _at_least(1),
    "experts.width": _at_least(1),
    "experts.activation": _one_of(ACTIVATIONS),
    "experts.init": _one_of(("lecun", "uniform")),
    "experts.init_scale": _at_least(0),
    "experts.learning_rate": _at_least(0),
    "selection.name": _one_of(SELECTIONS),
    "selection.k": _at_least(1),
    "selection.capacity_factor": _at_least(0),
    "selection.capacity_rule": _one_of(("per_assignment", "per_token")),
    "selection.min_capacity": _at_least(1),
    "selection.group_size": _at_least(0),
    "selection.priority": _one_of(("position", "score", "causal")),
    "selection.balance_rate": _at_least(0),
    # Not the others: they would route a test sample by its neighbours in the batch.
    "selection.eval.name": _one_of(("soft", "top_k", "raw", "sigmoid")),
    "selection.eval.k": _at_least(1),
    "selection.eval.capacity_factor": _at_least(0),
    "dispatch": _one_of(("auto", *DISPATCHES)),
    "losses.balance": _at_least(0),
    "losses.balance_of": _one_of(("probabilities", "scores")),
    "losses.balance_scope": _one_of(("batch", "group")),
    "losses.importance": _at_least(0),
    "losses.z": _at_least(0),
    "losses.entropy": _at_least(0),
    "losses.logits_z": _at_least(0),
    "optimizer.name": _one_of(("sgd", "adam", "adafactor")),
    "optimizer.schedule": _one_of(("constant", "linear", "rsqrt")),
    "optimizer.warmup": _at_least(0),
    "optimizer.clip": _at_least(0),
    "optimizer.momentum": _FRACTION,
    "optimizer.b1": _FRACTION,
    "optimizer.b2": _FRACTION,
    "optimizer.eps": _ABOVE_ZERO,
    "optimizer.weight_decay": _at_least(0),
    "optimizer.l2": _at_least(0),
    "optimizer.normalise": _one_of(("none", *NORMALISED)),
    "optimizer.rate_scale": _ABOVE_ZERO,
    "stop.rise": _at_least(0),
    "stop.floor": _at_least(0),
    "stop.after": _at_least(0),
    "shuffles": _at_least(0),
    "tune.multipliers": (lambda v: len(v) >= 1 and all(m > 0 for m in v), "must be positive numbers"),
    "tune.seeds": _at_least(1),
    "gate.train_loss": _at_least(0),
    "gate.plateau": _at_least(0),
    "mesh.run": _at_least(0),
    "mesh.data": _at_least(1),
    "mesh.expert": _at_least(1),
    "checkpoint.every": _at_least(0),
    "checkpoint.keep": _at_least(1),
    "mesh.batching": _one_of(("auto", "map", "vmap")),
    "mesh.runs_per_batch": _at_least(1),
}
