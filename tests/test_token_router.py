"""Claims and a chart of experiments/token_router.py by hand."""

import types
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from routed.analysis.claims import Writer
from routed.analysis.plots import draw
from routed.analysis.plots.frame import Data
from routed.contracts import Column
from routed.plan import experiment, tuning
from routed.plan.runs import plan_runs
from routed.settings.tree import override
from tests import charts

tokens = experiment.load("token_router")


def test_parts_of_a_variance_by_hand():
    """Values 2 +- 1 +- .5: variances 1 and .25 of 1.25, so .8 and .2; a cell that is .4 higher brings both together."""
    values = {("a", 0): 0.5, ("a", 1): 1.5, ("b", 0): 2.5, ("b", 1): 3.5}
    rows = [
        {"run": f"{seed}{at}", "arm": "learned", "seed": seed, "status": "ok", "step": 1, "m": at[0], "c": at[1],
         "test/loss": value + seed}
        for seed in (0, 1) for at, value in values.items()
    ]  # fmt: skip
    base = {"m": "a", "c": 0, "seed": 0}
    factors = {"method": {"a": {"m": "a"}, "b": {"m": "b"}}, "capacity": {"0": {"c": 0}, "1": {"c": 1}}}
    spec = {"kind": "variance", "name": "variance", "metrics": ("test/loss",), "factors": factors}

    def shares(rows):
        data = Data(pd.DataFrame(rows), ["m", "c"], base, {}, {"test/loss": Column("loss")})
        (panel,) = draw(spec, data).panels
        return charts.values(panel, "share of the variance")

    np.testing.assert_allclose(shares(rows), [0.8, 0.2, 0.0], atol=1e-6)
    # .4 in one of four cells: .1 more for the mean; means of methods and of capacities are .2 further apart, 1.1 and .6
    # from the mean; .1 is left: 1.21, .36 and .01 of 1.58.
    odd = [row | {"test/loss": row["test/loss"] + 0.4 * (row["m"] == "b" and row["c"] == 1)} for row in rows]
    np.testing.assert_allclose(shares(odd), np.array([1.21, 0.36, 0.01]) / 1.58, rtol=1e-4)


def rows_of(values, trend=lambda arm, at: 0.0):
    """Rows whose last values of an arm at a point are those of a function, `trend` above those at half the steps."""

    def history(side, at, metric):
        last = pd.Series(values(side["arm"], at), dtype=float)
        return pd.DataFrame([last - trend(side["arm"], at), last], [50, 100]) if len(last) else pd.DataFrame()

    return types.SimpleNamespace(history=history, config=experiment.configure("token_router", [])[1])


def test_a_lead_that_grows_by_hand():
    """Leads of .1, .3, .5 and of .2, .5, .8 at 1, 2 and 4: slopes .2 and .3, whose t interval is .25 +- 12.7 * .05."""
    leads = {1: [0.1, 0.2], 2: [0.3, 0.5], 4: [0.5, 0.8]}
    points = tuple((number, {"k": number}) for number in leads)
    write = Writer("same", "test/loss", unit="difference", prefix="my.")

    def judged(points, leads, trend=lambda arm, at: 0.0):
        claim = write.slope("grows", "it grows", "not asked", {"arm": "a"}, {"arm": "b"}, points)
        return claim.judge(rows_of(lambda arm, at: 1.0 + np.array(leads[at["k"]]) * (arm == "b"), trend))

    record = judged(points, leads)
    assert (record["ours"], record["n"], record["verdict"]) == (pytest.approx(0.25), 2, "inconclusive")
    np.testing.assert_allclose(record["interval"], [0.25 - 12.706 * 0.05, 0.25 + 12.706 * 0.05], rtol=1e-3)
    alike = {number: [lead, lead + 0.01, lead] for number, (lead, _) in leads.items()}
    assert judged(points, alike)["verdict"] == "supported"
    assert (
        judged(points, {number: [-lead for lead in three] for number, three in alike.items()})["verdict"] == "opposite"
    )
    # In two more doublings of the steps the lead at 4 falls from .5 to -.1, and the slope from .2 to -.1.
    falling = judged(points, alike, lambda arm, at: -0.3 * (arm == "b" and at["k"] == 4))
    assert falling["verdict"] == "inconclusive" and "could turn" in falling["reason"]
    # A seed that did not run at one number has no slope, and one number has none either.
    assert judged(points, leads | {4: [0.5]})["reason"] == "one seed"
    assert judged(points[:1], leads) == {}


def test_rank_correlation_by_hand():
    """Ranks 1, 2, 3, 4 against 1, 3, 2, 4: 1 - 6 (0 + 1 + 1 + 0) / (4 (16 - 1)) = .8; ties have their mean rank."""
    assert tokens.correlation(np.array([1.0, 2, 3, 4]), np.array([5.0, 7, 6, 9])) == pytest.approx(0.8)
    # 1.5, 1.5, 3 against 1, 2, 3, less their means: (-.5, -.5, 1) (-1, 0, 1) = 1.5, by sqrt(1.5 * 2).
    assert tokens.correlation(np.array([0.0, 0, 1]), np.array([1.0, 2, 3])) == pytest.approx(1.5 / np.sqrt(3))
    assert np.isnan(tokens.correlation(np.zeros(3), np.arange(3.0)))


def judged(losses, trend=lambda arm, at: 0.0):
    """The record of five routers with scores .1 to .5 by the probe `good`, and the reverse of a tenth by `bad`."""
    scores = {str(i): {"good": 0.1 * i, "bad": -0.01 * i} for i in range(5)}
    write = Writer("same", "test/loss", prefix="my.")
    claim = write.ranked("card", "in order", "not asked", {name: {"arm": name} for name in scores}, scores, 0.5)
    return claim.judge(rows_of(lambda arm, at: losses[arm], trend))


def test_an_order_that_was_foretold():
    """The lower the loss, the better. Without `bad` the order is the same, without `good` it is the reverse."""
    record = judged({str(i): [5.0 - i, 5.5 - i] for i in range(5)})
    assert (record["ours"], record["n"], record["verdict"]) == (pytest.approx(1.0), 5, "supported")
    assert record["text"].startswith("as high without any one of bad") and record["p"] < 0.05
    assert judged({str(i): [i, i + 0.5] for i in range(5)})["verdict"] == "opposite"
    assert judged({str(i): [5.0 - i] * 2 if i else [] for i in range(5)})["reason"] == "4 of 5 sides have run"
    # One seed decides nothing, nor an order that turns: in two more doublings i gains i times 1.2, from 5 - i.
    falling = {str(i): [5.0 - i, 5.5 - i] for i in range(5)}
    assert judged({name: losses[:1] for name, losses in falling.items()})["reason"] == "one seed"
    assert "could turn" in judged(falling, lambda arm, at: 0.6 * int(arm))["reason"]


def test_an_order_of_means_is_over_the_seeds_that_all_sides_have():
    """Seed 1 is 10 higher than seed 0. Means over the seeds of each side would rank those sides last that have it."""
    losses = {"0": [5.0, 15], "1": [4.0, 14], "2": [3.0, 13, 23], "3": [2.0, 12, 22], "4": [1.0, 11, 21]}
    assert judged(losses)["ours"] == pytest.approx(1.0)


def test_an_arm_has_as_many_candidates_as_it_has_rates():
    """Self-routing and online k-means have no rate of a router's: else equal candidates tie, at the edge of the grid.

    Those of the dense twin, whose config has no router, ended in two tracebacks once they had run.
    """
    _, config = experiment.configure("token_router:,smoke", ["rates=tuned", "tune.steps=10"])
    runs = plan_runs(config, ({"arms": config.arms},))
    counts = Counter(run.arm for run in runs if run.tuning)
    assert counts == dict.fromkeys(config.arms, 3) | {"learned": 9}
    early = override(config, {"router.freeze_at": 0.0})  # the learned router never learns, so its rate is none either
    tried = Counter(run.arm for run in plan_runs(early, ({"arms": ("learned",)},)) if run.tuning)
    assert tried == {"learned": 3}
    told = {run.arm for run in runs if tuning.column(run, {"router.learning_rate": 0.1}, 1)}
    assert told == {"learned"}
    dense = [run for run in runs if run.tuning and run.arm == "decoder_active"]
    losses = {run.key: {"eval/loss": loss} for run, loss in zip(dense, (2.0, 1.0, 3.0), strict=True)}
    assert tuning.best_rates(dense, losses) == {"optimizer.rate_scale": 1.0}


def test_the_order_of_hashed_layers_is_that_of_what_a_hash_adds():
    """2.655 less 1.669, 1.243, 1.126 and .994: .986, 1.412, 1.529 and 1.661 nats; the docstring has the order."""
    _, config = experiment.configure("token_router:layers", [])
    *_, claim = tokens.claim_layers(config)
    added = {name: scores["added"] for name, scores in claim.scores.items()}
    assert added["last 2"] == pytest.approx(1.529 + 1.661) and added["first 2"] == pytest.approx(0.986 + 1.412)
    order = sorted(added, key=added.get, reverse=True)
    assert ", ".join(order) in " ".join(tokens.__doc__.split()) and claim.named.keys() == added.keys()
