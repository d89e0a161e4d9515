"""Claims of a change of sign along a swept key: the place by hand, its interval, and every way to have no verdict."""

import numpy as np
import pandas as pd
import pytest

from routed.analysis.claims import Along, Writer
from routed.analysis.verdicts import judge
from routed.papers.ours.crossing import first_above, locate
from routed.plan.config import base
from routed.settings.tree import override
from tests.test_claims import table

SHARES = (0.0, 0.5, 1.0)

#: log(frozen / learned) of a steady seed at the three shares; it is 0 between the first two, two thirds of the way: at
#: 1/3.
CURVE = (-0.4, 0.2, 0.6)

#: What five seeds add to it: mean 0.
NOISE = (-0.05, -0.02, 0.0, 0.03, 0.04)


def rows(curve=CURVE, noise=NOISE, halfway=1.0, **columns):
    """The learned loss is .1, the frozen one its ratio times that; `halfway` as in tests.test_claims."""
    parts = [
        table(
            {"learned": [0.1] * len(noise), "frozen": [0.1 * float(np.exp(at + one)) for one in noise]}, halfway=halfway
        )
        .assign(**{"data.irrelevant_fraction": share} | columns)
        for share, at in zip(SHARES, curve, strict=True)
    ]  # fmt: skip
    found = pd.concat(parts, ignore_index=True)
    return found.assign(run=found.run + found["data.irrelevant_fraction"].astype(str))


def claim(**changes):
    writer = Writer("gaps_filled")
    made = writer.crossing(
        "x", "s", "p", {"arm": "learned"}, {"arm": "frozen"}, Along("data.irrelevant_fraction", SHARES), alpha=0.01
    )
    return made.replace(**changes)


def verdict(one, found, config=None):
    return judge((one,), found, config or base(), ["data.irrelevant_fraction"])[0]


def test_the_place_by_hand():
    """Mean curve -.4, .2, .6 at 0, .5, 1: from -.4 up by .6 over .5, so 0 at .5 x .4 / .6 = 1/3."""
    found = verdict(claim(), rows())
    assert found["verdict"] == "supported" and found["ours"] == pytest.approx(1 / 3) and found["n"] == 5
    low, high = found["interval"]
    # A draw's mean moves by at most .05 up or down, at both ends alike: 0 at .5 x (.4 -+ .05) / .6 = .292 to .375.
    assert 0.292 <= low < 1 / 3 < high <= 0.375
    assert "data.irrelevant_fraction = 0.333 [" in found["text"] and "at 0, " in found["text"]
    # t of the first end: mean -.4 of five, s = .0367: t = -24, df 4, two-sided p = .00002; the last has t = 37.
    assert found["p"] == pytest.approx(1.6e-5, rel=0.2)


def test_places_of_curves():
    curves = np.array([[-1.0, 1, 2], [1, 2, 3], [-3, -2, -1], [-1, 0, 3], [-1, -1, 3]])
    # Half way to .5; above from the start; never; leaves 0 at .5; a quarter of the way from .5 to 1.
    np.testing.assert_allclose(first_above(np.array(SHARES), curves), [0.25, 0, 1, 0.5, 0.625])


def test_the_other_way_round_is_opposite():
    found = verdict(claim(), rows(curve=(0.4, -0.2, -0.6)))
    assert found["verdict"] == "opposite" and found["ours"] == pytest.approx(
        1 / 3
    )  # of the way from .4 to -.2, two thirds
    assert verdict(claim(lower={"arm": "frozen"}, higher={"arm": "learned"}), rows())["verdict"] == "opposite"


@pytest.mark.parametrize("curve", [(-0.4, 0.2, 0.01), (-0.01, 0.2, 0.4), (0.1, 0.2, 0.4)])
def test_both_ends_have_to_be_sure(curve):
    assert verdict(claim(), rows(curve))["verdict"] == "inconclusive"


def test_a_curve_that_crosses_thrice_has_no_place():
    shares = (0.0, 0.25, 0.5, 1.0)
    differences = np.array([-0.4, 0.2, -0.2, 0.6])[None] + np.array(NOISE)[:, None]
    found = locate(shares, differences)
    assert found.changes == 3 and found.verdict == "inconclusive" and found.p < 0.01


def test_the_level_is_the_claims_own():
    """The first end has mean -.06 and s .0367: t = -3.65, p = .022: enough at .05, not at .01."""
    curve = (-0.06, 0.2, 0.6)
    assert verdict(claim(alpha=0.05), rows(curve))["verdict"] == "supported"
    found = verdict(claim(), rows(curve))
    assert found["verdict"] == "inconclusive" and found["p"] == pytest.approx(0.022, abs=0.001)
    assert found["reason"].endswith("asked for: p < 0.01")


def test_an_order_has_a_level_of_its_own():
    order = Writer("gaps_filled").order(
        "x", "s", "p", {"arm": "frozen"}, {"arm": "learned"}, at={"data.irrelevant_fraction": 0.0}
    )
    found = rows(curve=(-0.06, 0.2, 0.6))
    assert verdict(order, found)["verdict"] == "supported"
    strict = verdict(order.replace(alpha=0.01), found)
    assert strict["verdict"] == "inconclusive" and strict["reason"].endswith("asked for: p < 0.01")


def test_curves_that_would_cross_elsewhere_turn_no_verdict_and_others_do():
    """frozen falls by a factor over the tail's doubling, so by its square more at 4 times the steps: 1.05^2 moves the
    curve by -.098 and it still changes sign; 2^2 moves it by -1.39 and learned never wins."""
    slow = verdict(claim(), rows(halfway={"frozen": 1.05}))
    assert slow["verdict"] == "supported" and slow["later"][0] > slow["ours"]
    fast = verdict(claim(), rows(halfway={"frozen": 2.0}))
    assert fast["verdict"] == "inconclusive" and "could turn" in fast["reason"]
    # learned falls by 1.21, so by .38 in logs: the first end comes to -.02, with t = -1.2: it changes sign, and nobody
    # knows.
    doubtful = verdict(claim(), rows(halfway={"learned": float(np.exp(0.19))}))
    assert doubtful["verdict"] == "inconclusive" and "could turn" in doubtful["reason"]


def test_seeds_and_values_that_are_missing():
    assert verdict(claim(), rows()[lambda one: one["data.irrelevant_fraction"] != 0.5])["verdict"] == "not run"
    one = verdict(claim(), rows(noise=(0.0,)))
    assert (one["verdict"], one["reason"]) == ("inconclusive", "one seed")
    lost = rows()
    lost.loc[(lost.seed == 2) & (lost["data.irrelevant_fraction"] == 0.5) & (lost.arm == "frozen"), "status"] = (
        "diverged"
    )
    assert verdict(claim(), lost)["n"] == 4  # a seed counts where all of its values do


def test_a_smoke_run_judges_nothing():
    assert verdict(claim(), rows(), override(base(), {"scale": "smoke"}))["verdict"] == "not judged"


def test_a_loser_at_the_edge_of_the_grid_might_have_won():
    found = rows(rates="tuned").assign(**{"train/rate_scale": 1.0})
    assert verdict(claim(), found)["verdict"] == "supported"
    for share, arm, expected in (
        (0.0, "learned", "inconclusive"),
        (1.0, "learned", "supported"),
        (1.0, "frozen", "inconclusive"),
    ):
        edge = found.copy()
        edge.loc[(edge["data.irrelevant_fraction"] == share) & (edge.arm == arm), "train/rate_scale"] = np.float32(0.3)
        assert verdict(claim(), edge)["verdict"] == expected, (share, arm)
