"""The kind of claim `power`: a metric goes by a power of a number.

The power is the slope of the logarithm of the metric's mean over seeds against the logarithm of the number, by least
squares. Its interval is a bootstrap over seeds, with the same seeds at every number: 1,000 samples of a seed are the
first of its 10,000.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from routed.analysis import digits, statistics
from routed.analysis.claims import OneSide, Point, Side, Stakes
from routed.analysis.claims.rules import inconclusive, verdict_within
from routed.analysis.paired_values import Rows
from routed.papers.draws import FEW, SEEDS, all_then_resampled, estimate_of_draws, fitted_slope, p_beyond

#: Largest difference of powers that count as equal.
MARGIN = 0.1


class PowerFit(NamedTuple):
    """A fitted power."""

    slope: statistics.Estimate  # the power with its interval
    slopes: np.ndarray  # of all seeds, then of each draw of seeds
    height: float  # logarithm of the fitted line at 1
    used: int  # runs
    left_out: int


@dataclasses.dataclass(frozen=True)
class Power(OneSide):
    """The metric of the side goes by the paper's power of a number.

    `points` holds the numbers, each with the settings that the side has there.

    Entries of a point beyond these two are not read.
    """

    kind = "power"
    of_number = True

    points: tuple[tuple[Any, ...], ...]

    def reads(self) -> list[tuple[Side, Point]]:
        """Returns the side with its settings at every number."""
        return [({**self.side, **changes}, self.setup.at) for _, changes, *_ in self.points]

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns the side at every number; it is competent at the largest."""
        reads = tuple(self.reads())
        largest = max(range(len(reads)), key=lambda index: self.points[index][0])
        return Stakes(reads, reads, ((reads[largest],),))

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the fitted power: supported if its interval is within MARGIN of the paper's, opposite if outside."""
        columns: dict[float, pd.Series] = {}
        for (number, *_), (side, at) in zip(self.points, self.reads(), strict=True):
            runs = rows.runs(side, at, side["arm"])
            name = side.get("metric", self.setup.metric)
            if not len(runs) or name not in runs or runs[name].isna().all():
                return {}  # `absent` and `all_diverged` say which number lacks its runs
            columns[number] = runs.set_index("seed")[name]
        fit = fitted(pd.DataFrame(columns))
        if fit is None:
            return inconclusive({"n": max(map(len, columns.values()))}, "fewer than two seeds or numbers")
        mean, low, high, _ = fit.slope
        n = int(min(runs.notna().sum() for runs in columns.values()))  # else each number might have other seeds
        record: dict[str, Any] = {"ours": mean, "interval": [low, high], "n": n}
        record["text"] = f"power {digits.with_interval((mean, low, high))} of {fit.used} runs, {fit.left_out} left out"
        if n < SEEDS:
            return inconclusive(record, FEW)
        limits = self.paper - MARGIN, self.paper + MARGIN
        verdict = verdict_within(fit.slope, *limits)
        where = {"supported": "lies", "opposite": "lies outside of what is"}.get(verdict, "does not lie")
        reason = f"the interval {where} within {MARGIN:g} of {self.paper:g}"
        beyond = [p_beyond(fit.slopes, limit, n) for limit in limits]
        p = max(beyond) if limits[0] < mean < limits[1] else beyond[int(mean > self.paper)]
        return record | {"verdict": verdict, "reason": reason, "p": p}


def fitted(table: pd.DataFrame) -> PowerFit | None:
    """Returns the power of a table [seeds, numbers] with NaN for failed runs; None for fewer than two of either."""
    heights = table.to_numpy(float)
    numbers, finite = np.log(table.columns.to_numpy(float)), np.isfinite(heights)
    if min(heights.shape) < 2 or finite.any(0).sum() < 2:
        return None
    draws = _log_means(heights[all_then_resampled(len(heights))])
    slopes = np.array([fitted_slope(numbers, draw) for draw in draws])
    slope = estimate_of_draws(slopes, len(heights))
    means = _log_means(heights[None])[0]
    height = float((means - slope.mean * numbers)[np.isfinite(means)].mean())
    return PowerFit(slope, slopes, height, int(finite.sum()), int((~finite).sum()))


def _log_means(draws: Float[np.ndarray, "D seeds numbers"]) -> Float[np.ndarray, "D numbers"]:
    """Returns logarithms of means over seeds, of finite values; NaN if the mean is undefined or not positive."""
    finite = np.isfinite(draws)
    count = finite.sum(1)
    total = np.where(finite, draws, 0.0).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((count > 0) & (total > 0), np.log(total / count), np.nan)
