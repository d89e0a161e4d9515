"""The kind of claim `prediction`: gaps that were written down before they were measured, with a score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from routed.analysis import digits, statistics
from routed.analysis.bootstrap import SEEDS, all_then_resampled, estimate_of_draws
from routed.analysis.claims import Point, Side, Stakes, TwoSides
from routed.analysis.claims.rules import inconclusive, verdict_within
from routed.analysis.claims.weaknesses import incompetent
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

#: Scores that are shares of points: their intervals are Wilson's, which have a width where all points agree.
SHARES = ("signs", "coverage")

#: Numbers of largest gaps without which R^2 is told too, since few large gaps can carry it.
WITHOUT = (1, 2, 4, 5)


class Preregistered(NamedTuple):
    """Gaps log(higher / lower) that were written down before they were measured, and the score that they have to reach.

    points: swept keys with their values, and the expected gap with the ends of its interval.
    """

    points: tuple[tuple[Point, tuple[float, float, float]], ...]
    score: str  # a key of `SCORES`
    least: float
    most: float
    floor: float = 0.0  # losses below it count as this


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

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns both sides at every point; points without a competent side are left out by turns, in `judge`."""
        reads = tuple(self.reads())
        return Stakes(reads, reads, ())

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the score: supported if its interval lies in the range that was asked for, opposite if outside."""
        points, score, least, most, _ = self.foretold
        measured = [gap for at, _ in points if (gap := self.gap_at(rows, at)) is not None]
        if not measured:
            return {}
        if len(measured) < len(points):
            reason = f"{len(measured)} of {len(points)} points that were foretold have run"
            return inconclusive({"n": len(measured)}, reason)
        gaps, expected = np.array([gap.mean for gap in measured]), np.array([gap for _, gap in points])
        estimate = scored(score, gaps, expected)
        ours, low, high, n = estimate
        beside = _without_largest(gaps, expected) if score == "r2" else _by_certainty(score, measured, expected)
        record: dict[str, Any] = {"ours": ours, "interval": [low, high], "n": n}
        record["text"] = f"{score} {digits.with_interval(estimate[:3])} over {n} points; {beside}"
        if n < SEEDS:
            return inconclusive(record, f"fewer than {SEEDS} points")
        verdict = verdict_within(estimate, least, most)
        record["alike"] = all(gap.low == gap.high for gap in measured)
        reason = "" if verdict == "supported" else f"asked for an interval within {least:g} to {most:g}"
        return record | {"verdict": verdict, "reason": reason} | self._among_competent(rows, verdict, gaps, expected)

    def _among_competent(self, rows: Rows, verdict: str, gaps: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
        """Returns changes to the record: a verdict that points without a competent side turn is none."""
        points, score, least, most, _ = self.foretold
        metric = self.setup.metric
        good = []
        for at, _ in points:
            readings = tuple((side, {**self.setup.at, **at}) for side in self.sides())
            good.append(incompetent(readings, metric, rows) is None)
        if all(good) or verdict == "inconclusive":
            return {}
        left = int(sum(good))
        without = verdict_within(scored(score, gaps[good], expected[good]), least, most) if left >= SEEDS else ""
        if without == verdict:
            return {}
        count = f"at {len(good) - left} of {len(good)} points no side beats the best constant"
        return inconclusive({}, f"{verdict}, but not competent: {count}, and without these it is {without or 'open'}")

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


def scored(score: str, gaps: Float[np.ndarray, " N"], expected: Float[np.ndarray, "N 3"]) -> statistics.Estimate:
    """Returns a score of SCORES with its 95 % interval: Wilson's of SHARES, else a bootstrap that draws points."""
    n = len(gaps)
    if score in SHARES:
        return statistics.proportion(np.repeat([1.0, 0.0], _counts(SCORES[score](gaps, expected), n)))
    draws = all_then_resampled(n)
    return estimate_of_draws(SCORES[score](gaps[draws], expected[draws]), n)


def _counts(share: Any, n: int) -> tuple[int, int]:
    """Returns the numbers of points that a share of n points counts, and that it does not count."""
    hits = round(float(share) * n)
    return hits, n - hits


def _without_largest(gaps: Float[np.ndarray, " N"], expected: Float[np.ndarray, "N 3"]) -> str:
    """Returns the text of R^2 without the largest gaps: that many points are left out, by their size."""
    order = np.argsort(-np.abs(gaps))
    numbers = [count for count in WITHOUT if len(gaps) - count > 1]
    texts = [f"{float(r2(gaps[order[count:]], expected[order[count:]])):.2g}" for count in numbers]
    return f"without the {', '.join(map(str, numbers))} largest gaps {', '.join(texts)}"


def _by_certainty(score: str, measured: list[statistics.Estimate], expected: Float[np.ndarray, "N 3"]) -> str:
    """Returns the text of a share among points whose measured sign is told from 0, and among the rest."""
    gaps = np.array([gap.mean for gap in measured])
    certain = np.array([gap.low > 0 or gap.high < 0 for gap in measured])
    texts = []
    for label, chosen in (("whose sign is told from 0", certain), ("of the rest", ~certain)):
        count = int(chosen.sum())
        hits, _ = _counts(SCORES[score](gaps[chosen], expected[chosen]) if count else 0.0, count)
        texts.append(f"{hits} of {count} {label}")
    usual = max(int((gaps > 0).sum()), int((gaps <= 0).sum()))
    return ", ".join(texts) + (f" (always the commoner sign: {usual} of {len(gaps)})" if score == "signs" else "")
