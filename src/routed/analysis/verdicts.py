"""Verdicts: what the rows of a workdir say about the claims of its experiment; a kind of claim is a line in KINDS."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import statistics
from routed.analysis.claims import Claim, Measured
from routed.contracts import UserError
from routed.engine.rows import at_base, last, shown
from routed.plan.arms import fair_arms
from routed.settings.tree import flatten, nearest

#: How two sides are compared, with the smallest effect of interest: losses that approach 0 by their log ratio (a factor
#: 1.1), nats per token and shares by their difference (.01), shares of successful runs by theirs (.05).
EFFECTS = {"ratio": math.log(1.1), "difference": 0.01, "probability": 0.05}

ALPHA = 0.05


def judge(claims: tuple[Claim, ...], table: pd.DataFrame, config: ConfigDict, swept: list[str]) -> list[dict[str, Any]]:
    """A verdict for every claim, from all rows of the workdir. P values are adjusted over the claims of the file."""
    rows = Rows(table, config, swept)
    found = [_judge(claim, rows) for claim in claims]
    family = [one for one in found if one["p"] is not None]
    for one, p in zip(family, statistics.adjusted([one["p"] for one in family]), strict=True):
        one["p_adjusted"] = float(p)
        shown = one["verdict"] == "supported" or (one["kind"] == "order" and one["verdict"] == "opposite")
        if shown and p >= ALPHA:
            one["verdict"], one["reason"] = "inconclusive", f"p = {p:.2g} after adjusting for {len(family)} tests"
    return found


class Rows:
    """The last rows of each run, and how an arm's loss moved before them."""

    def __init__(self, table: pd.DataFrame, config: ConfigDict, swept: list[str]):
        self.last, self.config, self.swept = last(table), config, swept
        self.table = table

    def at(self, filters: dict[str, Any]) -> pd.DataFrame:
        """Last rows at one point: swept keys without a filter are settled, so that no claim pools points."""
        rows = self.last
        for key, value in filters.items():
            if key not in rows:
                return rows.iloc[:0]
            wanted = np.isclose(rows[key], value, rtol=1e-9) if isinstance(value, float) else rows[key] == value
            rows = rows[wanted]
        return at_base(rows, [key for key in self.swept if key not in filters], flatten(self.config))

    def side(self, side: dict[str, Any], at: dict[str, Any], metric: str) -> tuple[pd.Series | float, str | None]:
        """Values by seed (or the constant), and the arm they are of."""
        if "value" in side:
            return side["value"], None
        filters = at | {k: v for k, v in side.items() if k not in ("arm", "metric")}
        rows = self.at(filters)
        arm = self.fairest(rows) if side["arm"] == "fairest" else side["arm"]
        rows = rows[(rows.arm == arm) & (rows.status == "ok")]
        name = side.get("metric", metric)
        return (rows.set_index("seed")[name].dropna() if name in rows else pd.Series(dtype=float)), arm

    def runs(self, at: dict[str, Any], arms: tuple[str | None, ...]) -> frozenset[str]:
        """The runs of some arms at a point."""
        rows = self.at(at)
        return frozenset(rows[rows.arm.isin(arms)].run)

    @staticmethod
    def fairest(rows: pd.DataFrame) -> str | None:
        """The frozen control with the lowest mean log test loss at a point: chosen in the control's favour."""
        fair = rows[rows.arm.isin(fair_arms()) & (rows.status == "ok")]
        if not len(fair):
            return None
        return str(
            np.log(fair.set_index("arm")["test/loss"].clip(lower=statistics.TINY)).groupby(level=0).mean().idxmin()
        )

    def unconverged(self, side: dict[str, Any], at: dict[str, Any], arm: str | None) -> str | None:
        """Why the arm fails the convergence gate, or None if it passes."""
        if arm is None:
            return None
        filters = at | {k: v for k, v in side.items() if k not in ("arm", "metric")}
        rows = self.at(filters)
        rows = rows[(rows.arm == arm) & (rows.status == "ok")]
        if not len(rows):
            return None
        if "eval/bigram" in rows:
            ours, bigram = rows["eval/loss"].mean(), rows["eval/bigram"].mean()
            if ours < bigram:
                return None
            return f"{arm}: {ours:.3g} nats a token, a bigram model has {bigram:.3g}"
        if rows["train/loss"].mean() < self.config.gate.train_loss:
            return None
        history = self.table[self.table.run.isin(rows.run)].sort_values("step")
        losses = history.groupby("step")["train/loss"].mean().to_numpy()
        fell = 1 - losses[-1] / losses[-2]
        if abs(fell) < self.config.gate.plateau:
            return None
        return f"{arm}: training loss {losses[-1]:.2g}, fell by {100 * fell:.0f} % in the last chunk"


def _judge(claim: Claim, rows: Rows) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": claim.id, "kind": claim.kind, "comparability": claim.comparability, "statement": claim.statement,
        "metric": claim.metric, "at": claim.at, "paper": claim.paper, "ours": None, "interval": None, "n": 0,
        "verdict": "not run", "reason": "", "p": None, "p_adjusted": None, "robustness": None, "text": "",
    }  # fmt: skip
    if claim.kind not in KINDS:
        raise UserError(
            f"claim {claim.id}: unknown kind {claim.kind!r}{nearest(claim.kind, KINDS)}; known: {', '.join(KINDS)}"
        )
    return found | KINDS[claim.kind](claim, rows)


def _order(claim: Claim, rows: Rows) -> dict[str, Any]:
    return _comparison(claim, rows, _judge_order)


def _judge_order(claim: Claim, rows: Rows, differences: np.ndarray, low: float, high: float) -> dict[str, Any]:
    found = {
        "p": statistics.p_value(differences),
        "verdict": "supported" if low > 0 else "opposite" if high < 0 else "inconclusive",
        "robustness": _robustness(claim, rows),
    }
    effect = EFFECTS[claim.unit]
    if found["verdict"] == "supported" and high < effect:
        size = _shown_size(claim)(effect)
        found["reason"] = f"smaller than the smallest effect of interest, a {claim.unit} of {size:.3g}"
    return found


def _null(claim: Claim, rows: Rows) -> dict[str, Any]:
    return _comparison(claim, rows, _judge_null)


def _judge_null(claim: Claim, rows: Rows, differences: np.ndarray, low: float, high: float) -> dict[str, Any]:
    del rows
    effect = EFFECTS[claim.unit]
    p, outside = statistics.equivalence(differences, effect), low > effect or high < -effect
    return {"p": p, "verdict": "supported" if p < ALPHA else "opposite" if outside else "inconclusive"}


def _comparison(claim: Claim, rows: Rows, decide: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Two sides paired by seed: what `decide` says, where there are seeds enough and both sides have converged."""
    differences, arms = _differences(claim, claim.at, rows)
    if not len(differences):
        return {}
    mean, low, high, n = statistics.estimate(differences)
    size = _shown_size(claim)
    found: dict[str, Any] = {"ours": size(mean), "interval": [size(low), size(high)], "n": n}
    found["text"] = _ratio_text(claim, rows, mean, low, high, arms)
    if n < 2:
        return found | {"verdict": "inconclusive", "reason": "one seed"}
    found |= decide(claim, rows, differences, low, high)
    sides = zip((claim.lower, claim.higher), arms, strict=True)
    stuck = [why for side, arm in sides if (why := rows.unconverged(side, claim.at, arm))]
    if stuck:
        return found | {"verdict": "inconclusive", "reason": "not converged: " + "; ".join(stuck)}
    return found


def _shown_size(claim: Claim) -> Callable[[float], float]:
    """What turns a mean difference into the number that is shown: ratios are compared in logs."""
    return math.exp if claim.unit == "ratio" else float


def _differences(claim: Claim, at: dict[str, Any], rows: Rows) -> tuple[np.ndarray, tuple[str | None, str | None]]:
    """log(higher / lower), or higher - lower, paired by seed, and the arms of (lower, higher)."""
    lower, low_arm = rows.side(claim.lower, at, claim.metric)
    higher, high_arm = rows.side(claim.higher, at, claim.metric)
    if isinstance(lower, pd.Series) and isinstance(higher, pd.Series):
        seeds = lower.index.intersection(higher.index)
        lower, higher = lower[seeds], higher[seeds]
    compared = (
        statistics.log_ratio(higher, lower) if claim.unit == "ratio" else np.atleast_1d(np.asarray(higher - lower))
    )
    return compared, (low_arm, high_arm)


def _robustness(claim: Claim, rows: Rows) -> dict[str, int] | None:
    """On how many of the sweep's points the order holds, where both sides ran and the sides do not fix the point.

    Points at which both sides are the same runs, as they read none of the keys that tell the points apart, count once.
    """
    if any(key in rows.swept for side in (claim.lower, claim.higher) for key in side):
        return None
    points = [dict(zip(rows.swept, values, strict=True)) for values in _points(rows)]
    held = tried = 0
    counted: set[frozenset[str]] = set()
    for point in points:
        differences, arms = _differences(claim, point, rows)
        compared = rows.runs(point, arms)
        if len(differences) > 1 and compared not in counted:
            counted.add(compared)
            tried += 1
            passed = not any(
                rows.unconverged(s, point, a) for s, a in zip((claim.lower, claim.higher), arms, strict=True)
            )
            held += passed and statistics.estimate(differences).low > 0
    return {"held": held, "tried": tried} if tried > 1 else None


def _points(rows: Rows) -> list[tuple]:
    return list(rows.last[rows.swept].drop_duplicates().itertuples(index=False, name=None)) if rows.swept else [()]


def _number(claim: Claim, rows: Rows) -> dict[str, Any]:
    values, arm = rows.side(claim.lower, claim.at, claim.metric)
    if not np.size(values):
        return {}
    paper = claim.paper if isinstance(claim.paper, Measured) else None
    value = paper.mean if paper else claim.paper
    if paper:  # the interval is that of our mean on the paper's side of the difference
        difference, low, high, n = statistics.welch(values, *paper)
        mean, low, high, of = value + difference, value + low, value + high, f"differs by {difference:+.3g}"
        text = f"{mean:.4g} against {value:.4g} +- {paper.std:.2g} (n = {paper.n}); {of} [{low - value:+.3g}, {high - value:+.3g}]"
    else:
        mean, low, high, n = statistics.prediction(values)
        text = f"{mean:.3g} [{low:.3g}, {high:.3g}] for one run"
    found = {"ours": mean, "interval": [low, high], "n": n, "text": text, "paper": str(paper) if paper else value}
    if n < 2:
        return found | {"verdict": "inconclusive", "reason": "one seed"}
    if stuck := rows.unconverged(claim.lower, claim.at, arm):
        return found | {"verdict": "inconclusive", "reason": f"not converged: {stuck}"}
    inside = low <= value <= high
    wide = (high - low) / 2 > 0.5 * abs(value)
    if inside and claim.comparability in ("stand_in", "scaled"):
        return found | {
            "verdict": "inconclusive",
            "reason": f"agrees, but on a {claim.comparability.replace('_', ' ')} setting",
        }
    return found | {
        "verdict": "reproduced" if inside else "not reproduced",
        "reason": "underpowered: the interval is wider than half the value" if inside and wide else "",
    }


def _beside(claim: Claim, rows: Rows) -> dict[str, Any]:
    values, _ = rows.side(claim.lower, claim.at, claim.metric)
    if not np.size(values):
        return {}
    mean, low, high, n = statistics.estimate(np.asarray(values))
    return {
        "ours": mean, "interval": [low, high], "n": n, "verdict": "not comparable",
        "reason": "the paper does not state its scale", "text": f"{mean:.3g} [{low:.3g}, {high:.3g}]",
    }  # fmt: skip


def _ratio_text(
    claim: Claim, rows: Rows, mean: float, low: float, high: float, arms: tuple[str | None, str | None]
) -> str:
    """Both sides and their ratio, for the table of verdicts."""
    parts = []
    for side, arm in zip((claim.lower, claim.higher), arms, strict=True):
        values, _ = rows.side(side, claim.at, claim.metric)
        words = "" if arm is None else f"{arm} "
        words += " ".join(f"{k}={shown(v)} " for k, v in side.items() if k not in ("arm", "metric", "value"))
        parts.append(f"{words}{float(np.mean(values)):{'.3g' if claim.unit == 'ratio' else '.4f'}}")
    if claim.unit != "ratio":
        return f"{parts[0]} against {parts[1]}; difference {mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    return f"{parts[0]} against {parts[1]}; ratio {math.exp(mean):.3g} [{math.exp(low):.3g}, {math.exp(high):.3g}]"


def to_json(found: list[dict[str, Any]]) -> str:
    """claims.json; NaN becomes null."""

    def clean(value):
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(v) for v in value]
        if isinstance(value, np.generic):
            value = value.item()
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(clean(found), indent=1) + "\n"


#: kind -> what judges a claim of it, as changes to its record. A user's file adds to it.
KINDS: dict[str, Callable[[Claim, Rows], dict[str, Any]]] = {
    "order": _order,
    "null": _null,
    "number": _number,
    "beside": _beside,
}
