"""Intervals and tests over seeds. Everything here is scipy applied to what `results` stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import special, stats

from routed.contracts import Bounds, Column

LEVEL = 0.95

#: Losses and ratios below this are treated as this in logarithms.
TINY = 1e-12


class Estimate(NamedTuple):
    """A mean with its 95 % interval over n seeds; NaN ends when n < 2."""

    mean: float
    low: float
    high: float
    n: int


def estimate(values: ArrayLike, level: float = LEVEL, bounds: Bounds = (None, None)) -> Estimate:
    """Mean and t interval (95 %) of independent values: mean -+ t s / sqrt(n), `within` the bounds of what they measure."""
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Estimate(float(values.mean()) if n else np.nan, np.nan, np.nan, n)
    half = half_width(values.std(ddof=1), n, level)
    low, high = within(values.mean(), half, *bounds)
    return Estimate(float(values.mean()), float(low), float(high), n)


def within(mean, half, low: float | None = None, high: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The ends of mean -+ half for quantities that cannot leave [low, high]: the interval of the mean's logit or logarithm.

    Numbers, or arrays of one shape. The mean m is put on a scale without bounds, g(m) = log((m - low) / (high - m)), log(m - low) or
    -log(high - m), on which its half-width is half g'(m) (delta method), and the ends are brought back. A mean at or beyond a bound,
    which g cannot take (an average of zeros, a chance-corrected score), keeps mean -+ half, cut at the bounds.
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
    """Half of the t interval (95 %) of a mean of n values, t s / sqrt(n), elementwise; NaN for fewer than two."""
    return special.stdtrit(n - 1, (1 + level) / 2) * std / np.sqrt(n)


def proportion(outcomes: ArrayLike) -> Estimate:
    """The share of runs whose outcome is 1, others being 0, with its 95 % interval (Wilson 1927): not of no width where all are alike."""
    outcomes = np.asarray(outcomes, float)
    if not len(outcomes):
        return estimate([])
    interval = stats.binomtest(int(outcomes.sum()), len(outcomes)).proportion_ci(LEVEL, method="wilson")
    return Estimate(float(outcomes.mean()), float(interval.low), float(interval.high), len(outcomes))


def log_ratio(higher, lower) -> np.ndarray:
    """log(higher / lower), elementwise and paired; either may be a constant."""
    return np.atleast_1d(np.log(np.maximum(higher, TINY)) - np.log(np.maximum(lower, TINY))).astype(float)


def p_value(differences) -> float:
    """Two-sided one-sample t test that the mean of paired differences is 0; 1 with fewer than 2, 0 or 1 without spread."""
    differences = np.asarray(differences, float)
    if len(differences) < 2:
        return 1.0
    if _equal(differences):
        return float(differences[0] == 0)
    return float(stats.ttest_1samp(differences, 0).pvalue)


def _equal(values: np.ndarray) -> bool:
    """Equal up to rounding: a t test on such values divides by noise."""
    return bool(np.ptp(values) <= 1e-9 * np.abs(values).max())


def both_sides(below: ArrayLike, above: ArrayLike) -> float:
    """P value that one mean is below 0 and another above: twice the larger of two one-sided tests (intersection-union test)."""
    return min(1.0, 2 * max(_one_sided(below, "less"), _one_sided(above, "greater")))


class Least(NamedTuple):
    """The comparison with the smallest mean, the interval of the smallest true mean, and a two-sided p value against 0."""

    name: str
    estimate: Estimate
    p: float


def least(differences: Mapping[str, ArrayLike]) -> Least:
    """The least of several mean differences: a claim against the best of m controls is one against each of them.

    Its lower end is the least lower end (intersection-union test: one of them is the true one's, so no correction is due). Its
    upper end is the least of upper ends at level 1 - .025 / m, as any of m chances would do (Bonferroni's bound of max-t). The
    p value is twice the smaller of the two tests'. Of one control: `estimate` and `p_value`.
    """
    estimates = {name: estimate(values) for name, values in differences.items()}
    chosen = min(estimates, key=lambda name: estimates[name].mean)
    together = [estimate(values, 1 - (1 - LEVEL) / len(estimates)) for values in differences.values()]
    low = float(np.min([one.low for one in estimates.values()]))  # NaN where one control has a single seed
    high = min((one.high for one in together if one.high == one.high), default=np.nan)
    above = max(_one_sided(values, "greater") for values in differences.values())
    below = len(estimates) * min(_one_sided(values, "less") for values in differences.values())
    interval = estimates[chosen]._replace(low=low, high=high)
    return Least(chosen, interval, min(1.0, 2 * min(above, below)))


def _one_sided(values: ArrayLike, alternative: str) -> float:
    """P value of the one-sample t test that the mean is 0, against one side."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return 1.0
    if _equal(values):
        return float(not (values[0] > 0 if alternative == "greater" else values[0] < 0))
    t = values.mean() / (values.std(ddof=1) / math.sqrt(len(values)))
    return float(special.stdtr(len(values) - 1, -t if alternative == "greater" else t))


def adjusted(p_values: Sequence[float]) -> np.ndarray:
    """P values of a family, adjusted for the chance of any false rejection in it (Holm 1979).

    Not for its false discovery rate: many sure claims would then leave room for doubtful ones.
    """
    values = np.asarray(p_values, float)
    order = np.argsort(values, kind="stable")
    steps = values[order] * (len(values) - np.arange(len(values)))
    larger = np.empty_like(steps)
    larger[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return larger


def extrapolate(steps: np.ndarray, values: np.ndarray, horizon: float) -> np.ndarray:
    """Values [evaluations, runs] at `horizon` times the last step; NaN where fewer than two evaluations lie in the tail.

    The tail is the second half of training. A line through it against log steps goes on from the last value: exact for logs
    of a power law, and too far, so on the safe side, for what settles.
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
    """95 % prediction interval for one further run: mean -+ t s sqrt(1 + 1/n)."""
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return estimate(values)
    half = stats.t.ppf((1 + LEVEL) / 2, n - 1) * values.std(ddof=1) * np.sqrt(1 + 1 / n)
    return Estimate(float(values.mean()), float(values.mean() - half), float(values.mean() + half), n)


def welch(values, mean: float, std: float, n: int) -> Estimate:
    """Difference of our mean from another's, which is known by mean, standard deviation and n; 95 % interval of Welch (1947).

    The standard deviation is that of the sample (n - 1). The interval holds 0 where Welch's test does not reject at 5 %.
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
    half = stats.t.ppf((1 + LEVEL) / 2, freedom) * math.sqrt(error)
    return Estimate(difference, difference - half, difference + half, len(values))


def equivalence(differences, margin: float) -> float:
    """P value of the two one-sided tests that the mean difference lies in (-margin, margin) (TOST)."""
    differences = np.asarray(differences, float)
    if len(differences) < 2:
        return 1.0
    if _equal(differences):
        return float(abs(differences[0]) >= margin)
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    return float(max(above, below))


def percentiles(n: int) -> tuple[float, float]:
    """The levels of a bootstrap's percentile interval (95 %) over n values, as far out as a t interval is wide (Hesterberg 2015).

    Plain ones (.025, .975) are too near by sqrt((n - 1) / n) and by t against the normal: .0086 for n = 10.
    """
    tail = float(special.ndtr(-special.stdtrit(n - 1, (1 + LEVEL) / 2) * math.sqrt(n / (n - 1))))
    return tail, 1 - tail


def share(part: np.ndarray, whole: np.ndarray, draws: int = 2000) -> Estimate:
    """mean(part) / mean(whole) over seeds, with a 95 % bootstrap interval (`percentiles`) that draws seeds, not values."""
    ratio = float(part.mean() / whole.mean())
    if len(part) < 3:
        return Estimate(ratio, np.nan, np.nan, len(part))
    interval = stats.bootstrap(
        (part, whole), lambda a, b, axis: a.mean(axis) / b.mean(axis), paired=True, vectorized=True, n_resamples=draws,
        confidence_level=1 - 2 * percentiles(len(part))[0], method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return Estimate(ratio, float(interval.low), float(interval.high), len(part))


def beyond(differences: ArrayLike, margin: float) -> float:
    """Two-sided p value that the mean difference lies outside of [-margin, margin], by the test of its nearer end."""
    differences = np.asarray(differences, float)
    return min(1.0, 2 * min(_one_sided(differences - margin, "greater"), _one_sided(differences + margin, "less")))


def coupon_collector(draws: int, kinds: int) -> float:
    """Probability that `draws` uniform draws contain every one of `kinds`: sum_j (-1)^j C(k, j) (1 - j / k)^n.

    In integers, as the terms are much larger than their sum.
    """
    ways = sum((-1) ** j * math.comb(kinds, j) * (kinds - j) ** draws for j in range(kinds + 1))
    return ways / kinds**draws


def summarise(last: pd.DataFrame, swept: list[str], columns: Mapping[str, Column] = {}) -> pd.DataFrame:
    """One row per point, arm and metric: mean, std, 95 % interval, n; diverged runs are counted, not averaged.

    Intervals stay within the bounds of `columns`.
    """
    places, metrics = [*swept, "arm"], [c for c in last.columns if "/" in c]
    good = last.status == "ok"
    # Values of the diverged are masked and not left out, so that every group has the rows of both.
    groups = last[metrics].where(good).groupby([last[key] for key in places], dropna=False, sort=True)
    mean, std, n = groups.mean(), groups.std(), groups.count()
    lost = (~good).groupby([last[key] for key in places], dropna=False, sort=True).sum()
    ends = [within(mean[name], half_width(std[name], n[name]), *bounds_of(name, columns)) for name in metrics]
    low, high = (np.stack(side, 1) if metrics else np.empty((len(mean), 0)) for side in zip(*ends, strict=True))
    table = mean.index.to_frame(index=False).loc[np.repeat(np.arange(len(mean)), len(metrics))].reset_index(drop=True)
    table["metric"] = np.tile(metrics, len(mean))
    for name, values in {"mean": mean, "std": std, "low": low, "high": high, "n": n}.items():
        table[name] = np.asarray(values).ravel()
    table["diverged"] = np.repeat(lost.to_numpy(), len(metrics))
    return table[table.n > 0].reset_index(drop=True)


def bounds_of(metric: str, columns: Mapping[str, Column]) -> Bounds:
    """What a metric cannot leave: its column's bounds, or those of the column that it is a part of (eval/loss/en: of eval/loss)."""
    column = columns.get(metric) or columns.get(metric.rpartition("/")[0])
    return column.bounds if column else (None, None)
