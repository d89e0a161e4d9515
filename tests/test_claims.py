"""Verdicts on tables whose answer is known, the gap, and the threats."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from routed.analysis import diagnosis
from routed.analysis.claims import Claim
from routed.analysis.verdicts import judge, to_json
from routed.contracts import UserError
from routed.plan.config import base
from routed.settings.tree import override

LOSSES = {
    "learned": [0.10, 0.11, 0.09, 0.10],
    "frozen": [1.0, 1.1, 0.9, 1.05],
    "frozen_sharp": [0.40, 0.45, 0.35, 0.40],
    "frozen_top1": [0.5, 0.5, 0.5, 0.5],
    "frozen_data": [0.2, 0.21, 0.19, 0.2],
}


def table(losses=LOSSES, train=0.01, samples=(64,), before=1.0, **columns):
    """Two evaluations of every arm and seed; the training loss is `before` times larger at the first."""
    rows = []
    for n in samples:
        for arm, values in losses.items():
            for seed, loss in enumerate(values):
                for step, factor in ((0, before), (10, 1.0)):
                    rows.append(
                        {"run": f"{arm}{seed}n{n}", "data.samples": n, "arm": arm, "seed": seed, "step": step, "status": "ok",
                         "test/loss": loss, "test/loss_soft": loss / 2, "train/loss": train * factor, "router/norm_ratio": 1.02 + 0.001 * seed, "router/moved": float(arm == "learned")}
                        | columns
                    )  # fmt: skip
    return pd.DataFrame(rows)


def order(lower="learned", higher="frozen", **changes):
    claim = Claim(
        "order", "x", "s", "p", "gaps_filled", "test/loss", {"arm": lower}, {"arm": higher}, {"data.samples": 64}
    )
    return claim._replace(**changes)


def verdict(claim, rows, swept=("data.samples",)):
    return judge((claim,), rows, base(), list(swept))[0]


def test_order_supported_opposite_and_inconclusive():
    assert verdict(order(), table())["verdict"] == "supported"
    assert verdict(order("frozen", "learned"), table())["verdict"] == "opposite"
    noisy = table(LOSSES | {"learned": [0.1, 3.0, 0.2, 2.0]})
    assert verdict(order(), noisy)["verdict"] == "inconclusive"


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match=r"claim x: unknown kind 'ordr' \(did you mean 'order'\?\)"):
        verdict(order(kind="ordr"), table())


def test_order_reports_the_geometric_mean_ratio():
    found = verdict(order(), table({"learned": [0.1, 0.2], "frozen": [0.2, 0.8]}))
    assert found["ours"] == pytest.approx(math.sqrt(2 * 4)) and found["n"] == 2


def test_pairs_are_matched_by_seed():
    rows = table({"learned": [0.1, 0.2, 0.3], "frozen": [0.2, 0.4, 0.6]}).sample(frac=1, random_state=1)
    found = verdict(order(), rows)
    assert found["interval"] == [pytest.approx(2.0), pytest.approx(2.0)]  # every pair has ratio 2 exactly


def test_fairest_is_the_best_frozen_control():
    assert "frozen_data" in verdict(order(higher="fairest"), table())["text"]


def test_no_verdict_before_convergence():
    moving = verdict(order(), table(train=0.5, before=2.0))
    assert moving["verdict"] == "inconclusive" and "not converged" in moving["reason"]
    assert verdict(order(), table(train=0.5, before=1.001))["verdict"] == "supported"  # a plateau passes


def test_not_run_and_one_seed():
    assert verdict(order(higher="oracle"), table())["verdict"] == "not run"
    assert verdict(order(), table({"learned": [0.1], "frozen": [1.0]}))["verdict"] == "inconclusive"


def test_constants_and_other_metrics_as_sides():
    assert verdict(order()._replace(higher={"value": 0.2}), table())["verdict"] == "supported"
    soft = order()._replace(lower={"arm": "learned", "metric": "test/loss_soft"}, higher={"arm": "learned"})
    assert verdict(soft, table())["ours"] == pytest.approx(2.0)


def test_points_of_the_same_runs_are_one_point_of_robustness():
    """A key that neither arm reads: its two values have rows of the same runs."""
    rows = pd.concat([table(samples=(64, 128)).assign(**{"data.radius": radius}) for radius in (0.3, 0.5)])
    swept = ["data.samples", "data.radius"]
    found = verdict(order(at={"data.samples": 64, "data.radius": 0.3}), rows, swept)
    assert found["robustness"] == {"held": 2, "tried": 2} and found["n"] == 4


def test_robustness_is_the_share_of_points_that_hold():
    good, bad = table(samples=(64,)), table({"learned": LOSSES["frozen"], "frozen": LOSSES["learned"]}, samples=(128,))
    found = verdict(order(), pd.concat([good, bad], ignore_index=True))
    assert found["robustness"] == {"held": 1, "tried": 2}


def test_a_claim_never_pools_points():
    """Steps are swept too; the claim says nothing of them, so it is judged at the config's own value: 4000."""
    seeds = [0, 1, 2, 3]
    both = pd.concat([table(steps=4000), table({a: v[::-1] for a, v in LOSSES.items()}, steps=2000)], ignore_index=True)
    both["run"] += both.steps.astype(str)
    found = verdict(order(), both, ("data.samples", "steps"))
    assert found["n"] == len(seeds) and found == verdict(order(), table()) | {"robustness": found["robustness"]}
    assert found["robustness"] == {"held": 2, "tried": 2}
    words = verdict(order(lower="learned", at={}), both.assign(**{"data.name": "gmm"}), ("data.samples", "data.name"))
    assert words["n"] > 0  # a key whose values are words
    side = {"arm": "frozen", "data.name": "gmm"}
    named = both.assign(**{"data.name": "gmm"})
    assert "data.name=gmm" in verdict(order()._replace(higher=side), named, ("data.name", "steps"))["text"]


def test_small_effects_say_so():
    rows = table({"learned": [1.0, 1.0, 1.0, 1.01], "frozen": [1.03, 1.04, 1.03, 1.04]})
    found = verdict(order(), rows)
    assert found["verdict"] == "supported" and "smallest effect" in found["reason"]


def number(value, comparability="gaps_filled"):
    return Claim(
        "number", "x", "s", value, comparability, "router/norm_ratio", {"arm": "learned"}, {}, {"data.samples": 64}
    )


def test_numbers_on_an_unknown_scale_stand_beside_ours():
    found = verdict(number(0.04)._replace(kind="beside", metric="test/loss"), table())
    # Mean of .10, .11, .09, .10; t(3) s / sqrt(4) = 3.182 x .00816 / 2 = .0130.
    assert found["ours"] == pytest.approx(0.1) and found["interval"] == pytest.approx([0.087, 0.113], abs=1e-4)
    assert (found["verdict"], found["p"]) == ("not comparable", None)
    missing = number(0.04)._replace(kind="beside", lower={"arm": "oracle"})
    assert verdict(missing, table())["verdict"] == "not run"


def test_shares_of_successful_runs_are_equal_within_a_twentieth():
    claim = order()._replace(
        kind="null", metric="won", lower={"value": 0.5}, higher={"arm": "learned"}, unit="probability"
    )
    rows = table({"learned": [0.1] * 2000})
    assert verdict(claim, rows.assign(won=rows.seed % 2))["verdict"] == "supported"  # 1.96 x .5 / sqrt(2000) = .022
    assert verdict(claim, rows.assign(won=rows.seed % 3 == 0).astype({"won": float}))["verdict"] == "opposite"
    few = table({"learned": [0.1] * 100})
    assert verdict(claim, few.assign(won=few.seed % 2))["verdict"] == "inconclusive"  # .098 is wider than .05


def test_numbers_are_compared_with_a_prediction_interval():
    assert verdict(number(1.0215), table())["verdict"] == "reproduced"
    assert verdict(number(1.5), table())["verdict"] == "not reproduced"
    assert verdict(number(1.0215, "stand_in"), table())["verdict"] == "inconclusive"


def test_wide_intervals_are_called_underpowered():
    rows = table()
    rows["router/norm_ratio"] = rows.seed.map({0: 0.1, 1: 3.0, 2: 0.2, 3: 2.0})
    assert "underpowered" in verdict(number(1.0), rows)["reason"]


def test_null_is_an_equivalence_test():
    null = order()._replace(kind="null")
    same = table({"learned": [1.0, 1.01, 0.99, 1.0], "frozen": [1.0, 1.0, 1.0, 1.01]})
    assert verdict(null, same)["verdict"] == "supported"
    assert verdict(null, table())["verdict"] == "opposite"  # a factor 10 is outside of the margin for certain
    noisy = table({"learned": [1.0, 0.7, 1.4, 1.0], "frozen": [1.0, 1.0, 1.0, 1.0]})
    assert verdict(null, noisy)["verdict"] == "inconclusive"


def test_a_family_is_adjusted():
    weak = table({"learned": [1.0, 1.0, 1.0, 1.0], "frozen": [1.3, 1.1, 1.02, 1.2]})  # p about .06 .. .03
    alone = judge((order(),), weak, base(), ["data.samples"])[0]
    many = judge((order(), *[order("frozen_x", "frozen", id=str(i)) for i in range(3)]), weak, base(), ["data.samples"])
    assert alone["p"] == alone["p_adjusted"]
    assert many[0]["p_adjusted"] == alone["p"]  # claims that did not run are no tests


def test_diverged_runs_do_not_count():
    rows = table()
    rows.loc[(rows.arm == "learned") & (rows.seed == 0), "status"] = "diverged"
    assert verdict(order(), rows)["n"] == 3


def test_json_has_no_nan():
    text = to_json(judge((order(),), table({"learned": [0.1], "frozen": [1.0]}), base(), ["data.samples"]))
    assert "NaN" not in text and json.loads(text)[0]["interval"] == [None, None]


def test_the_gap_adds_up():
    parts = diagnosis.gap(table()[lambda r: r.step == 10]).set_index("part")["mean"]
    whole = np.mean(np.log(np.array(LOSSES["frozen"]) / np.array(LOSSES["learned"])))
    assert parts["sharpness"] + parts["initial partition"] + parts["learning to route"] == pytest.approx(whole)
    assert parts["whole gap, top-1"] == pytest.approx(whole)
    assert not len(diagnosis.gap(table({"learned": [0.1], "frozen": [1.0]})))


def test_a_gap_that_may_be_none_has_no_shares():
    """log(1.02) to log(1 / 1.02), mean about 0: each part would be many times the whole."""
    for frozen, some in ((LOSSES["frozen"], 1.0), ([0.102, 0.108, 0.092, 0.098], 0.0)):
        shares = diagnosis.gap(table(LOSSES | {"frozen": frozen})[lambda r: r.step == 10])["share"]
        assert shares.sum() == pytest.approx(some) and shares.isna().all() == (not some)


def test_threats_are_filled_from_the_rows():
    answers = dict(diagnosis.threats(table(train=0.5), base(), ["data.samples"]))
    assert "above the gate" in answers["Converged?"] and "frozen 0.5" in answers["Converged?"]
    ungated = dict(diagnosis.threats(table(train=0.5), override(base(), {"gate.train_loss": 1.0}), ["data.samples"]))
    assert ungated["Converged?"].startswith("not asked: the file has no gate")
    assert answers["Diverged runs"] == "0 of 20" and "4 seeds" in answers["Seeds and power"]
    assert "file's rates" in answers["Tuned per arm?"]
    assert answers["Frozen is frozen"] == "router parameters differ from step 0 in: learned"
    loose = override(base(), {"selection.eval.renormalise": False})
    assert "do not sum to 1 in evaluation" in dict(diagnosis.threats(table(), loose, ["data.samples"]))["Weight scale"]
