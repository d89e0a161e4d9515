"""Exact tests for success rates, since a t test breaks when all runs agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy  # whose parts load at their first use
from numpy.typing import ArrayLike

from routed.analysis import statistics
from routed.analysis.claims.claim import TwoSides
from routed.analysis.statistics import Estimate


class Outcomes(NamedTuple):
    """Runs that succeed (1) or fail (0): compared with a constant rate, or paired with other runs.

    values: outcomes; if paired, differences of outcomes (-1, 0, 1).
    constant: the rate on the other side, or None if paired.
    sign: 1 if the constant is the lower side, -1 if the higher.
    """

    values: np.ndarray
    constant: float | None
    sign: int

    def compared(self) -> tuple[Estimate, float]:
        """Returns higher - lower with its interval, and the exact p value that the difference is 0."""
        if self.constant is None:
            return paired_rates(self.values)
        (mean, low, high, n), p = rate_against_constant(self.values, self.constant)
        ends = (low, high) if self.sign > 0 else (-high, -low)
        return Estimate(self.sign * mean, *ends, n), p

    def equal(self, margin: float) -> float:
        """Returns the p value that both rates differ by less than the margin.

        If all pairs agree, it is the probability that n pairs agree when a share `margin` of all pairs does not.
        """
        if self.constant is not None:
            return equal_rates(self.values, self.constant, margin)
        all_agree = bool((self.values == 0).all())
        return (1 - margin) ** len(self.values) if all_agree else statistics.equivalence(self.values, margin)

    def outside(self, margin: float) -> float:
        """Returns the two-sided p value that both rates differ by more than the margin: exact against a constant.

        Of pairs it is the larger of a t test's, which is 0 where all pairs are alike, and McNemar's of any difference.
        """
        if self.constant is None:
            return max(statistics.outside_margin_p(self.values, margin), paired_rates(self.values)[1])
        n, successes = len(self.values), int(self.values.sum())
        above, below = min(self.constant + margin, 1.0), max(self.constant - margin, 0.0)
        greater = scipy.stats.binomtest(successes, n, above, "greater").pvalue
        less = scipy.stats.binomtest(successes, n, below, "less").pvalue
        return float(min(1.0, 2 * min(greater, less)))


def outcomes_of(claim: TwoSides, differences: Mapping[str, pd.Series]) -> Outcomes | None:
    """Returns the outcomes behind the differences of a claim about success rates; None for other differences."""
    if claim.setup.unit != "probability" or len(differences) != 1:
        return None
    (values,) = (series.to_numpy(float) for series in differences.values())
    constant = claim.lower.get("value", claim.higher.get("value"))
    sign, least = (1, -1) if constant is None else (1 if "value" in claim.lower else -1, 0)
    outcomes = (constant or 0) + sign * values
    outcomes = np.clip(np.round(outcomes, 9), least, 1)  # extrapolated values may leave the range of outcomes
    counts = len(outcomes) > 1 and np.isin(outcomes, range(least, 2)).all()
    return Outcomes(outcomes, constant, sign) if counts else None


def rate_against_constant(outcomes: ArrayLike, constant: float) -> tuple[Estimate, float]:
    """Returns the success rate minus a constant, with Wilson's interval, and the exact two-sided binomial p value."""
    outcomes = np.asarray(outcomes, float)
    mean, low, high, n = statistics.proportion(outcomes)
    p = float(scipy.stats.binomtest(int(outcomes.sum()), n, constant).pvalue)
    return Estimate(mean - constant, low - constant, high - constant, n), p


def paired_rates(differences: ArrayLike) -> tuple[Estimate, float]:
    """Returns the difference of two success rates of paired runs, and its exact p value (McNemar 1947).

    The interval is the t interval. If all pairs agree it is Wilson's for n successes in n, since n pairs do not exclude
    a pair that differs.
    """
    differences = np.asarray(differences, float)
    n, ups, downs = len(differences), int((differences > 0).sum()), int((differences < 0).sum())
    p = float(scipy.stats.binomtest(ups, ups + downs, 0.5).pvalue) if ups + downs else 1.0
    if n > 1 and np.ptp(differences) == 0:
        z = float(scipy.special.ndtri((1 + statistics.LEVEL) / 2)) ** 2
        mean, width = float(differences[0]), z / (n + z)
        return Estimate(mean, max(mean - width, -1.0), min(mean + width, 1.0), n), p
    mean, low, high, n = statistics.estimate(differences)
    return Estimate(mean, max(low, -1.0), min(high, 1.0), n), p


def equal_rates(outcomes: ArrayLike, constant: float, margin: float) -> float:
    """Returns the p value of two one-sided exact binomial tests that a rate lies within the margin of a constant."""
    outcomes = np.asarray(outcomes, float)
    successes, n = int(outcomes.sum()), len(outcomes)
    below, above = constant - margin, constant + margin
    greater = scipy.stats.binomtest(successes, n, below, "greater").pvalue if below > 0 else 0.0
    less = scipy.stats.binomtest(successes, n, above, "less").pvalue if above < 1 else 0.0
    return float(max(greater, less))
