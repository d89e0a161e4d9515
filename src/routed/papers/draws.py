"""Intervals from seeds that are drawn with replacement, for quantities that are no mean: places, ratios, slopes."""

from __future__ import annotations

import numpy as np
import scipy
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


def p_beyond(draws: Float[np.ndarray, " D"], limit: float, n: int) -> float:
    """Returns the two-sided p value that the true value of n seeds lies beyond a limit, seen from the first draw.

    It is the larger of two: twice the share of draws at or beyond the limit, at least one draw's, and that of a t test
    with the draws' standard deviation, since few seeds tell shares in the tail no better than normal draws would.
    Undefined draws are left out; 1 without two that are defined.
    """
    value, defined = draws[0], draws[1:][np.isfinite(draws[1:])]
    if not np.isfinite(value) or len(defined) < 2:
        return 1.0
    beyond = defined <= limit if value > limit else defined >= limit
    share = min(1.0, max(2 * float(beyond.mean()), 1 / len(defined)))
    error = float(defined.std()) * np.sqrt(n / (n - 1))
    t = abs(value - limit) / error if error else np.inf * abs(np.sign(value - limit) or np.nan)
    return share if np.isnan(t) else max(share, float(2 * scipy.special.stdtr(n - 1, -t)))


def fitted_slope(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the least-squares slope through the points with a finite y; NaN of fewer than two."""
    finite = np.isfinite(y)
    return float(np.polyfit(x[finite], y[finite], 1)[0]) if finite.sum() > 1 else np.nan
