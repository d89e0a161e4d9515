"""Rules of verdicts that several kinds of claims share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from routed.analysis import digits, statistics
from routed.analysis.claims.claim import Claim
from routed.analysis.paired_values import Rows

#: Reason of a verdict that rests on one seed.
ONE_SEED = "one seed"
#: Reason why a metric that was recorded once has no verdict.
UNKNOWN_TAIL = "one evaluation in the second half of training, so nobody knows whether it still moves: lower eval_every"


def inconclusive(record: dict[str, Any], reason: str) -> dict[str, Any]:
    """Returns the record with the verdict "inconclusive" and its reason."""
    return record | {"verdict": "inconclusive", "reason": reason}


def verdict_of(interval: statistics.Estimate, threshold: float = 0.0) -> str:
    """Returns "supported" if the interval lies above the threshold, "opposite" if below, else "inconclusive"."""
    return "supported" if interval.low > threshold else "opposite" if interval.high < threshold else "inconclusive"


def verdict_within(interval: statistics.Estimate, least: float, most: float) -> str:
    """Returns "supported" if the interval lies inside of a range, "opposite" if outside, else "inconclusive"."""
    if least <= interval.low and interval.high <= most:
        return "supported"
    return "opposite" if interval.high < least or most < interval.low else "inconclusive"


def absent(claim: Claim, rows: Rows) -> str:
    """Names an arm or a point that did not run, or an arm without the claim's metric; or returns "" (an empty text)."""
    for side, at in claim.reads():
        if "value" not in side and (reason := rows.absent(side, at)):
            return reason
        metric = side.get("metric", claim.setup.metric)
        for arm in rows.arms(side, at):
            if not len(rows.history(side, at, metric, arm)):
                return f"{arm} ran, and has no {metric} there"
    return ""


def displayed(unit: str) -> Callable[[float], float]:
    """Returns the function from a mean difference to the number that is shown: ratios are compared in logarithms."""
    return _exp if unit == "ratio" else float


def _exp(value: float) -> float:
    """Returns e^value, infinity where that is larger than any number: math.exp raises an error there."""
    return math.exp(value) if value < 700 else math.inf


def effect_text(unit: str, interval: statistics.Estimate) -> str:
    """Returns an effect and its interval as text."""
    if unit == "ratio":
        return f"ratio {digits.with_interval(map(_exp, interval[:3]))}"
    return f"difference {digits.with_interval(interval[:3], sign='+')}"
