"""The gap over every order of removal: parts by hand, which orders there are, and both evaluations."""

import numpy as np
import pandas as pd
import pytest

import routed.papers.ours  # noqa: F401 (the kind `shares`)
from routed.analysis import plots
from routed.analysis.plots import automatic_figures, frame
from routed.analysis.shapley import LEARNING, PARTITION, SHARPNESS, shares
from routed.papers.ours.shares_chart import FIRST, KMEANS, MEAN, shares_at
from routed.plan.config import base, problem_of
from routed.settings.tree import flatten
from tests import charts

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


#: Of a gap of 4.01: sharpness first 1.01 (25 %), mean .755 (19 %), k-means 4.01 - 1 = 3.01 (75 %).
POINT = LOGS | {"frozen_kmeans": 1.0}
SPEC = {"kind": "shares", "name": "shares", "x": "router.init_scale", "y": "data.separation"}


def grid(logs_at):
    """The data of a sweep: (init_scale, separation) -> logs of losses."""
    parts = [
        rows(logs).assign(**{"router.init_scale": scale, "data.separation": separation})
        for (scale, separation), logs in logs_at.items()
    ]
    table = pd.concat(parts, ignore_index=True).assign(step=10)
    table["run"] = [f"{row}" for row in range(len(table))]
    columns = problem_of(base()).columns(base())
    return frame.Data(table, ["data.separation", "router.init_scale"], flatten(base()), {}, columns)


def test_shares_of_a_point_by_hand():
    means = {title: share.mean for title, share in shares_at(rows(POINT)).items()}
    assert means == pytest.approx({FIRST: 1.01 / 4.01, MEAN: 0.755 / 4.01, KMEANS: 3.01 / 4.01})
    # k-means at -1 is below the learned router: 5.01 of 4.01. Its rows need no other control.
    pair = {"frozen": 4.0, "frozen_kmeans": -1.0, "learned": 0.0}
    assert {title: share.mean for title, share in shares_at(rows(pair)).items()} == {KMEANS: pytest.approx(5.01 / 4.01)}
    # One order has no mean over both; a gap below 0 has no shares.
    assert [*shares_at(rows({arm: log for arm, log in POINT.items() if arm != "frozen_data_fresh"}))] == [FIRST, KMEANS]
    behind = shares_at(rows(POINT | {"learned": 5.0}))
    assert [*behind] == [FIRST, MEAN, KMEANS] and all(np.isnan(share.mean) for share in behind.values())


def test_a_control_that_missed_its_entropy_has_no_share():
    missed = rows(POINT).assign(**{"router/entropy_target": 1.0, "router/entropy_token_train": 1.0})
    missed.loc[missed.arm == "frozen_sharp", "router/entropy_token_train"] = 1.5
    assert [*shares_at(missed)] == [KMEANS]
    missed.loc[missed.arm == "frozen_kmeans", "router/entropy_token_train"] = 1.5
    assert not shares_at(missed)


def test_cells_of_a_grid_by_hand():
    """Sharp at 2: 2.01 of 4.01 if first (50 %), 2 - 1.5 = .5 if second, mean 1.255 (31 %)."""
    sharper = POINT | {"frozen_sharp": 2.0}
    none = POINT | {"frozen": 0.01, "frozen_kmeans": 0.0}
    at = {(0.3, 1.0): POINT, (1.0, 1.0): sharper, (0.3, 1.5): none, (1.0, 1.5): sharper}
    (drawn,), undrawn = automatic_figures.draw_all([SPEC], grid(at))
    assert not undrawn and [panel.title for panel in drawn.drawn.panels] == [FIRST, MEAN, KMEANS]
    first, mean, _ = drawn.drawn.panels
    cells = {(row["cx"], row["cy"]): row for row in charts.rows(first, kind="cells")}
    assert {at: row["label"].split("\n")[0] for at, row in cells.items()} == {
        (0.0, 0.0): "25 %", (1.0, 0.0): "50 %", (1.0, 1.0): "50 %",
    }  # fmt: skip
    assert [row["text"].split(" [")[0] for row in charts.rows(mean, kind="cells")] == ["19 %", "31 %", "31 %"]
    assert "no sure gap" in charts.texts(first) and charts.labels(first.x) == ["0.3", "1"]
    text = cells[1.0, 0.0]["text"]
    at = "separation c 1, factor on the initial weights of the router 1"
    assert cells[1.0, 0.0]["at"] == at and cells[1.0, 0.0]["n"] == 4
    assert f"{text} ({at}), 3 of 4 points." in drawn.caption
    low, high = plots.svg(drawn.drawn), plots.svg(drawn.drawn, dark=True)
    assert all("25 %" in text and "no sure gap" in text for text in (low, high))


def test_a_grid_without_its_keys_is_not_drawn():
    data = grid({(0.3, 1.0): POINT})
    data.swept = ["data.separation"]
    assert plots.draw(SPEC, data) is None
