"""Numbers with intervals, as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routed.analysis import digits

SHOWN = [
    ((2.04918, 2.0441, 2.0543), "2.049 [2.044, 2.054]"),  # half .0051: one digit of it, three decimals
    ((2.098, 2.0861, 2.1099), "2.098 [2.086, 2.110]"),  # half .0119: two digits, three decimals; a 0 at the end stays
    ((0.5203, 0.4774, 0.5652), "0.52 [0.48, 0.57]"),  # half .0439
    ((4.7, 3.31, 6.82), "4.7 [3.3, 6.8]"),  # half 1.755: two digits
    ((14.03, 9.5, 18.6), "14 [10, 19]"),  # half 4.55: one
    ((1234.5, 1100.0, 1369.0), "1234 [1100, 1369]"),  # no digit before the point is dropped
    ((0.02, 1e-3, 0.4), "0.02 [0.001, 0.4]"),  # half .1995: two decimals would show an end as 0
    ((0.9, 0.9, 0.9), "0.9 [0.9, 0.9]"),  # no width
    ((8.0, 8 - 4e-15, 8 + 4e-15), "8 [8, 8]"),
    ((0.0, 0.0, 0.04), "0.000 [0.000, 0.040]"),  # an end that is 0; half .02
    ((3.2e-6, 3.1e-6, 3.3e-6), "3.2e-06 [3.1e-06, 3.3e-06]"),
    ((2.65e7, 2.6e7, 2.7e7), "2.65e+07 [2.6e+07, 2.7e+07]"),
    ((1.23456, math.nan, math.nan), "1.23"),
]


@pytest.mark.parametrize(("values", "text"), SHOWN)
def test_an_interval_says_how_many_digits_are_worth_showing(values, text):
    assert digits.with_interval(values) == text


def test_a_sign_stands_before_all_three():
    assert digits.with_interval((0.0123, -0.002, 0.0266), "+") == "+0.012 [-0.002, +0.027]"


@given(st.floats(-1e5, 1e5), st.floats(1e-6, 1e5))
def test_rounding_moves_a_number_by_a_small_part_of_its_interval(mean, half):
    """At most half a unit of the last decimal if the half-width has 3.55 or more; or half of .01 of the number."""
    exact = mean, mean - half, mean + half
    for text, value in zip(digits.parts(exact), exact, strict=True):
        assert abs(float(text) - value) <= max(half / 7, 0.005 * abs(value)) * (1 + 1e-9)


def test_a_mean_that_rounds_to_zero_has_no_minus():
    assert digits.with_interval((-0.001, -0.05, 0.048)) == "0.00 [-0.05, 0.05]"
