"""Runs that succeed or do not: exact comparisons of their shares, as a t test takes outcomes that are all alike for certain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import special, stats

from routed.analysis import statistics
from routed.analysis.claims import Claim
from routed.analysis.statistics import Estimate


class Outcomes(NamedTuple):
    """Runs that succeed (1) or do not, against a `constant` share of `sign` (+1: the lower side, -1: the higher), or paired (None)."""

    values: np.ndarray
    constant: float | None
    sign: int

    def compared(self) -> tuple[Estimate, float]:
        """higher - lower, its interval and exact p value: outcomes that are all alike are not beyond doubt, as a t test has it."""
        if self.constant is None:
            return paired_shares(self.values)
        (mean, low, high, n), p = against_share(self.values, self.constant)
        ends = (low, high) if self.sign > 0 else (-high, -low)
        return Estimate(self.sign * mean, *ends, n), p

    def equal(self, margin: float) -> float:
        """P value that both shares differ by less than the margin; of pairs that all agree, that one in 1 / margin would not have."""
        if self.constant is not None:
            return equal_shares(self.values, self.constant, margin)
        alike = bool((self.values == 0).all())
        return (1 - margin) ** len(self.values) if alike else statistics.equivalence(self.values, margin)


def outcomes_of(claim: Claim, differences: Mapping[str, pd.Series]) -> Outcomes | None:
    """The outcomes behind the differences of a claim about shares of runs; None where they are others, or several controls'."""
    if claim.unit != "probability" or len(differences) != 1:
        return None
    (values,) = (series.to_numpy(float) for series in differences.values())
    constant = claim.lower.get("value", claim.higher.get("value"))
    sign, least = (1, -1) if constant is None else (1 if "value" in claim.lower else -1, 0)
    counted, possible = (constant or 0) + sign * values, range(least, 2)
    counted = np.clip(np.round(counted, 9), least, 1)  # a tail that goes on cannot leave what there is
    return Outcomes(counted, constant, sign) if len(counted) > 1 and np.isin(counted, possible).all() else None


def against_share(outcomes: ArrayLike, constant: float) -> tuple[Estimate, float]:
    """The share of runs whose outcome is 1, less a constant: `proportion`'s interval, and the exact two-sided binomial p value."""
    outcomes = np.asarray(outcomes, float)
    mean, low, high, n = statistics.proportion(outcomes)
    p = float(stats.binomtest(int(outcomes.sum()), n, constant).pvalue)
    return Estimate(mean - constant, low - constant, high - constant, n), p


def paired_shares(differences: ArrayLike) -> tuple[Estimate, float]:
    """The difference of two shares of the same runs, from differences of outcomes (-1, 0, 1), and its exact p value (McNemar 1947).

    The interval is the t interval; where all runs agree, that of Wilson for a share of n in n, as n runs do not exclude that others differ.
    """
    differences = np.asarray(differences, float)
    n, ups, downs = len(differences), int((differences > 0).sum()), int((differences < 0).sum())
    p = float(stats.binomtest(ups, ups + downs, 0.5).pvalue) if ups + downs else 1.0
    if n > 1 and np.ptp(differences) == 0:
        z = float(special.ndtri((1 + statistics.LEVEL) / 2)) ** 2
        alike, width = float(differences[0]), z / (n + z)
        return Estimate(alike, max(alike - width, -1.0), min(alike + width, 1.0), n), p
    mean, low, high, n = statistics.estimate(differences)
    return Estimate(mean, max(low, -1.0), min(high, 1.0), n), p


def equal_shares(outcomes: ArrayLike, constant: float, margin: float) -> float:
    """P value of two one-sided exact binomial tests that a share lies within the margin of a constant."""
    outcomes = np.asarray(outcomes, float)
    ones, n = int(outcomes.sum()), len(outcomes)
    below, above = constant - margin, constant + margin
    greater = stats.binomtest(ones, n, below, "greater").pvalue if below > 0 else 0.0
    less = stats.binomtest(ones, n, above, "less").pvalue if above < 1 else 0.0
    return float(max(greater, less))
