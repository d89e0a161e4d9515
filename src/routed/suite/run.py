"""Makes a card: runs the sweep of all probes in one workdir and the measures without training, and scores them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pandas as pd
from absl import logging as log

from routed.analysis.statistics import Estimate, estimate
from routed.contracts import UserError
from routed.engine import devices, execution, results, rows
from routed.plan.config import problem_of
from routed.plan.run_settings import TUNING_OFFSET
from routed.plan.runs import plan_runs
from routed.routers import ROUTERS
from routed.settings.tree import flatten
from routed.suite import measures, probes
from routed.suite.subject import Subject, has_gradient
from routed.system import files
from routed.system.stored import remember

#: The file of a workdir that identifies its card, and the file of the card itself.
MARK, CARD = "suite.json", "card.json"

#: Significant digits of published numbers.
DIGITS = 4


def make(subject: Subject, quick: bool, workdir: pathlib.Path) -> dict[str, Any]:
    """Makes the card of a router, as JSON; finished runs in the workdir are not run again.

    Raises:
      UserError: the workdir is of another card, another router or other code; or the user interrupted.
    """
    config, sweep = subject.config, probes.sweep(quick)
    runs = plan_runs(config, sweep)
    _claim(workdir, subject, quick)
    devices.keep_programs(workdir)
    log.info(
        "%s: %d points, %d runs, seeds from %d, workdir %s", subject.name, len(sweep), len(runs), config.seed, workdir
    )
    table = results.open_workdir(workdir, "suite", config, sweep)
    table = execution.execute(runs, table, workdir, devices.make_mesh(config))
    lost = rows.diverged(table, problem_of(config).loss)
    if len({run.key for run in runs} - {*table.run}):
        raise UserError(f"{subject.name}: {lost} Its scores, or what training makes of them, are not finite")
    seeds = [config.seed + i for i in range(config.seeds)]
    learns = ROUTERS[subject.name].learns
    signal = measures.gradient_signal(config, seeds) if learns else np.zeros(len(seeds))
    applies = learns and (signal.any() or has_gradient(config))  # else there is no gradient to have a signal
    cost = measures.cost(config)
    cheapness = min(1.0, cost["flops_linear"] / max(cost["flops"], 1.0))
    measured = {
        "gradient": [float(value) for value in signal] if applies else [],
        "cost": [cheapness] if np.isfinite(cost["flops"]) else [],
    }
    described = results.stored_config(workdir)
    card = {
        "suite": identity(quick),
        "router": {"name": subject.name, "settings": list(subject.given), "code": subject.code, "learns": learns},
        "seeds": seeds,
        "diverged": lost,
        "tuning": _tuning(config),
        "probes": scores(table, flatten(config), measured, quick),
        "cost": {name: _short(value) if np.isfinite(value) else None for name, value in cost.items()},
        "settings": dict(probes.settings(quick)),
        "versions": described["versions"],
        "commit": described["commit"],
        "machine": f"{described['machine']}, {jax.device_count()} devices of kind {jax.devices()[0].device_kind}",
    }
    files.write(workdir / CARD, json.dumps(card, indent=1, default=list) + "\n")
    return card


def identity(quick: bool) -> dict[str, Any]:
    """The values that are equal for cards that are comparable."""
    return {"version": probes.VERSION, "digest": probes.digest(quick), "quick": quick}


def scores(
    table: pd.DataFrame, base: dict[str, Any], measured: dict[str, list[float]], quick: bool
) -> dict[str, dict[str, Any]]:
    """The scores by probe: of router and frozen self, with paired gain, 95 % intervals, values by seed, and E by point.

    Scores that were `measured` without training have no frozen self. A router without a learned arm has the score of
    its frozen self, and no gain.
    """
    result: dict[str, dict[str, Any]] = {}
    for probe in probes.chosen(quick):
        if probe.score is None:
            values = measured[probe.name]
            result[probe.name] = {"score": _interval(values), "seeds": [_short(value) for value in values]}
            continue
        arms = {arm: probes.rows_at(table, probe, arm, base) for arm in (probes.LEARNED, probes.SELF, probes.FIXED)}
        by_arm = {arm: probe.score(rows) for arm, rows in arms.items() if len(rows)}
        learned, frozen = ([*by_arm.values()] * 2)[:2]  # both are the only arm of a router that cannot learn
        gain = (learned - frozen) if probes.LEARNED in by_arm else None
        result[probe.name] = {
            "score": _interval(learned),
            "frozen": _interval(frozen),
            "gain": None if gain is None else _interval(gain, low=-1.0),
            "seeds": [_short(value) for value in learned],
            "seeds_frozen": [_short(value) for value in frozen],
        }
        if len(probe.points) > 1:  # all of them are scored by E
            by_point = probes.explained(next(rows for rows in arms.values() if len(rows))).groupby("point").mean()
            result[probe.name]["points"] = [_short(value) for value in by_point]
    return result


def _interval(values: Any, low: float = 0.0) -> dict[str, Any]:
    """A mean in [low, 1] with its interval over seeds, which one value lacks; of no values, nothing.

    The t interval is cut at the ends: on another scale a score's interval would contradict that of its paired gain.
    """
    whole = estimate(values)
    cut: Estimate = whole._replace(low=float(np.maximum(whole.low, low)), high=float(np.minimum(whole.high, 1.0)))
    return {name: _short(value) if value == value else None for name, value in cut._asdict().items()}


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _tuning(config: Any) -> dict[str, Any]:
    if config.rates != "tuned":
        return {"seeds": [], "multipliers": [1.0]}
    first = config.seed + TUNING_OFFSET
    return {"seeds": [first + i for i in range(config.tune.seeds)], "multipliers": list(config.tune.multipliers)}


def _claim(workdir: pathlib.Path, subject: Subject, quick: bool) -> None:
    """Marks the workdir as that of this card, or refuses the workdir of another card."""
    identifying = {
        "suite": identity(quick),
        "router": subject.name,
        "settings": list(subject.given),
        "seed": subject.config.seed,
    }
    file = workdir / MARK
    if not file.exists() and (workdir / "config.json").exists():
        raise UserError(f"workdir {workdir} holds runs of no score card: choose another --workdir")
    stored = remember(file, identifying, "choose another --workdir", dict.fromkeys(identifying, object))
    different = next((key for key, value in identifying.items() if stored[key] != value), None)
    if different == "seed":
        raise UserError(
            f"workdir {workdir} is of other code of {subject.name}, whose seeds are others: choose another"
            " --workdir, or undo the edit"
        )
    if different:
        raise UserError(
            f"workdir {workdir} holds a card of {different}={stored[different]}, this command makes one of"
            f" {different}={identifying[different]}: choose another --workdir"
        )
