"""The kind of claim `prediction`: gaps that were written down before they were measured, with a score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from routed.analysis import statistics
from routed.analysis.bootstrap import resampled
from routed.analysis.claims import Point, Side, TwoSides
from routed.analysis.claims.rules import inconclusive
from routed.analysis.paired_values import Rows, paired

#: Function of measured gaps [..., N] and of expected gaps with the ends of their intervals [..., N, 3] to a score
#: [...].
Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


def r2(gaps: Float[np.ndarray, "*B N"], expected: Float[np.ndarray, "*B N 3"]) -> Float[np.ndarray, "*B"]:
    """Returns the explained variance, 1 - sum (gap - expected)^2 / sum (gap - average gap)^2."""
    spread = ((gaps - gaps.mean(-1, keepdims=True)) ** 2).sum(-1)
    return np.asarray(1 - ((gaps - expected[..., 0]) ** 2).sum(-1) / np.maximum(spread, statistics.TINY))


def signs(gaps: Float[np.ndarray, "*B N"], expected: Float[np.ndarray, "*B N 3"]) -> Float[np.ndarray, "*B"]:
    """Returns the share of points at which both gaps are above 0, or neither is."""
    return np.asarray(((gaps > 0) == (expected[..., 0] > 0)).mean(-1))


def coverage(gaps: Float[np.ndarray, "*B N"], expected: Float[np.ndarray, "*B N 3"]) -> Float[np.ndarray, "*B"]:
    """Returns the share of gaps inside of their intervals, ends included."""
    return np.asarray(((expected[..., 1] <= gaps) & (gaps <= expected[..., 2])).mean(-1))


SCORES: dict[str, Score] = {"r2": r2, "signs": signs, "coverage": coverage}


class Preregistered(NamedTuple):
    """Gaps log(higher / lower) that were written down before they were measured, and the score that they have to reach.

    points: swept keys with their values, and the expected gap with the ends of its interval.
    score: a key of `SCORES`.
    least, most: range of the score.
    floor: losses below it count as this.
    """

    points: tuple[tuple[Point, tuple[float, float, float]], ...]
    score: str
    least: float
    most: float
    floor: float = 0.0


@dataclasses.dataclass(frozen=True)
class Prediction(TwoSides):
    """The gaps between both sides at points of a sweep are as foretold; `higher` may be the fairest control."""

    kind = "prediction"
    allows_fairest = True

    foretold: Preregistered

    def reads(self) -> list[tuple[Side, Point]]:
        """Returns both sides at every point."""
        points = [{**self.setup.at, **at} for at, _ in self.foretold.points]
        return [(side, point) for side in self.sides() for point in points]

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the score: supported if it is in its range, opposite if its whole interval is outside.

        The interval is a percentile bootstrap that draws points.
        """
        points, score, least, most, _ = self.foretold
        measured = [gap for at, _ in points if (gap := self.gap_at(rows, at)) is not None]
        if not measured:
            return {}
        if len(measured) < len(points):
            reason = f"{len(measured)} of {len(points)} points that were foretold have run"
            return inconclusive({"n": len(measured)}, reason)
        gaps, expected = np.array([gap.mean for gap in measured]), np.array([gap for _, gap in points])
        draws = resampled(len(points))
        ours = float(SCORES[score](gaps, expected))
        low, high = map(float, np.quantile(SCORES[score](gaps[draws], expected[draws]), (0.025, 0.975)))
        inside, outside = least <= ours <= most, high < least or low > most
        return {
            "ours": ours,
            "interval": [low, high],
            "n": len(measured),
            "text": f"{score} {ours:.3g} [{low:.3g}, {high:.3g}] over {len(points)} points",
            "verdict": "supported" if inside else "opposite" if outside else "inconclusive",
            "reason": "" if inside else f"asked for: {least:g} to {most:g}",
        }

    def gap_at(self, rows: Rows, at: Point) -> statistics.Estimate | None:
        """Returns the mean of log(higher / lower) at one point, for the least arm of `higher`; None without runs."""
        point, metric = {**self.setup.at, **at}, self.setup.metric
        last = rows.at(point)
        if metric in last:
            last = last.assign(**{metric: last[metric].clip(lower=self.foretold.floor)})
        gaps: dict[str, pd.Series] = {}
        for arm in rows.arms(self.higher, point):
            values = paired(last, arm, self.lower["arm"], metric)
            if len(values):
                gaps[arm] = values
        return statistics.versus_best(gaps).estimate if gaps else None
