"""Intervals and tests over seeds, by scipy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy  # whose parts load at their first use
from numpy.typing import ArrayLike

from routed.contracts import Bounds, Column, column_of

LEVEL = 0.95

#: Smallest loss or ratio in logarithms: lower values count as this.
TINY = 1e-12


class Estimate(NamedTuple):
    """A mean with its 95 % interval over n seeds; NaN ends when n < 2."""

    mean: float
    low: float
    high: float
    n: int


def estimate(values: ArrayLike, level: float = LEVEL, bounds: Bounds = (None, None)) -> Estimate:
    """Returns the mean of independent values with its t interval (95 %), mean -+ t s / sqrt(n), kept in the bounds."""
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Estimate(float(values.mean()) if n else np.nan, np.nan, np.nan, n)
    half = half_width(values.std(ddof=1), n, level)
    low, high = bounded_interval(values.mean(), half, *bounds)
    return Estimate(float(values.mean()), float(low), float(high), n)


def bounded_interval(mean, half, low: float | None = None, high: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of mean -+ half for quantities that cannot leave [low, high].

    They are the ends of an interval of the mean's logit or logarithm. Numbers, or arrays of one shape. The mean m is
    put on a scale without bounds, g(m) = log((m - low) / (high - m)), log(m - low) or -log(high - m), on which its
    half-width is half g'(m) (delta method), and the ends are transformed back. g is undefined for a mean at or beyond a
    bound (an average of zeros, a chance-corrected score): there the interval is mean -+ half, cut at the bounds.
    """
    mean, half = np.asarray(mean, float), np.asarray(half, float)
    above, below = (np.inf if end is None else sign * (mean - end) for end, sign in ((low, 1), (high, -1)))
    inside = (above > 0) & (below > 0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if low is not None and high is not None:
            scale = np.log(above / below)
            step = half * (high - low) / (above * below)
            ends = [low + (high - low) / (1 + np.exp(-(scale + sign * step))) for sign in (-1, 1)]
        elif low is not None:
            ends = [low + above * np.exp(sign * half / above) for sign in (-1, 1)]
        elif high is not None:
            ends = [high - below * np.exp(-sign * half / below) for sign in (-1, 1)]
        else:
            return np.asarray(mean - half), np.asarray(mean + half)
    cut = np.clip(mean - half, low, high), np.clip(mean + half, low, high)
    return np.where(inside, ends[0], cut[0]), np.where(inside, ends[1], cut[1])


def half_width(std, n, level: float = LEVEL):
    """Returns half of the t interval (95 %) of a mean of n values, t s / sqrt(n); NaN for fewer than two."""
    return scipy.special.stdtrit(n - 1, (1 + level) / 2) * std / np.sqrt(n)


def proportion(outcomes: ArrayLike) -> Estimate:
    """Returns the share of outcomes that are 1 with its 95 % interval (Wilson 1927), which always has a width."""
    outcomes = np.asarray(outcomes, float)
    if not len(outcomes):
        return estimate([])
    interval = scipy.stats.binomtest(int(outcomes.sum()), len(outcomes)).proportion_ci(LEVEL, method="wilson")
    return Estimate(float(outcomes.mean()), float(interval.low), float(interval.high), len(outcomes))


def log_ratio(higher, lower) -> np.ndarray:
    """Returns log(higher / lower), elementwise and paired; either may be a constant."""
    return np.atleast_1d(np.log(np.maximum(higher, TINY)) - np.log(np.maximum(lower, TINY))).astype(float)


def p_value(differences) -> float:
    """Returns the two-sided p value of a t test that the mean is 0: 1 for fewer than two, 0 or 1 without spread."""
    return min(2 * min(_one_sided(differences, "greater"), _one_sided(differences, "less")), 1.0)


def _equal(values: np.ndarray) -> bool:
    """True if the values are equal up to rounding: a t test on such values divides by noise."""
    return bool(np.isfinite(values).all() and np.ptp(values) <= 1e-9 * np.abs(values).max())


def intersection_union_p(below: ArrayLike, above: ArrayLike) -> float:
    """Returns the p value of "one mean is below 0, another above": twice the larger of two one-sided p values."""
    return min(1.0, 2 * max(_one_sided(below, "less"), _one_sided(above, "greater")))


class Least(NamedTuple):
    """The comparison with the smallest mean, the interval of the smallest true mean, and a p value against 0."""

    name: str
    estimate: Estimate
    p: float


def versus_best(differences: Mapping[str, ArrayLike]) -> Least:
    """Returns the least of several mean differences.

    A claim against the best of m controls is a claim against each of them. Its lower end is the least lower end
    (intersection-union test: the true least is among them, so no correction is due). Its upper end is the least of
    upper ends at level 1 - .025 / m, since each of m chances could give it (Bonferroni's bound of max-t). The p value
    is twice the smaller of the two tests'. For a single control: `estimate` and `p_value`.
    """
    estimates = {name: estimate(values) for name, values in differences.items()}
    least = min(estimates, key=lambda name: estimates[name].mean)
    corrected = [estimate(values, 1 - (1 - LEVEL) / len(estimates)) for values in differences.values()]
    low = float(np.min([each.low for each in estimates.values()]))  # NaN if a control has a single seed
    high = min((each.high for each in corrected if not np.isnan(each.high)), default=np.nan)
    above = max(_one_sided(values, "greater") for values in differences.values())
    below = len(estimates) * min(_one_sided(values, "less") for values in differences.values())
    interval = estimates[least]._replace(low=low, high=high)
    return Least(least, interval, min(1.0, 2 * min(above, below)))


def _one_sided(values: ArrayLike, alternative: str) -> float:
    """Returns the p value of the one-sample t test that the mean is 0, against one side."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return 1.0
    if _equal(values):
        return float(not (values[0] > 0 if alternative == "greater" else values[0] < 0))
    t = values.mean() / (values.std(ddof=1) / math.sqrt(len(values)))
    return float(scipy.special.stdtr(len(values) - 1, -t if alternative == "greater" else t))


def adjusted(p_values: Sequence[float]) -> np.ndarray:
    """Returns p values of a family, adjusted for the chance of any false rejection in it (Holm 1979).

    They are not adjusted for the false discovery rate: many sure claims would then leave room for doubtful ones.
    """
    values = np.asarray(p_values, float)
    order = np.argsort(values, kind="stable")
    steps = values[order] * (len(values) - np.arange(len(values)))
    larger = np.empty_like(steps)
    larger[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return larger


def extrapolate(steps: np.ndarray, values: np.ndarray, horizon: float) -> np.ndarray:
    """Returns values [evaluations, runs] extrapolated to `horizon` times the last step; NaN with a short tail.

    The tail is the second half of training and needs two evaluations. A line through it against log steps goes on from
    the last value: exact for the logarithm of a power law, and too far, so on the safe side, for curves that settle.
    """
    tail = (steps >= steps[-1] / 2) & (steps > 0)
    if horizon == 1:
        return values[-1]
    if tail.sum() < 2:
        return np.full(values.shape[1], np.nan)
    x = np.log(steps[tail]) - np.log(steps[tail]).mean()
    slope = x @ values[tail] / (x @ x)
    return values[-1] + slope * math.log(horizon)


def prediction(values) -> Estimate:
    """Returns the mean with a 95 % prediction interval for one further run: mean -+ t s sqrt(1 + 1/n)."""
    mean, _, high, n = estimate(values)
    half = (high - mean) * math.sqrt(n + 1)
    return Estimate(mean, mean - half, mean + half, n)


def welch(values, mean: float, std: float, n: int) -> Estimate:
    """Returns the difference of our mean from a paper's with known standard deviation and n (Welch 1947).

    The standard deviation is that of the sample (n - 1). The interval holds 0 if Welch's test does not reject at 5 %.
    """
    values = np.asarray(values, float)
    difference = float(values.mean() - mean)
    if len(values) < 2:
        return Estimate(difference, np.nan, np.nan, len(values))
    ours, theirs = values.var(ddof=1) / len(values), std**2 / n
    error = ours + theirs
    if not error:
        return Estimate(difference, difference, difference, len(values))
    freedom = error**2 / (ours**2 / (len(values) - 1) + theirs**2 / (n - 1))
    half = scipy.stats.t.ppf((1 + LEVEL) / 2, freedom) * math.sqrt(error)
    return Estimate(difference, difference - half, difference + half, len(values))


def equivalence(differences, margin: float) -> float:
    """Returns the p value of the two one-sided tests that the mean difference lies in (-margin, margin) (TOST)."""
    differences = np.asarray(differences, float)
    return max(_one_sided(differences + margin, "greater"), _one_sided(differences - margin, "less"))


def percentiles(n: int) -> tuple[float, float]:
    """Returns levels that make a 95 % percentile interval over n values as wide as a t interval (Hesterberg 2015).

    The levels .025 and .975 give intervals that are too short by sqrt((n - 1) / n) and by t against the normal. The
    lower level is .0086 for n = 10.
    """
    tail = float(scipy.special.ndtr(-scipy.special.stdtrit(n - 1, (1 + LEVEL) / 2) * math.sqrt(n / (n - 1))))
    return tail, 1 - tail


def bootstrap_ratio(part: np.ndarray, whole: np.ndarray) -> Estimate:
    """Returns mean(part) / mean(whole) over seeds, with a 95 % bootstrap interval that draws seeds (`percentiles`).

    Fewer than five seeds have Fieller's interval, since the ends of their draws are single seeds.
    """
    ratio = float(part.mean() / whole.mean())
    if len(part) < 3:
        return Estimate(ratio, np.nan, np.nan, len(part))
    if len(part) < 5:
        return Estimate(ratio, *fieller(part, whole), len(part))
    interval = scipy.stats.bootstrap(
        (part, whole),
        lambda a, b, axis: a.mean(axis) / b.mean(axis),
        paired=True,
        vectorized=True,
        n_resamples=2000,
        confidence_level=1 - 2 * percentiles(len(part))[0],
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(ratio, float(interval.low), float(interval.high), len(part))


def fieller(part: np.ndarray, whole: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % interval of a ratio of two paired means (Fieller 1954), unbounded where the whole may be 0.

    It holds each r for which a t test does not tell mean(part - r whole) from 0.
    """
    n, (a, b) = len(part), (part.mean(), whole.mean())
    (v11, v12), (_, v22) = np.cov(part, whole) * scipy.special.stdtrit(n - 1, (1 + LEVEL) / 2) ** 2 / n
    if b**2 <= v22:
        return -np.inf, np.inf
    root = math.sqrt(max((a * b - v12) ** 2 - (b**2 - v22) * (a**2 - v11), 0.0))
    return float((a * b - v12 - root) / (b**2 - v22)), float((a * b - v12 + root) / (b**2 - v22))


def outside_margin_p(differences: ArrayLike, margin: float) -> float:
    """Returns the two-sided p value that the mean lies outside of [-margin, margin], by the test of the nearer end."""
    differences = np.asarray(differences, float)
    return min(1.0, 2 * min(_one_sided(differences - margin, "greater"), _one_sided(differences + margin, "less")))


def summarise(last: pd.DataFrame, swept: list[str], columns: Mapping[str, Column] = {}) -> pd.DataFrame:
    """Returns a row for each point, arm and metric with its 95 % interval; diverged runs are counted, not averaged.

    Intervals stay in the bounds of `columns`.
    """
    metrics = [column for column in last.columns if "/" in column]
    keys = [last[key] for key in (*swept, "arm")]
    good = last.status == "ok"
    # Values of diverged runs are masked and not left out, so that both tables have the same groups.
    groups = last[metrics].where(good).groupby(keys, dropna=False, sort=True)
    mean, std, n = groups.mean(), groups.std(), groups.count()
    diverged = (~good).groupby(keys, dropna=False, sort=True).sum()
    ends = [bounded_interval(mean[name], half_width(std[name], n[name]), *bounds_of(name, columns)) for name in metrics]
    low, high = (np.stack(side, 1) if metrics else np.empty((len(mean), 0)) for side in zip(*ends, strict=True))
    table = mean.index.to_frame(index=False).loc[np.repeat(np.arange(len(mean)), len(metrics))].reset_index(drop=True)
    table["metric"] = np.tile(metrics, len(mean))
    for name, values in {"mean": mean, "std": std, "low": low, "high": high, "n": n}.items():
        table[name] = np.asarray(values).ravel()
    table["diverged"] = np.repeat(diverged.to_numpy(), len(metrics))
    return table[table.n > 0].reset_index(drop=True)


def bounds_of(metric: str, columns: Mapping[str, Column]) -> Bounds:
    """Returns the bounds of a metric's column."""
    column = column_of(metric, columns)
    return column.bounds if column else (None, None)
