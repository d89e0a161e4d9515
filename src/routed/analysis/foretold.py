"""Gaps that were written down before they were measured, and how well they were: the kind of claim `prediction`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from routed.analysis import statistics
from routed.analysis.claims import Claim
from routed.analysis.sides import Rows, paired

#: Times that points are drawn for the interval of a score.
DRAWS = 2000

#: Gaps [..., N] that were measured, and that were expected with the ends of their intervals [..., N, 3]: a score [...].
Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


def r2(gaps: Float[np.ndarray, "*B N"], expected: Float[np.ndarray, "*B N 3"]) -> Float[np.ndarray, "*B"]:
    """Explained variance, 1 - sum (gap - expected)^2 / sum (gap - average gap)^2: 0 for their average, below 0 for worse."""
    spread = ((gaps - gaps.mean(-1, keepdims=True)) ** 2).sum(-1)
    return np.asarray(1 - ((gaps - expected[..., 0]) ** 2).sum(-1) / np.maximum(spread, statistics.TINY))


def signs(gaps: Float[np.ndarray, "*B N"], expected: Float[np.ndarray, "*B N 3"]) -> Float[np.ndarray, "*B"]:
    """The share of points at which both are above 0, or neither is."""
    return np.asarray(((gaps > 0) == (expected[..., 0] > 0)).mean(-1))


def coverage(gaps: Float[np.ndarray, "*B N"], expected: Float[np.ndarray, "*B N 3"]) -> Float[np.ndarray, "*B"]:
    """The share of gaps inside of their intervals, ends included."""
    return np.asarray(((expected[..., 1] <= gaps) & (gaps <= expected[..., 2])).mean(-1))


SCORES: dict[str, Score] = {"r2": r2, "signs": signs, "coverage": coverage}


def prediction(claim: Claim, rows: Rows) -> dict[str, Any]:
    """Supported when the score is in the range asked for, opposite when neither it nor its interval is; all points have to be there.

    The interval is a percentile bootstrap that draws points.
    """
    assert claim.foretold is not None
    points, score, least, most, _ = claim.foretold
    found = {place: gap for place, (at, _) in enumerate(points) if (gap := gap_at(claim, rows, at)) is not None}
    if not found:
        return {}
    record: dict[str, Any] = {"n": len(found), "verdict": "inconclusive"}
    if len(found) < len(points):
        return record | {"reason": f"{len(found)} of {len(points)} points that were foretold have run"}
    gaps, expected = np.array([found[place].mean for place in range(len(points))]), np.array([one for _, one in points])
    drawn = np.random.default_rng(0).integers(len(points), size=(DRAWS, len(points)))
    ours = float(SCORES[score](gaps, expected))
    low, high = map(float, np.quantile(SCORES[score](gaps[drawn], expected[drawn]), (0.025, 0.975)))
    inside, asked = least <= ours <= most, f"asked for: {least:g} to {most:g}"
    certain = high < least or low > most
    return record | {
        "ours": ours, "interval": [low, high], "text": f"{score} {ours:.3g} [{low:.3g}, {high:.3g}] over {len(points)} points",
        "verdict": "supported" if inside else "opposite" if certain else "inconclusive", "reason": "" if inside else asked,
    }  # fmt: skip


def gap_at(claim: Claim, rows: Rows, at: Mapping[str, Any]) -> statistics.Estimate | None:
    """The mean of log(higher / lower) at one point, of the arm of `higher` with the least; None where nothing ran."""
    place, floor = {**claim.at, **at}, claim.foretold.floor if claim.foretold else 0.0
    there = rows.at(place)
    if claim.metric in there:
        there = there.assign(**{claim.metric: there[claim.metric].clip(lower=floor)})
    gaps: dict[str, pd.Series] = {}
    for arm in rows.arms(claim.higher, place):
        values = paired(there, arm, claim.lower["arm"], claim.metric)
        if len(values):
            gaps[arm] = values
    return statistics.least(gaps).estimate if gaps else None
