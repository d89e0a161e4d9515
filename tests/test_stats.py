"""Intervals and tests against values worked out by hand or by scipy's own definitions."""

import numpy as np
import pandas as pd
import pytest

from routed.analysis import statistics


def test_estimate_is_the_t_interval():
    # n = 3, mean 2, s = 1, t(.975, 2) = 4.302653: half-width 4.302653 / sqrt(3) = 2.484138.
    one = statistics.estimate([1.0, 2.0, 3.0])
    assert (one.mean, one.n) == (2.0, 3)
    assert one.high - one.mean == pytest.approx(2.484138, rel=1e-6)


def test_prediction_is_wider_by_sqrt_n_plus_one():
    values = [1.0, 2.0, 3.0]
    mean, run = statistics.estimate(values), statistics.prediction(values)
    assert (run.high - run.mean) / (mean.high - mean.mean) == pytest.approx(2.0)  # sqrt(1 + 1/3) / sqrt(1/3)


def test_one_value_has_no_interval():
    assert (
        np.isnan(statistics.estimate([1.0]).low)
        and statistics.p_value([1.0]) == 1
        and statistics.equivalence([0.0], 1.0) == 1
    )


def test_log_ratio_is_paired_and_survives_zero():
    np.testing.assert_allclose(statistics.log_ratio(np.array([np.e, 1.0]), np.array([1.0, 1.0])), [1, 0])
    assert np.isfinite(statistics.log_ratio(1.0, 0.0)).all()


def test_differences_without_spread():
    assert statistics.p_value([0.5, 0.5]) == 0 and statistics.p_value([0.0, 0.0]) == 1
    assert statistics.equivalence([0.05, 0.05], 0.1) == 0 and statistics.equivalence([0.2, 0.2], 0.1) == 1


def test_equivalence_needs_both_sides():
    tight = [0.01, -0.01, 0.02, -0.02, 0.0]
    assert statistics.equivalence(tight, 0.1) < 0.05
    assert statistics.equivalence([v + 0.2 for v in tight], 0.1) > 0.5
    assert statistics.equivalence([v * 30 for v in tight], 0.1) > 0.05  # centred, but too wide to say


def test_adjustment_is_benjamini_hochberg():
    # p_(i) m / i, made monotone from above: .01*3/1 = .03, .02*3/2 = .03, .5.
    np.testing.assert_allclose(statistics.adjusted([0.01, 0.5, 0.02]), [0.03, 0.5, 0.03])


def test_summary_counts_the_diverged_and_averages_the_rest():
    last = pd.DataFrame(
        {
            "k": [1, 1, 1],
            "arm": "learned",
            "seed": [0, 1, 2],
            "status": ["ok", "ok", "diverged"],
            "test/loss": [1.0, 3.0, 99.0],
        }
    )
    row = statistics.summarise(last, ["k"]).iloc[0]
    assert (row["mean"], row.n, row.diverged) == (2.0, 2, 1)
