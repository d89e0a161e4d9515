"""Intervals and tests against values worked out by hand or by scipy's own definitions."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

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


def test_two_means_on_two_sides_are_as_sure_as_the_less_sure_one():
    """One-sided tests of "the first is below 0" and "the second above": twice the larger p value, at most 1."""
    below, above = [-1.0, -1.2, -0.9], [0.5, 1.5, 0.1]
    larger = stats.ttest_1samp(above, 0, alternative="greater").pvalue
    assert larger > 5 * stats.ttest_1samp(below, 0, alternative="less").pvalue
    assert statistics.intersection_union_p(below, above) == pytest.approx(2 * larger)
    assert statistics.intersection_union_p(above, below) == 1


def test_adjustment_is_holms():
    # Sorted .01, .02, .5 times 3, 2, 1: .03, .04, .5; never falling.
    np.testing.assert_allclose(statistics.adjusted([0.01, 0.5, 0.02]), [0.03, 0.5, 0.04])
    np.testing.assert_allclose(statistics.adjusted([0.03, 0.02]), [0.04, 0.04])
    assert len(statistics.adjusted([])) == 0


def test_the_least_of_one_is_the_plain_interval():
    values = [1.0, 2.0, 3.0]
    found = statistics.versus_best({"a": values})
    assert found == ("a", statistics.estimate(values), pytest.approx(statistics.p_value(values)))


def test_the_least_of_several_holds_each_of_them():
    sure, wide = [1.0, 1.1, 0.9, 1.0], [9.0, -9.0, 8.0, 2.0]
    found = statistics.versus_best({"sure": sure, "wide": wide})
    assert found.name == "sure" and found.estimate.low == statistics.estimate(wide).low
    assert found.estimate.high == statistics.estimate(sure, 1 - 0.05 / 2).high
    assert found.p == pytest.approx(statistics.p_value(wide))  # all have to be above 0: the worst test counts


@pytest.mark.parametrize(("n", "correlation"), [(3, 0.0), (5, 0.5), (10, 0.0), (10, 0.9)])
def test_the_fairest_control_errs_no_more_often_than_one_would(n, correlation):
    """Three controls as good as learned: "opposite" in at most 2.5 % (4.9 to 5.7 % by the minimum's own interval)."""
    draws, controls = 4000, 3
    rng = np.random.default_rng(n)
    shared = rng.normal(size=(draws, n, 1)) * np.sqrt(correlation)
    values = shared + rng.normal(size=(draws, n, controls)) * np.sqrt(1 - correlation)
    mean, spread = values.mean(1), values.std(1, ddof=1) / np.sqrt(n)
    plain = (mean + stats.t.ppf(0.975, n - 1) * spread < 0)[np.arange(draws), mean.argmin(1)].mean()
    found = [statistics.versus_best(dict(zip("abc", one.T, strict=True))).estimate for one in values[:1500]]
    opposite, supported = (np.mean([e.high < 0 for e in found]), np.mean([e.low > 0 for e in found]))
    limit = 0.025 + 3 * np.sqrt(0.025 * 0.975 / 1500)  # three standard errors: .037
    assert opposite < limit and supported < limit
    if correlation == 0:
        assert plain > limit


def test_extrapolation_continues_a_power_law():
    """L = 8 t^-1.5 at 1, 2, 4, 8; at 32 it is 8 / 32^1.5 = .0442. The tail is what lies behind half of the steps."""
    steps = np.array([0.0, 1, 2, 4, 8])
    values = np.log(np.stack([8 * np.array([1e9, 1, 2, 4, 8]) ** -1.5, np.full(5, 3.0)], 1))
    np.testing.assert_allclose(np.exp(statistics.extrapolate(steps, values, 4.0)), [8 / 32**1.5, 3.0], rtol=1e-12)
    assert np.isnan(statistics.extrapolate(steps[[0, 4]], values[[0, 4]], 4.0)).all()
    np.testing.assert_array_equal(statistics.extrapolate(steps[[0, 4]], values[[0, 4]], 1.0), values[4])


def test_the_tail_of_an_extrapolation_is_the_second_half():
    """From 3 at step 4 to 2 at step 8: 1 less in each doubling, whatever came before."""
    steps, values = np.array([1.0, 2, 4, 8]), np.array([[10.0], [5], [3], [2]])
    assert statistics.extrapolate(steps, values, 2.0) == pytest.approx([1.0])


def test_extrapolation_goes_too_far_where_a_curve_settles():
    steps = np.arange(1.0, 9.0)
    values = np.log(1 + 8 * steps**-2)[:, None]
    assert statistics.extrapolate(steps, values, 4.0)[0] < np.log(1 + 8 * 32.0**-2) < values[-1, 0]


def test_beyond_a_margin():
    values = np.array([2.0, 2.1, 1.9, 2.0])
    assert statistics.outside_margin_p(values, 1.0) == pytest.approx(stats.ttest_1samp(values, 1.0).pvalue)
    assert (
        statistics.outside_margin_p(-values, 1.0) == statistics.outside_margin_p(values, 1.0)
        and statistics.outside_margin_p(values, 3.0) == 1.0
    )


def test_a_share_is_paired_by_seed():
    whole = np.array([4.0, 5.0, 6.0, 5.0])
    found = statistics.bootstrap_ratio(whole / 2, whole)  # half of every seed, whatever is drawn
    assert found[:3] == pytest.approx((0.5, 0.5, 0.5))
    assert np.isnan(statistics.bootstrap_ratio(whole[:2], whole[:2]).low)


def test_few_seeds_have_the_interval_of_fieller():
    """A t test of part - r whole has p = .05 at both ends; where the whole may be 0, any share may be."""
    part, whole = np.array([1.0, 2.2, 3.1, 2.0]), np.array([4.0, 5.0, 6.0, 5.0])
    _, low, high, _ = statistics.bootstrap_ratio(part, whole)
    for end in (low, high):
        assert stats.ttest_1samp(part - end * whole, 0).pvalue == pytest.approx(0.05)
    assert low < (part / whole).min() and (part / whole).max() < high  # a bootstrap of four seeds ends at single ones
    unsure = np.array([1.0, 2.0, 4.0, 8.0])  # t = 3.75 / (3.10 / 2) = 2.42, asked for 3.18
    assert statistics.bootstrap_ratio(unsure / 2, unsure)[1:3] == (-np.inf, np.inf)


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


def test_intervals_of_bounded_quantities_by_hand():
    # Mean .5, half-width .25: g'(.5) = 1 / .25 = 4, so logits -+1, and 1 / (1 + e) = .26894.
    assert statistics.bounded_interval(0.5, 0.25, 0, 1) == (
        pytest.approx(0.26894, abs=1e-5),
        pytest.approx(0.73106, abs=1e-5),
    )
    # Mean 2 above 0, half-width 2: log 2 -+ 1; the mirror below 1.
    assert statistics.bounded_interval(2.0, 2.0, 0) == (pytest.approx(2 / np.e), pytest.approx(2 * np.e))
    assert statistics.bounded_interval(-1.0, 2.0, None, 1) == (pytest.approx(1 - 2 * np.e), pytest.approx(1 - 2 / np.e))
    assert statistics.bounded_interval(2.0, 1.0) == (1.0, 3.0)
    # A mean at a bound, or beyond it, as an estimate of 0 may be: cut.
    low, high = statistics.bounded_interval(np.array([0.0, 1.0, -0.01]), np.array([0.0, 0.2, 0.02]), 0, 1)
    assert low == pytest.approx([0, 0.8, 0]) and high == pytest.approx([0, 1, 0.01])
    assert statistics.estimate([0.0, 0.0, 0.06], bounds=(0, 1)).low > 0 and np.isnan(
        statistics.estimate([0.5], bounds=(0, 1)).low
    )


def test_a_share_of_runs_has_an_interval_even_where_all_are_alike():
    # Wilson, z = 1.96: of 2 of 2, low = n / (n + z^2) = 2 / 5.8415; of 1 of 2, .5 -+ sqrt(z^2 (2 + z^2)) / (2 (2 +
    # z^2)).
    assert statistics.proportion([1, 1])[:3] == pytest.approx((1, 0.34238, 1), abs=1e-5)
    assert statistics.proportion([0, 1])[:3] == pytest.approx((0.5, 0.09453, 0.90547), abs=1e-5)
    assert np.isnan(statistics.proportion([]).mean)


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=12),
    st.sampled_from([(0.0, 1.0), (0.0, None), (None, 1.0), (-3.0, 4.0)]),
)
def test_no_interval_leaves_its_bounds(values, bounds):
    one = statistics.estimate(values, bounds=bounds)
    low, high = (np.inf * sign if end is None else end for end, sign in zip(bounds, (-1, 1), strict=True))
    assert low <= one.low <= one.mean + 1e-12 and one.mean - 1e-12 <= one.high <= high


@pytest.mark.parametrize("n", (3, 5, 10))
def test_intervals_of_bounded_quantities_cover(n):
    """Share of 4,000 intervals that hold the mean of skewed shares and losses; t intervals 90, 89, 91 % at first."""
    rng = np.random.default_rng(n)
    for values, mean, bounds in (
        (rng.beta(1, 20, (4000, n)), 1 / 21, (0, 1)),  # a share of dead experts, near 0
        (rng.beta(50, 2, (4000, n)), 50 / 52, (0, 1)),  # an accuracy
        (rng.gamma(2, 1, (4000, n)), 2, (0, None)),  # a loss
    ):
        half = stats.t.ppf(0.975, n - 1) * values.std(1, ddof=1) / np.sqrt(n)
        low, high = statistics.bounded_interval(values.mean(1), half, *bounds)
        assert 0.93 < ((low <= mean) & (mean <= high)).mean() < 0.965


def test_percentiles_of_a_bootstrap_are_as_far_out_as_a_t_interval_is_wide():
    """n = 10: t(9) = 2.2622, times sqrt(10 / 9) = 2.3845, below which a normal has .00855. Of many values .025."""
    assert statistics.percentiles(10) == pytest.approx((0.00855, 1 - 0.00855), abs=1e-5)
    assert statistics.percentiles(10**6)[0] == pytest.approx(0.025, abs=1e-5)
