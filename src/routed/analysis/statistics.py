"""Intervals and tests over seeds. Everything here is scipy applied to what `results` stored."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.95

#: Losses and ratios below this are treated as this in logarithms.
TINY = 1e-12


class Estimate(NamedTuple):
    """A mean with its 95 % t interval over n seeds; NaN ends when n < 2."""

    mean: float
    low: float
    high: float
    n: int


def estimate(values) -> Estimate:
    """Mean and 95 % t interval of independent values: mean -+ t s / sqrt(n)."""
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Estimate(float(values.mean()) if n else np.nan, np.nan, np.nan, n)
    half = stats.t.ppf((1 + LEVEL) / 2, n - 1) * stats.sem(values)
    return Estimate(float(values.mean()), float(values.mean() - half), float(values.mean() + half), n)


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


def adjusted(p_values: list[float]) -> np.ndarray:
    """P values of a family, adjusted for its false discovery rate (Benjamini and Hochberg 1995)."""
    return stats.false_discovery_control(p_values) if len(p_values) else np.array([])


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


def coupon_collector(draws: int, kinds: int) -> float:
    """Probability that `draws` uniform draws contain every one of `kinds`: sum_j (-1)^j C(k, j) (1 - j / k)^n.

    In integers, as the terms are much larger than their sum.
    """
    ways = sum((-1) ** j * math.comb(kinds, j) * (kinds - j) ** draws for j in range(kinds + 1))
    return ways / kinds**draws


def summarise(last: pd.DataFrame, swept: list[str]) -> pd.DataFrame:
    """One row per point, arm and metric: mean, std, 95 % interval, n; diverged runs are counted, not averaged."""
    rows = []
    metrics = [c for c in last.columns if "/" in c]
    for keys, group in last.groupby([*swept, "arm"], dropna=False, sort=True):
        good = group[group.status == "ok"]
        for metric in metrics:
            values = good[metric].dropna()
            if len(values):
                mean, low, high, n = estimate(values)
                spread = float(values.std(ddof=1)) if n > 1 else np.nan
                found = dict(zip([*swept, "arm"], keys, strict=True)) | {"metric": metric, "mean": mean, "std": spread}
                rows.append(found | {"low": low, "high": high, "n": n, "diverged": len(group) - len(good)})
    return pd.DataFrame(rows)
