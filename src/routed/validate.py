"""What a config may say: one visible table of rules, checked for every point and arm before anything is compiled."""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.config import flatten
from routed.data import TASKS
from routed.dispatch import DISPATCHES
from routed.experts import EXPERTS
from routed.models import MODELS
from routed.routers import ROUTERS
from routed.run import STREAMS
from routed.selection import SELECTIONS
from routed.words import UserError

#: Tuning seeds start this far behind the evaluation seeds, so the two never meet.
TUNING_OFFSET = 1_000_000


def _at_least(low):
    return lambda v: v >= low, f"must be at least {low}"


def _one_of(names):
    return lambda v: v in names, f"must be one of {', '.join(names)}"


_FRACTION = (lambda v: 0 <= v < 1, "must be in [0, 1)")
_ABOVE_ZERO = (lambda v: v > 0, "must be positive")

#: key -> (is it possible?, what to do).
RULES = {
    "seed": (lambda v: 0 <= v < TUNING_OFFSET, f"must be in [0, {TUNING_OFFSET})"),
    "seeds": _at_least(1),
    "held": (lambda v: set(v) <= set(STREAMS), f"must name streams: {', '.join(STREAMS)}"),
    "steps": _at_least(1),
    "eval_every": _at_least(1),
    "batch_size": _at_least(1),
    "arms": (lambda v: len(v) >= 1, "must name at least one arm"),
    "rates": _one_of(("paper", "tuned")),
    "model": _one_of(MODELS),
    "data.name": _one_of(TASKS),
    "data.clusters": _at_least(2),
    "data.dim": _at_least(1),
    "data.spurious_dims": _at_least(0),
    "data.target": _one_of(("constant", "linear")),
    "data.target_dim": _at_least(1),
    "data.separation": _ABOVE_ZERO,
    "data.samples": (lambda v: 1 <= v < 2**31, "must be in [1, 2^31)"),
    "data.test_samples": _at_least(1),
    "router.name": _one_of(ROUTERS),
    "router.entropy": _at_least(0),
    "router.init_scale": _at_least(0),
    "router.learning_rate": _at_least(0),
    "experts.name": _one_of(EXPERTS),
    "experts.count": _at_least(1),
    "experts.depth": _at_least(1),
    "experts.width": _at_least(1),
    "experts.learning_rate": _at_least(0),
    "selection.name": _one_of(SELECTIONS),
    "selection.k": _at_least(1),
    "selection.eval.name": _one_of(SELECTIONS),
    "selection.eval.k": _at_least(1),
    "dispatch": _one_of(DISPATCHES),
    "optimizer.name": _one_of(("sgd", "adam")),
    "optimizer.momentum": _FRACTION,
    "optimizer.b1": _FRACTION,
    "optimizer.b2": _FRACTION,
    "optimizer.eps": _ABOVE_ZERO,
    "optimizer.weight_decay": _at_least(0),
    "optimizer.rate_scale": _ABOVE_ZERO,
    "tune.multipliers": (lambda v: len(v) >= 1 and all(m > 0 for m in v), "must be positive numbers"),
    "tune.seeds": _at_least(1),
    "gate.train_loss": _at_least(0),
    "gate.plateau": _at_least(0),
    "mesh.run": _at_least(0),
    "mesh.batching": _one_of(("auto", "map", "vmap")),
    "mesh.runs_per_batch": _at_least(1),
}


def validate(config: ConfigDict) -> None:
    """Refuses impossible values.

    Raises:
      UserError: names the key, its value and what it must be.
    """
    flat = flatten(config)
    for key, (possible, mend) in RULES.items():
        if not possible(flat[key]):
            raise UserError(f"config key {key}={flat[key]!r}: {mend}")
    for key in ("selection.k", "selection.eval.k"):
        if flat[key] > config.experts.count:
            raise UserError(f"config key {key}={flat[key]}: more than experts.count={config.experts.count}; lower {key}")
    if config.dispatch == "gather" and config.selection.name == "soft":
        raise UserError("config key dispatch='gather': needs a sparse selection; with selection.name='soft' use dispatch='dense'")
    if config.steps % config.eval_every:
        raise UserError(f"config key eval_every={config.eval_every}: must divide steps={config.steps}")
    if config.data.test_samples % config.data.clusters:
        raise UserError(f"config key data.test_samples={config.data.test_samples}: must be a multiple of data.clusters={config.data.clusters}")
    if config.selection.name == "top_k" and config.selection.k == 1 and config.selection.renormalise and not config.router.frozen:
        raise UserError(
            "config key selection.renormalise=True: with selection.k=1 the router gets no gradient, an accidental frozen"
            " router; set selection.renormalise=false or router.frozen=true"
        )
