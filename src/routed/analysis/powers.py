"""The power of a number by which a metric goes: the kind of claim `power`, and the figure beside it.

The slope of the logarithm of a metric's mean over seeds against the logarithm of the number, by least squares; its interval is a bootstrap's
over seeds, the same seeds at every number, as 1,000 samples of a seed are the first of its 10,000.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from routed.analysis import digits, statistics
from routed.analysis.claims import Claim
from routed.analysis.reach import FEW, SEEDS, drawn, estimate, fitted_slope
from routed.analysis.sides import Rows

#: Powers that differ by less are taken for equal.
MARGIN = 0.1


class Power(NamedTuple):
    """The slope with its interval, the height of the fitted line at 1 (in logarithms), and the runs that are in it and out of it."""

    slope: statistics.Estimate
    height: float
    used: int
    left_out: int


def fitted(table: pd.DataFrame) -> Power | None:
    """The power of a table [seeds, numbers], NaN where a run says nothing; None of fewer than two numbers."""
    heights = table.to_numpy(float)
    places, known = np.log(table.columns.to_numpy(float)), np.isfinite(heights)
    if min(heights.shape) < 2 or known.any(0).sum() < 2:
        return None
    slopes = np.array([fitted_slope(places, row) for row in _means(heights[drawn(len(heights))])])
    found = estimate(slopes, len(heights))
    means = _means(heights[None])[0]
    height = float((means - found.mean * places)[np.isfinite(means)].mean())
    return Power(found, height, int(known.sum()), int((~known).sum()))


def _means(draws: Float[np.ndarray, "B seeds numbers"]) -> Float[np.ndarray, "B numbers"]:
    """Logarithms of the means over seeds of what is known and positive; NaN where nothing is."""
    known = np.isfinite(draws)
    count = known.sum(1)
    total = np.where(known, draws, 0.0).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((count > 0) & (total > 0), np.log(total / count), np.nan)


def power(claim: Claim, rows: Rows) -> dict[str, Any]:
    """Supported where the slope's interval lies within MARGIN of the paper's power, opposite where it lies outside of that."""
    ends: dict[float, pd.Series] = {}
    for number, changes, _ in claim.slope:
        side = {**claim.lower, **changes}
        runs = rows.runs(side, claim.at, side["arm"])
        name = side.get("metric", claim.metric)
        if len(runs) and name in runs:
            ends[number] = runs.set_index("seed")[name]
    if not ends:
        return {}
    found = fitted(pd.DataFrame(ends))
    if found is None:
        return {
            "n": max(map(len, ends.values())),
            "verdict": "inconclusive",
            "reason": "fewer than two seeds or numbers",
        }
    mean, low, high, n = found.slope
    record: dict[str, Any] = {"ours": mean, "interval": [low, high], "n": n}
    record["text"] = f"power {digits.with_interval((mean, low, high))} of {found.used} runs, {found.left_out} left out"
    if n < SEEDS:
        return record | {"verdict": "inconclusive", "reason": FEW}
    least, most = claim.paper - MARGIN, claim.paper + MARGIN
    verdict = (
        "supported" if least < low and high < most else "opposite" if high < least or most < low else "inconclusive"
    )
    where = {"supported": "lies", "opposite": "lies outside of what is"}.get(verdict, "does not lie")
    return record | {"verdict": verdict, "reason": f"the interval {where} within {MARGIN:g} of {claim.paper:g}"}
