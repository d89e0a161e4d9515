"""The gap over every order of removal: parts by hand, which orders there are, and both evaluations."""

import numpy as np
import pandas as pd
import pytest

from routed.analysis.shapley import LEARNING, PARTITION, SHARPNESS, shares

#: Logs of losses: 4 as it is fresh, 1 less if sharp, 2 less with rows from data, 2.5 less with both; learned at 0.
LOGS = {"frozen": 4.0, "frozen_sharp": 3.0, "frozen_data_fresh": 2.0, "frozen_data_sharp": 1.5, "learned": 0.0}
NOISE = (-0.1, 0.0, 0.1, 0.04)


def rows(logs, soft=0.5):
    """Losses by arm and seed; the logs of soft losses are `soft` times those at top-1."""
    lines = [
        {
            "arm": arm, "seed": seed, "status": "ok",
            "test/loss": np.exp(log + noise * (arm == "frozen")), "test/loss_soft": np.exp(soft * log),
        }
        for arm, log in logs.items() for seed, noise in enumerate(NOISE)
    ]  # fmt: skip
    return pd.DataFrame(lines)


def test_parts_by_hand():
    """Sharpness: 1 first, 2 - 1.5 = .5 second, mean .75; partition 2 and 1.5, mean 1.75; learning 1.5. Sum 4.

    The mean noise of frozen, .01, is in whichever goes first: half of it in each.
    """
    found = shares(rows(LOGS))
    hard = found[(found.evaluation == "top-1") & (found.orders == 2)].set_index("part")
    wanted = {SHARPNESS: 0.755, PARTITION: 1.755, LEARNING: 1.5}
    assert hard["mean"].to_dict() == pytest.approx(wanted)
    assert hard["share"].to_dict() == pytest.approx({name: part / 4.01 for name, part in wanted.items()})
    assert ((hard.share_low <= hard.share) & (hard.share <= hard.share_high)).all()
    soft = found[found.evaluation == "soft"].set_index("part")
    assert soft["mean"].to_dict() == pytest.approx({SHARPNESS: 0.375, PARTITION: 0.875, LEARNING: 0.75})
    # Evaluated soft the gap is 2 of 4.01.
    last = found.iloc[-1]
    assert last.part == "gone if both are evaluated soft" and last.share == pytest.approx(2.01 / 4.01)


def test_an_order_needs_all_of_its_arms():
    """Without rows as soft as a fresh gate only sharpness can go first; frozen_data stands in for the sharp one."""
    one = shares(rows({arm: log for arm, log in LOGS.items() if arm != "frozen_data_fresh"}))
    assert set(one.orders) == {1} and one.set_index("part")["mean"][SHARPNESS].iloc[0] == pytest.approx(1.01)
    today = {"frozen_data" if arm == "frozen_data_sharp" else arm: log for arm, log in LOGS.items()}
    assert shares(rows(today))["mean"].iloc[0] == pytest.approx(0.755)
    assert not len(shares(rows({"frozen": 4.0, "learned": 0.0})))


def test_a_gap_that_may_be_none_has_no_shares():
    none = shares(rows(LOGS | {"frozen": 0.01, "learned": 0.0}))
    assert none[none.evaluation == "top-1"].share.isna().all()
