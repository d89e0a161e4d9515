"""Tuning of an arm's learning rates on seeds that are never evaluated: candidates, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from routed.models.router_layers import layers_of
from routed.plan.config import problem_of, read_keys
from routed.plan.run import Run
from routed.routers import ROUTERS
from routed.settings.tree import value_of

#: The settings that tuning chooses.
TUNED = ("optimizer.rate_scale", "router.learning_rate")


def candidates(config: ConfigDict) -> list[dict[str, float]]:
    """Changes to a config for each pair of factors, on all rates and on a learning router's rate, that tuning tries."""
    learns = TUNED[1] in read_keys(config)[1] and _trains(config)
    rate, factors = config.router.learning_rate, config.tune.router_multipliers if learns else (1.0,)
    return [
        {"optimizer.rate_scale": scale} | ({"router.learning_rate": rate * factor} if factor != 1 else {})
        for scale in config.tune.multipliers
        for factor in factors
    ]


def _trains(config: ConfigDict) -> bool:
    """Returns True if a router has parameters that a gradient trains: else candidates would differ in name alone.

    The config of a run has no node `router` if its model has no router, and no name in it if there is no choice.
    """
    router = getattr(config, "router", None)
    if router is None or router.get("frozen") or router.get("freeze_at") == 0:
        return False
    layers = layers_of(config) if router.get("layers") else None
    parts = [ROUTERS.get(kind.router.get("name")) for kind in ([config] if layers is None else layers.configs)]
    return any(part is None or (part.learns and part.has_parameters) for part in parts)


def best_rates(candidates: list[Run], last_rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The settings of the candidate with the lowest mean final loss by which its problem compares arms.

    A candidate that diverged never wins.
    """
    losses: dict[tuple[float, ...], list[float]] = {}
    column = problem_of(candidates[0].config).loss
    keys = TUNED if hasattr(candidates[0].config, "router") else TUNED[:1]
    for run in candidates:
        loss, rates = float(last_rows[run.key][column]), (value_of(run.config, key) for key in keys)
        losses.setdefault(tuple(rates), []).append(loss if np.isfinite(loss) else math.inf)
    best = min(losses, key=lambda rates: np.mean(losses[rates]))
    return dict(zip(keys, best, strict=True))


def column(run: Run, values: Mapping[str, Any], count: int) -> dict[str, np.ndarray]:
    """Returns the column of the tuned rate of a learning router, where tuning tried several; `values` are traced."""
    if len(run.config.tune.router_multipliers) < 2 or not _trains(run.config):
        return {}
    return {"train/router_rate": np.full(count, values["router.learning_rate"])}
