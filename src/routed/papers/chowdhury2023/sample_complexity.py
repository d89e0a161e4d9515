"""Kinds of claims about sample complexity: the samples that a side needs to reach a level of a metric.

The number of samples is interpolated on the mean curve over seeds, linearly between logarithms of the swept key.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from routed.analysis import digits
from routed.analysis.claims import Along, Point, Side, Stakes, TwoSides
from routed.analysis.claims.rules import ONE_SEED, inconclusive, verdict_of
from routed.analysis.paired_values import Rows
from routed.analysis.statistics import LEVEL, Estimate
from routed.papers.draws import FEW, SEEDS, all_then_resampled, estimate_of_draws, fitted_slope, p_beyond


@dataclasses.dataclass(frozen=True)
class SampleNeed(TwoSides):
    """`lower` needs a smaller value of the key of `along` than `higher` until its metric reaches `level`.

    Beyond the largest value of the key only a bound is known, so a ratio may be 0 or infinite. It is 1 in a draw of
    seeds in which neither side reaches the level.
    """

    kind = "reach"

    along: Along
    level: float

    def reads(self) -> list[tuple[Side, Point]]:
        """Returns both sides at every value of the key."""
        return [(side, point) for side in self.sides() for point in self.along.points(self.setup.at)]

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns the side that needs fewer samples as the winner, at every value; it is competent at the largest."""
        sides = self.sides() if verdict == "supported" else self.sides()[::-1]
        points = self.along.points(self.setup.at)
        winners, losers = (tuple((side, point) for point in points) for side in sides)
        return Stakes(winners, losers, (winners[-1:],))

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the ratio of samples, lower over higher: supported if its interval is below 1, opposite if above."""
        low, high, n, lost, alike = samples_of(self, rows, (self.setup.at, self.setup.at))
        if not n:
            return {}
        ratio = estimate_of_draws(ratio_of(low, high), n)
        smallest, largest = min(self.along.values), max(self.along.values)
        texts = [
            f"{rows.label(side, other_side, side['arm'])} needs {'at most ' if samples[0] <= smallest else ''}"
            f"{_samples_text(estimate_of_draws(samples, n))}"
            for side, other_side, samples in ((self.lower, self.higher, low), (self.higher, self.lower, high))
        ]
        text = f"{texts[0]}, {texts[1]}; ratio {_samples_text(ratio)}{_lost_text(lost)}"
        record: dict[str, Any] = {"ours": ratio.mean, "interval": [ratio.low, ratio.high], "n": n, "text": text}
        if np.isnan(ratio.mean) or np.isnan(ratio.low):
            return inconclusive(record, "neither side reaches the level" if n > 1 else ONE_SEED)
        if n < SEEDS:
            return inconclusive(record, FEW)
        if isinstance(self.paper, float):
            inside = "inside" if ratio.low <= self.paper <= ratio.high else "outside"
            record["reason"] = f"the paper's {self.paper:g} is {inside} of the interval"
        verdict = "supported" if ratio.high < 1 else "opposite" if ratio.low > 1 else "inconclusive"
        record["alike"] = alike
        # A side that never reaches the level counts as if it did at the largest value: the p value errs towards 1.
        bounded = np.log(np.minimum(low, largest) / np.minimum(high, largest))
        return record | {"verdict": verdict, "p": p_beyond(bounded, 0.0, n)}


@dataclasses.dataclass(frozen=True)
class Exponent(TwoSides):
    """The ratio of samples that both sides need grows with a number; the paper's value is the exponent of its bound.

    `points` holds the numbers, each with the settings that the lower and the higher side have there.
    """

    kind = "exponent"

    along: Along
    level: float
    points: tuple[tuple[float, Point, Point], ...]

    def reads(self) -> list[tuple[Side, Point]]:
        """Returns both sides at every number and every value of the key."""
        return [
            (side, point)
            for _, *changes in self.points
            for side, own_changes in zip(self.sides(), changes, strict=True)
            for point in self.along.points({**self.setup.at, **own_changes})
        ]

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns both sides everywhere; each is competent at the largest value of the key."""
        reads = tuple(self.reads())
        largest = [reading for reading in reads if reading[1][self.along.key] == max(self.along.values)]
        return Stakes(reads, reads, tuple((reading,) for reading in largest))

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the slope of log(ratio of samples) against log(number): supported if its interval lies above 0.

        A level that is not reached in a draw, or already at the smallest value, gives a bound only: its point is left
        out of that draw.
        """
        at = self.setup.at
        samples = [samples_of(self, rows, ({**at, **low}, {**at, **high})) for _, low, high in self.points]
        n = min((seeds for _, _, seeds, *_ in samples), default=0)
        if not n:
            return {}
        smallest = min(self.along.values)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = np.stack(
                [np.where(np.minimum(low, high) > smallest, np.log(high / low), np.nan) for low, high, *_ in samples]
            )  # [points, draws]
        numbers = np.log([number for number, _, _ in self.points])
        slopes = np.array([fitted_slope(numbers, draw) for draw in ratios.T])
        slope = estimate_of_draws(slopes, n)
        texts = ", ".join(
            f"{np.exp(ratio):.3g} at {number:g}" if np.isfinite(ratio) else f"a bound only at {number:g}"
            for (number, _, _), ratio in zip(self.points, ratios[:, 0], strict=True)
        )
        record: dict[str, Any] = {"ours": slope.mean, "interval": [slope.low, slope.high], "n": n}
        lost = max(missing for *_, missing, _ in samples)
        record["text"] = f"exponent {digits.with_interval(slope[:3])}; ratios {texts}{_lost_text(lost)}"
        if np.isnan(slope.mean) or np.isnan(slope.low):
            reason = "fewer than two points at which both sides reach the level, above the smallest value"
            return inconclusive(record, reason)
        if n < SEEDS:
            return inconclusive(record, FEW)
        reason = f"the bound's exponent is {self.paper:g}"
        unreached = float(np.isinf(ratios[:, 1:])[np.isfinite(ratios[:, 0])].any(0).mean())
        if unreached > (1 - LEVEL) / 2:  # of which the slope has no end
            return inconclusive(record, f"in {unreached:.0%} of the draws a side misses the level that all seeds reach")
        record["alike"] = all(each for *_, each in samples)
        return record | {"verdict": verdict_of(slope), "reason": reason, "p": p_beyond(slopes, 0.0, n)}


def samples_of(
    claim: SampleNeed | Exponent, rows: Rows, points: tuple[Point, Point]
) -> tuple[np.ndarray, np.ndarray, int, int, bool]:
    """Returns the samples that both sides need in each draw of their common seeds, numbers of seeds, and if all agree.

    Each side is read at its point. The first number is that of common seeds, the second that of seeds which are left
    out, since one of their runs has no value.
    """
    sides = zip(claim.sides(), points, strict=True)
    lower, higher = (_curves(side, point, claim.setup.metric, claim.along, rows) for side, point in sides)
    seeds = lower.dropna().index.intersection(higher.dropna().index)
    lost = len(lower.index.union(higher.index)) - len(seeds)
    if not len(seeds):
        return np.empty(0), np.empty(0), 0, lost, False
    low, high = (needed(curves.loc[seeds], claim.level) for curves in (lower, higher))
    alike = all(not np.ptp(curves.loc[seeds].to_numpy(), axis=0).any() for curves in (lower, higher))
    return low, high, len(seeds), lost, alike


def _lost_text(lost: int) -> str:
    return f"; {lost} seed{'s' * (lost > 1)} left out, of which a run has no value" if lost else ""


def _curves(side: Side, at: Point, metric: str, along: Along, rows: Rows) -> pd.DataFrame:
    """Returns the metric of a side at the last evaluation: a row for each seed, a column for each value of the key."""
    columns = {
        value: rows.final_values(side, point, metric)
        for value, point in zip(along.values, along.points(at), strict=True)
    }
    return pd.DataFrame(columns, columns=[*along.values])


def needed(table: pd.DataFrame, level: float) -> Float[np.ndarray, " D"]:
    """Returns the samples that mean curves of a table [seeds, samples] need: of all seeds, then of each draw."""
    return first_reached(table.columns.to_numpy(float), table.to_numpy()[all_then_resampled(len(table))].mean(1), level)


def first_reached(
    values: Float[np.ndarray, " V"], curves: Float[np.ndarray, "B V"], level: float
) -> Float[np.ndarray, " B"]:
    """Returns the value at which each curve first reaches the level.

    It is the first value for a curve that begins there, and infinity for a curve that never does.
    """
    above, row = curves >= level, np.arange(len(curves))
    after = np.maximum(above.argmax(1), 1)
    low, high = curves[row, after - 1], curves[row, after]
    fraction = np.divide(level - low, high - low, out=np.zeros(len(curves)), where=high != low)
    fraction = fraction.clip(0, 1)  # of curves that never reach the level it may be anything, and is not used
    logs = np.log(values)
    between = np.exp(logs[after - 1] + (logs[after] - logs[after - 1]) * fraction)
    return np.where(above[:, 0], values[0], np.where(above.any(1), between, np.inf))


def ratio_of(low: Float[np.ndarray, " B"], high: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """Returns low / high of every draw; 1, no evidence, in a draw in which neither side reaches the level."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = low / high
    ratio[1:] = np.where(np.isnan(ratio[1:]), 1.0, ratio[1:])
    return ratio


def _samples_text(samples: Estimate) -> str:
    texts = (f"{value:.3g}" if np.isfinite(value) else "not reached" for value in samples[:3])
    return "{} [{}, {}]".format(*texts)
