"""Intervals from seeds that are drawn with replacement, for quantities that are no mean: places, ratios, slopes."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from routed.analysis import statistics

#: Draws of an interval.
DRAWS = 2000
#: Seeds from which on an interval of draws means something: with fewer, single seeds are its ends.
SEEDS = 5
#: Reason of a verdict that rests on fewer seeds.
FEW = f"fewer than {SEEDS} seeds: draws of them tell no interval"


def resampled(count: int) -> Int[np.ndarray, "D count"]:
    """Returns indices of `count` items drawn with replacement, a draw a row."""
    return np.random.default_rng(0).integers(count, size=(DRAWS, count))


def all_then_resampled(count: int) -> Int[np.ndarray, "D count"]:
    """Returns all indices as the first row, then `resampled` ones."""
    return np.vstack([np.arange(count), resampled(count)])


def estimate_of_draws(draws: Float[np.ndarray, " D"], n: int) -> statistics.Estimate:
    """Returns the first draw, which is of all seeds, with the 95 % percentile interval of the other draws.

    Infinite draws count, undefined ones are left out.
    """
    defined = draws[1:][~np.isnan(draws[1:])]
    if n < 2 or not len(defined):
        return statistics.Estimate(float(draws[0]), np.nan, np.nan, n)
    least, most = statistics.percentiles(n)
    low, high = np.quantile(defined, least, method="lower"), np.quantile(defined, most, method="higher")
    return statistics.Estimate(float(draws[0]), float(low), float(high), n)


def fitted_slope(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the least-squares slope through the points with a finite y; NaN of fewer than two."""
    finite = np.isfinite(y)
    return float(np.polyfit(x[finite], y[finite], 1)[0]) if finite.sum() > 1 else np.nan
