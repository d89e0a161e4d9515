"""Verdicts on tables whose answer is known, the gap, and the threats."""

import ast
import dataclasses
import json
import math
import pathlib
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from routed.analysis import diagnosis, page, verdicts
from routed.analysis.claims import FROZEN, KINDS, LEARNED, Measured, OneSide, Writer
from routed.analysis.claims.preconditions import Precondition
from routed.analysis.verdicts import judge, to_json, unanswered
from routed.contracts import UserError
from routed.plan import experiment
from routed.plan.arms import ARMS, Arm
from routed.plan.config import base
from routed.settings.tree import override

experiment.load("law")  # registers the kind "prediction"

LOSSES = {
    "learned": [0.10, 0.11, 0.09, 0.10],
    "frozen": [1.0, 1.1, 0.9, 1.05],
    "frozen_sharp": [0.40, 0.45, 0.35, 0.40],
    "frozen_top1": [0.5, 0.5, 0.5, 0.5],
    "frozen_data": [0.2, 0.21, 0.19, 0.2],
}


def table(losses=LOSSES, samples=(64,), halfway=1.0, start=1.0, **columns):
    """Evaluations at steps 0, 5 and 10 of every arm and seed; test losses are `halfway` times the last at step 5."""
    rows = []
    for n in samples:
        for arm, values in losses.items():
            factor = halfway.get(arm, 1.0) if isinstance(halfway, dict) else halfway
            for seed, loss in enumerate(values):
                for step, test in ((0, start), (5, loss * factor), (10, loss)):
                    rows.append(
                        {"run": f"{arm}{seed}n{n}", "data.samples": n, "arm": arm, "seed": seed, "step": step,
                         "status": "ok",
                         "test/loss": test, "test/loss_soft": test / 2, "train/loss": test,
                         "router/norm_ratio": 1.02 + 0.001 * seed if step else 1.3,
                         "router/params_changed": float(arm == "learned")}
                        | columns
                    )  # fmt: skip
    return pd.DataFrame(rows)


LAST = table()[lambda rows: rows.step == 10]


def order(lower="learned", higher="frozen", **changes):
    return comparison("order", lower, higher, **changes)


def comparison(kind, lower="learned", higher="frozen", **changes):
    """A claim of a kind about two sides, each an arm or a whole side."""
    lower, higher = ({"arm": side} if isinstance(side, str) else side for side in (lower, higher))
    write = getattr(Writer("gaps_filled", at={"data.samples": 64}), kind)
    return write(changes.pop("id", "x"), "s", "p", lower, higher, **changes)


def verdict(claim, rows, swept=("data.samples",)):
    return judge((claim,), rows, base(), list(swept))[0]


def test_order_supported_opposite_and_inconclusive():
    assert verdict(order(), table())["verdict"] == "supported"
    assert verdict(order("frozen", "learned"), table())["verdict"] == "opposite"
    noisy = table(LOSSES | {"learned": [0.1, 3.0, 0.2, 2.0]})
    assert verdict(order(), noisy)["verdict"] == "inconclusive"


@pytest.mark.parametrize(
    ("lower", "higher", "at_edge", "found"),
    [
        ("learned", "frozen", "frozen", "inconclusive"),
        ("learned", "frozen", "learned", "supported"),  # at a better rate it would only win by more
        ("frozen", "learned", "frozen", "inconclusive"),
        ("frozen", "learned", "learned", "opposite"),
        ("learned", "fairest", "frozen_top1", "inconclusive"),  # any of them might be the fairest
        ("learned", "fairest", "frozen", "supported"),
    ],
)
def test_who_lost_with_a_rate_at_the_edge_of_the_grid_may_have_a_better_one(lower, higher, at_edge, found):
    """The grid is .3, 1, 3."""
    rows = table().assign(rates="tuned", **{"train/rate_scale": 1.0})
    assert verdict(order(lower, higher), rows)["verdict"] != "inconclusive"
    rows.loc[rows.arm == at_edge, "train/rate_scale"] = np.float32(0.3)
    record = verdict(order(lower, higher), rows)
    assert record["verdict"] == found
    if found == "inconclusive":
        assert f"but {at_edge} chose 0.3 times its rates, the edge of what was tried" in record["reason"]
    assert verdict(order(lower, higher), rows.assign(rates="paper"))["verdict"] != "inconclusive"  # no grid was tried


def test_a_part_of_an_accuracy_is_better_where_it_is_higher():
    """The accuracy of one language: learned has more and wins, so its lost run matters, and frozen's does not."""
    rows = table().assign(**{"test/accuracy/de": lambda rows: 1 - rows["test/loss"] / 2})
    claim = order("frozen", "learned", metric="test/accuracy/de")
    assert verdict(claim, rows)["verdict"] == "supported"
    for arm, expected in (("frozen", "supported"), ("learned", "inconclusive")):
        lost = rows.assign(status=np.where((rows.arm == arm) & (rows.seed == 3), "diverged", rows.status))
        assert verdict(claim, lost)["verdict"] == expected
    verdicts.check_parts(order("fairest", "learned", metric="test/accuracy/de"), base())


def test_an_unknown_kind_is_refused():
    with pytest.raises(
        UserError, match=r"claims: unknown kind 'ordr' \(did you mean 'order'\?\); known: order, null, n"
    ):
        Writer("same").ordr("x", "s", "p", {}, {})
    assert not hasattr(Writer("same"), "ordr")


def test_a_users_kind_needs_no_edit_of_the_package(monkeypatch):
    """It has a field of its own and a method of the writer; its p value joins the family of the figure."""

    @dataclasses.dataclass(frozen=True)
    class Even(OneSide):
        kind = "even"
        p: float

        def judge(self, rows):
            values = rows.final_values(self.side, self.setup.at, self.setup.metric)
            return {"n": len(values), "verdict": "supported", "p": self.p}

    monkeypatch.setitem(KINDS, "even", Even)
    write = Writer("same", at={"data.samples": 64}, prefix="mine.")
    claims = tuple(write.even(id, "s", "p", {"arm": "learned"}, p) for id, p in (("sure", 0.01), ("unsure", 0.04)))
    sure, unsure = judge(claims, table(), base(), ["data.samples"])
    assert (sure["id"], sure["kind"], sure["n"], sure["verdict"]) == ("mine.sure", "even", 4, "supported")
    assert sure["p_adjusted"] == 0.02 and unsure["verdict"] == "supported"
    (strict,) = judge((claims[1].replace(alpha=0.01),), table(), base(), ["data.samples"])
    assert strict["verdict"] == "inconclusive"
    monkeypatch.setattr(Even, "judge", lambda self, rows: None if self.p > 0.02 else Even.fails())
    broken, empty, other = judge((*claims, order()), table(), base(), ["data.samples"])
    assert broken["reason"] == "its kind ended in an error: AttributeError: type object 'Even' has no attribute 'fails'"
    assert "TypeError" in empty["reason"] and broken["verdict"] == "not judged" and other["verdict"] == "supported"


def test_two_claims_of_one_id_are_refused():
    asked = SimpleNamespace(claims=lambda config: (order(), order()), plots=lambda config: ())
    with pytest.raises(UserError, match="two claims have the name x: give each a name of its own"):
        page.check(asked, base())


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_fewer_than_ten_fields(kind):
    assert len(dataclasses.fields(KINDS[kind])) < 10 and KINDS[kind].kind == kind


def test_claims_and_verdicts_know_no_kind_that_registers_itself():
    folder = pathlib.Path(verdicts.__file__).parent
    outside = {KINDS[kind].__module__ for kind in KINDS} - {
        "routed.analysis.claims.comparison",
        "routed.analysis.claims.number",
    }
    assert len(outside) > 3
    for path in (folder / "verdicts.py", *(folder / "claims").glob("*.py")):
        imported = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        assert not imported & outside, path


def test_order_reports_the_geometric_mean_ratio():
    found = verdict(order(), table({"learned": [0.1, 0.2], "frozen": [0.2, 0.8]}))
    assert found["ours"] == pytest.approx(math.sqrt(2 * 4)) and found["n"] == 2


def test_pairs_are_matched_by_seed():
    rows = table({"learned": [0.1, 0.2, 0.3], "frozen": [0.2, 0.4, 0.6]}).sample(frac=1, random_state=1)
    found = verdict(order(), rows)
    assert found["interval"] == [pytest.approx(2.0), pytest.approx(2.0)]  # every pair has ratio 2 exactly


def test_fairest_is_the_best_frozen_control():
    assert "frozen_data" in verdict(order(higher="fairest"), table())["text"]


def test_a_claim_against_the_fairest_is_one_against_every_control():
    """frozen_top1 has the larger mean and the wider interval: it alone would be inconclusive, so the claim is."""
    losses = {"learned": [1.0] * 4, "frozen_data": [2.0, 2.1, 1.9, 2.0], "frozen_top1": [2.1, 90.0, 0.5, 4.0]}
    found = verdict(order(higher="fairest"), table(losses))
    assert found["verdict"] == "inconclusive" and "frozen_data" in found["text"]
    lost = table(losses)
    lost.loc[(lost.arm == "frozen_top1") & (lost.seed > 1), "status"] = "diverged"
    assert verdict(order(higher="fairest"), lost)["n"] == 4  # the seeds of the other control stay
    with pytest.raises(UserError, match="claim x: only claims of kind order or prediction know the fairest control"):
        verdict(comparison("null", higher="fairest"), table())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"unit": "percent"}, "unit='percent': use one of ratio, difference, probability"),
        ({"at": {"data.sample": 64}}, "no setting 'data.sample' .did you mean 'data.samples'"),
        ({"higher": "frozen_kmean"}, "no arm 'frozen_kmean' .did you mean 'frozen_kmeans'"),
        ({"over": ("data.smples",)}, "no setting 'data.smples' .did you mean 'data.samples'"),
        ({"needs": (Precondition("orcale_cluster", "learned", 1.0, "test/loss"),)}, "no arm 'orcale_cluster'"),
        ({"higher": {"data.samples": 64}}, "the side .* has no arm"),
        ({"higher": {"arm": "frozen", "data.samples": "64"}}, "data.samples='64' is str, must be int"),
        ({"metric": "test/los"}, "no column 'test/los' .did you mean 'test/loss'"),
        ({"comparability": "equal"}, "comparability='equal': use one of same, gaps_filled, scaled, stand_in"),
        ({"lower": "frozen", "higher": "frozen"}, "both sides are {'arm': 'frozen'}"),
        ({"lower": "fairest", "higher": "learned"}, "the fairest control must be the side"),
        ({"metric": "test/accuracy", "higher": "fairest"}, "the fairest control must be the side"),
        ({"kind": "null", "higher": "fairest"}, "only claims of kind order or prediction know the fairest control"),
    ],
)
def test_a_claim_that_nothing_can_judge_is_refused_before_training(changes, told):
    def check(**changes):
        claim = comparison(changes.pop("kind", "order"), **changes)
        page.check(SimpleNamespace(claims=lambda config: (claim,), plots=lambda config: ()), base())

    with pytest.raises(UserError, match=f"claim x: .*{told}"):
        check(**changes)
    check()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda write: write.number("x", "s", "about .3", uninformed=1.0), "needs the paper's number"),
        (lambda write: write.number("x", "s", Measured(0.3, 0.1, 1)), "a standard deviation needs 2 runs"),
        (lambda write: write.share("x", "s", "p", LEARNED, {"value": 0.5}, FROZEN), "the side .* has no arm"),
        (lambda write: None, "claims of the figure must return a tuple"),
    ],
)
def test_a_claim_that_would_end_in_an_error_is_refused_before_training(make, told):
    write = Writer("gaps_filled", at={"data.samples": 64})
    with pytest.raises(UserError, match=told):
        page.check(SimpleNamespace(claims=lambda config: (make(write),), plots=lambda config: ()), base())


def test_a_control_that_did_not_control_is_no_fair_control():
    """Sharpening changed nothing: equal to frozen to the last bit."""
    losses = {arm: LOSSES[arm] for arm in ("learned", "frozen")} | {"frozen_sharp": LOSSES["frozen"]}
    assert verdict(order(higher="fairest"), table(losses))["verdict"] == "not run"


def test_a_verdict_stands_while_going_on_would_not_turn_it():
    falling = verdict(order(), table(halfway=2.0))  # both sides fall alike
    assert falling["verdict"] == "supported" and falling["later"][0] == pytest.approx(falling["ours"])
    # The frozen arm falls by 2^3 over the tail's doubling: at 4 times the steps its loss is 1 / 64, below learned's .1.
    turning = verdict(order(), table(halfway={"frozen": 8.0}))
    assert turning["verdict"] == "inconclusive" and "supported now, but could turn" in turning["reason"]
    assert turning["later"][0] == pytest.approx(turning["ours"] / 64)
    # The learned arm still falls: .05 < .1 now, .1 / 16 later.
    late = verdict(order(higher={"value": 0.05}), table(halfway={"learned": 4.0}))
    assert late["verdict"] == "inconclusive" and "opposite now" in late["reason"]
    # Too noisy to tell now. The learned arm falls to 1 / 64 later, where each of its runs wins.
    soon = verdict(order(), table(LOSSES | {"learned": [0.1, 3.0, 0.2, 2.0]}, halfway={"learned": 8.0}))
    assert soon["verdict"] == "inconclusive" and soon["reason"].startswith("could become supported; at 4 times")


def test_the_gate_needs_no_training_loss_below_a_limit():
    high = {arm: [5 * value for value in values] for arm, values in LOSSES.items()}
    assert verdict(order(), table(high))["verdict"] == "supported"


def test_one_evaluation_says_nothing_of_the_tail():
    found = verdict(order(), table()[lambda rows: rows.step != 5])
    assert found["verdict"] == "inconclusive" and "lower eval_every" in found["reason"]
    config = override(base(), {"gate.horizon": 1.0})
    alone = judge((order(),), table()[lambda rows: rows.step == 10], config, ["data.samples"])[0]
    assert alone["verdict"] == "supported"


def test_how_often_runs_are_evaluated_turns_no_verdict():
    """Power laws that cross at 3 times the steps: L = t^-.5 and 3^.25 t^-.75 (T = 1)."""
    verdicts = set()
    for every in (1, 2, 4, 8, 16):
        rows = [
            {"run": f"{arm}{seed}", "arm": arm, "seed": seed, "step": step, "status": "ok",
             "test/loss": loss * (1 + seed / 1000)}
            for step in range(every, 33, every)
            for arm, loss in (("learned", (step / 32) ** -0.5), ("frozen", 3**0.25 * (step / 32) ** -0.75))
            for seed in range(3)
        ]  # fmt: skip
        verdicts.add(judge((order(at={}),), pd.DataFrame(rows), base(), [])[0]["reason"][:31])
    assert verdicts == {"supported now, but could turn; "}


def test_a_smoke_run_judges_nothing():
    config = override(base(), {"scale": "smoke"})
    for claim in (order(), order("frozen", "learned"), number(1.5), comparison("null")):
        found = judge((claim,), table(), config, ["data.samples"])[0]
        assert (found["verdict"], found["p"]) == ("not judged", None) and found["ours"] is not None


def test_not_run_and_one_seed():
    assert verdict(order(higher="oracle"), table())["verdict"] == "not run"
    assert verdict(order(), table({"learned": [0.1], "frozen": [1.0]}))["verdict"] == "inconclusive"


def test_constants_and_other_metrics_as_sides():
    assert verdict(order(higher={"value": 0.2}), table())["verdict"] == "supported"
    soft = order({"arm": "learned", "metric": "test/loss_soft"}, "learned")
    assert verdict(soft, table())["ours"] == pytest.approx(2.0)


def test_points_of_the_same_runs_are_one_point_of_robustness():
    """A key that neither arm reads: its two values have rows of the same runs."""
    rows = pd.concat([table(samples=(64, 128)).assign(**{"data.radius": radius}) for radius in (0.3, 0.5)])
    swept = ["data.samples", "data.radius"]
    at, over = {"data.samples": 64, "data.radius": 0.3}, ("data.samples", "data.radius")
    found = verdict(order(at=at, over=over), rows, swept)
    assert found["robustness"] == {"held": 2, "tried": 2} and found["n"] == 4


def test_robustness_is_the_share_of_points_that_hold():
    good, bad = table(samples=(64,)), table({"learned": LOSSES["frozen"], "frozen": LOSSES["learned"]}, samples=(128,))
    both = pd.concat([good, bad], ignore_index=True)
    found = verdict(order(over=("data.samples",)), both)
    assert found["robustness"] == {"held": 1, "tried": 2}
    assert verdict(order(), both)["robustness"] is None  # it names no key over which it is tried
    # Of rates, 4 of 6 pairs differ: p = 2 / 2^4 of McNemar's test. Values that are equal in every seed hold.
    rates = table({"learned": [0.0] * 6, "frozen": [1.0] * 4 + [0.0] * 2}, samples=(64, 128))
    few = verdict(order(unit="probability", over=("data.samples",)), rates)
    assert few["p"] == pytest.approx(0.125) and few["robustness"] == {"held": 0, "tried": 2}
    alike = table({"learned": [0.5] * 4, "frozen": [1.0] * 4}, samples=(64, 128))
    assert verdict(order(over=("data.samples",)), alike)["robustness"] == {"held": 2, "tried": 2}


def test_a_claim_never_pools_points():
    """Steps are swept too; the claim says nothing of them, so it is judged at the config's own value: 4000."""
    seeds = [0, 1, 2, 3]
    both = pd.concat([table(steps=4000), table({a: v[::-1] for a, v in LOSSES.items()}, steps=2000)], ignore_index=True)
    both["run"] += both.steps.astype(str)
    found = verdict(order(over=("steps",)), both, ("data.samples", "steps"))
    assert found["n"] == len(seeds) and found == verdict(order(), table()) | {"robustness": found["robustness"]}
    assert found["robustness"] == {"held": 2, "tried": 2}
    words = verdict(
        order(lower="learned", at={}), both.assign(**{"data.name": "gmm"}), ("data.samples", "steps", "data.name")
    )
    assert words["n"] > 0  # a key whose values are words
    for name, told in (
        ("xor", True),
        ("gmm", False),
    ):  # of another arm what the figure's config says anyway is not repeated
        side, named = {"arm": "frozen", "data.name": name}, both.assign(**{"data.name": name})
        text = verdict(order(higher=side), named, ("data.name", "steps"))["text"]
        assert (f"data.name={name}" in text) == told


def test_small_effects_say_so():
    rows = table({"learned": [0.5, 0.5, 0.5, 0.505], "frozen": [0.515, 0.52, 0.515, 0.52]})
    found = verdict(order(), rows)
    assert found["verdict"] == "supported" and "smallest effect" in found["reason"]


def number(value, comparability="gaps_filled"):
    return Writer(comparability, "router/norm_ratio", {"data.samples": 64}).number("x", "s", value)


def beside(comparability="gaps_filled", **changes):
    return Writer(comparability, "test/loss", {"data.samples": 64}).beside("x", "s", 0.04, **changes)


def test_numbers_on_an_unknown_scale_stand_beside_ours():
    found = verdict(beside(), table())
    # Mean of .10, .11, .09, .10; t(3) s / sqrt(4) = 3.182 x .00816 / 2 = .0130.
    assert found["ours"] == pytest.approx(0.1) and found["interval"] == pytest.approx([0.087, 0.113], abs=1e-4)
    assert (found["verdict"], found["p"]) == ("not comparable", None)
    assert verdict(beside("scaled"), table())["reason"] == "ours is scaled down"
    assert verdict(beside(side={"arm": "oracle"}), table())["verdict"] == "not run"


def test_an_arm_that_ran_without_the_metric_is_named():
    claim = order({"arm": "learned", "metric": "regret/predicted"})
    found = verdict(claim, table().assign(**{"regret/predicted": np.nan}))
    assert (found["verdict"], found["text"]) == ("not run", "learned ran, and has no regret/predicted there")
    assert verdict(order("oracle"), table())["text"] == "no run of oracle"


def test_a_seed_that_ends_without_a_number_is_left_out_alone():
    """Seed 3 of learned is 1.2 halfway and has no number at the end; seeds 0 to 2 keep their last."""
    rows = table({"learned": [0.1, 0.2, 0.3, 0.4], "frozen": [1.0, 1.0, 1.0, 1.0]}, halfway=3.0)
    rows.loc[(rows.arm == "learned") & (rows.seed == 3) & (rows.step == 10), "test/loss"] = np.nan
    found = verdict(order(), rows)
    # Geometric means of 1 / .1, 1 / .2, 1 / .3: (10 * 5 * 3.333) ** (1 / 3) = 5.503.
    assert found["n"] == 3 and found["ours"] == pytest.approx(5.503, rel=1e-3)


def test_values_below_0_have_no_ratio():
    """They would count as 1e-12: a tie if both are below 0, 10^11-fold ahead if one is."""
    for both in (-1.0, 1.0):
        rows = table({"learned": [-0.5, -0.6, -0.55], "frozen": [0.1 * both, 0.2 * both, 0.15 * both]})
        found = verdict(order(), rows)
        assert found["verdict"] == "not judged" and "unit='difference'" in found["reason"]
    assert verdict(comparison("null", {"arm": "learned"}, {"value": 0.0}), table())["verdict"] != "not judged"


def test_a_ratio_beyond_all_numbers_ends_no_judgement():
    """Each side reaches 0 in another of two seeds, so later ratios have ends beyond e^709."""
    rows = table({"learned": [0.0, 0.1], "frozen": [0.2, 0.0]}, halfway=1e6, start=1e6)
    assert verdict(order(), rows)["verdict"] == "inconclusive"


def test_text_is_predicted_better_than_counts_by_the_interval():
    """A mean of .10 is not told from a 5-gram's .11 where seeds have .05 and .15, nor from a count without a value."""
    losses = {"learned": [0.05, 0.15, 0.05, 0.15], "frozen": [1.0, 1.1, 0.9, 1.0]}
    rows = table(losses).assign(**{"eval/loss": lambda rows: rows["test/loss"], "eval/ngram": 5.0})
    assert "not competent" not in verdict(order(), rows)["reason"]
    close = rows.assign(**{"eval/ngram": rows["eval/ngram"].where(rows.arm != "learned", 0.11)})
    assert verdict(order(), close)["reason"].startswith("not competent: learned has 0.1 nats a token, a 5-gram model")
    assert verdict(order(), rows.assign(**{"eval/ngram": np.nan}))["reason"].startswith("not known to be competent")


def test_the_edge_of_a_grid_is_that_of_an_arms_own_rate(monkeypatch):
    """The router's rate of the arm is .05, so .15 is the highest of .3, 1 and 3 times its rate; the config has .1."""
    monkeypatch.setitem(ARMS, "frozen", Arm({"router.learning_rate": 0.05}, "slow", "#000000"))
    config = override(base(), {"tune.router_multipliers": (0.3, 1.0, 3.0)})
    for rate, found in ((0.15, "inconclusive"), (0.05, "supported")):
        rows = table().assign(rates="tuned", **{"train/rate_scale": 1.0, "train/router_rate": np.float32(rate)})
        rows.loc[rows.arm == "learned", "train/router_rate"] = np.float32(0.1)
        assert judge((order(),), rows, config, ["data.samples"])[0]["verdict"] == found


def test_shares_of_successful_runs_are_equal_within_a_twentieth():
    claim = comparison("null", {"value": 0.5}, "learned", metric="won", unit="probability")
    rows = table({"learned": [0.1] * 2000})
    assert verdict(claim, rows.assign(won=rows.seed % 2))["verdict"] == "supported"  # 1.96 x .5 / sqrt(2000) = .022
    assert verdict(claim, rows.assign(won=rows.seed % 3 == 0).astype({"won": float}))["verdict"] == "opposite"
    few = table({"learned": [0.1] * 100})
    assert verdict(claim, few.assign(won=few.seed % 2))["verdict"] == "inconclusive"  # .098 is wider than .05


def test_runs_that_all_succeed_leave_a_doubt():
    """16 of 16 are not surely above .9: their chance is .9^16 = .185. Nor are two pairs of successes equal shares."""
    rows = table({"learned": [0.1] * 16, "oracle": [0.1] * 16}).assign(won=1.0)
    above = order({"value": 0.9}, "learned", metric="won", unit="probability")
    found = verdict(above, rows)
    # Wilson: (1 + z^2 / 32 - z sqrt(z^2 / 1024)) / (1 + z^2 / 16) = 1 / (1 + 3.8415 / 16) = .8064.
    assert found["verdict"] == "inconclusive" and found["interval"] == pytest.approx([0.8064 - 0.9, 0.1], abs=1e-4)
    below = above.replace(lower={"arm": "learned"}, higher={"value": 0.9})
    assert verdict(below, rows)["interval"] == pytest.approx([-0.1, 0.9 - 0.8064], abs=1e-4)
    many = table({"learned": [0.1] * 60}).assign(won=1.0)
    assert verdict(above, many)["verdict"] == "supported"  # .9^60 = .0018; from 1 / (1 + 3.84 / 60) = .940 on
    alike = comparison("null", higher="oracle", metric="won", unit="probability")
    assert verdict(alike, rows)["verdict"] == "inconclusive"  # .95^16 = .44
    # 3 of 3 against .25 +- .05: .3^3, doubled. Two pairs that all differ: 2 / 2^2 (McNemar). A t test had 0 for both.
    far = alike.replace(higher={"value": 0.25})
    assert verdict(far, rows[rows.seed < 3])["p"] == pytest.approx(0.054)
    pairs = rows[rows.seed < 2].assign(won=(rows.arm == "oracle").astype(float))
    assert verdict(alike, pairs)["p"] == pytest.approx(0.5) and verdict(alike, pairs)["verdict"] == "inconclusive"
    sixty = table({"learned": [0.1] * 60, "oracle": [0.1] * 60}).assign(won=1.0)
    assert verdict(alike, sixty)["verdict"] == "supported" and verdict(alike, sixty)["p"] == pytest.approx(0.95**60)


def test_shares_of_the_same_runs_are_compared_by_those_that_differ():
    """Six of eight runs succeed with learned only, none with the oracle only: 2 / 2^6 = .031 (McNemar's exact test)."""
    rows = table({"learned": [0.1] * 8, "oracle": [0.1] * 8})
    rows["won"] = np.where(rows.arm == "learned", 1.0, (rows.seed >= 6).astype(float))
    found = verdict(order("oracle", "learned", metric="won", unit="probability"), rows)
    assert found["p"] == pytest.approx(2 / 2**6) and found["verdict"] == "supported"


def test_sides_are_named_with_means_of_their_ratio():
    """Seeds 0 and 1 are common: sqrt(.1 * .4) = .2 and sqrt(.8 * .8) = .8, ratio 4; seed 2 of frozen is alone."""
    rows = table({"learned": [0.1, 0.4], "frozen": [0.8, 0.8, 9.0]})
    assert verdict(order(), rows)["text"].startswith("learned 0.2 against frozen 0.8 (geometric means); ratio 4 ")


def test_numbers_are_compared_with_a_prediction_interval():
    assert verdict(number(1.0215), table())["verdict"] == "reproduced"
    assert verdict(number(1.5), table())["verdict"] == "not reproduced"
    for setting in ("stand_in", "scaled"):  # can carry a number in neither direction
        for value, where in ((1.0215, "inside"), (1.5, "outside")):
            found = verdict(number(value, setting), table())
            assert found["verdict"] == "not comparable" and f"{where} of the interval" in found["reason"]


def test_a_number_that_chance_has_too_is_underpowered():
    """An accuracy of .87 is in one run's interval [.22, 1.14]: .68 -+ 3.182 x .1289 x sqrt(1 + 1/4); chance is .5."""
    rows = table()
    rows["accuracy"] = np.where(rows.step == 0, 0.5, rows.seed.map({0: 0.58, 1: 0.58, 2: 0.71, 3: 0.85}))
    claim = number(0.87).replace(metric="accuracy")
    found = verdict(claim, rows)
    assert found["interval"] == pytest.approx([0.2216, 1.1384], abs=1e-4)
    assert found["verdict"] == "inconclusive" and "also holds 0.5, what an untrained network has" in found["reason"]
    # .1 is outside, but an interval of .92 is wider than half of .77, and four runs are too few.
    few = verdict(claim.replace(uninformed=0.1), rows)
    assert few["verdict"] == "inconclusive" and "4 runs, and an interval wider" in few["reason"]


def test_a_number_is_reproduced_by_eight_runs_or_a_narrow_interval():
    """Ratios 1.02, 1.021, 1.022, 1.023 have an interval of 2 x 3.182 x .00129 x sqrt(5 / 4) = .0092; untrained 1.3."""
    assert verdict(number(1.0215), table())["verdict"] == "reproduced"
    close = verdict(number(1.0215).replace(rivals=(1.035,)), table())  # half of .0135 is narrower
    assert close["verdict"] == "inconclusive" and "1.03, another value of the paper" in close["reason"]
    eight = table({"learned": [0.1 + 0.01 * seed for seed in range(8)]})
    assert verdict(number(1.0235).replace(rivals=(1.04,)), eight)["verdict"] == "reproduced"
    wide = table({"learned": [0.08, 0.1, 0.12]})  # .1 +- 4.303 x .02 x sqrt(4 / 3) = [.0006, .199], against .01 and 1
    loss = number(0.01).replace(uninformed=1.0, metric="test/loss")
    assert verdict(loss, wide)["verdict"] == "inconclusive"  # .199 / .0006 is more than the root of 1 / .01
    assert verdict(loss.replace(unit="difference"), wide)["verdict"] == "reproduced"
    both = verdict(number(1.0215).replace(rivals=(1.0225,)), table())
    assert "also holds 1.02, another value of the paper" in both["reason"]


def test_a_number_that_still_moves_is_not_judged():
    rows = table()
    rows.loc[rows.step == 5, "router/norm_ratio"] *= 1.2
    found = verdict(number(1.0215), rows)
    assert found["verdict"] == "inconclusive" and "reproduced now, but could turn" in found["reason"]


def test_null_is_an_equivalence_test():
    null = comparison("null")
    same = table({"learned": [0.5, 0.505, 0.495, 0.5], "frozen": [0.5, 0.5, 0.5, 0.505]})
    assert verdict(null, same)["verdict"] == "supported"
    assert verdict(null, table())["verdict"] == "opposite"  # a factor 10 is outside of the margin for certain
    noisy = table({"learned": [1.0, 0.7, 1.4, 1.0], "frozen": [1.0, 1.0, 1.0, 1.0]})
    assert verdict(null, noisy)["verdict"] == "inconclusive"


def test_a_family_is_adjusted():
    weak = table({"learned": [1.0, 1.0, 1.0, 1.0], "frozen": [1.3, 1.1, 1.02, 1.2]})
    alone = judge((order(),), weak, base(), ["data.samples"])[0]
    many = judge((order(), *[order("frozen_x", "frozen", id=str(i)) for i in range(3)]), weak, base(), ["data.samples"])
    assert alone["p"] == alone["p_adjusted"]
    assert many[0]["p_adjusted"] == alone["p"]  # claims that did not run are no tests


def test_sure_claims_leave_no_room_for_doubtful_ones():
    """Two claims with p = .046 among 35 sure ones: a false discovery rate leaves .046, Holm's method makes it .092."""
    claims = (*(order(id=f"sure{i}") for i in range(35)), *(order("doubtful", id=f"d{i}") for i in range(2)))
    doubtful = [1.0 / factor for factor in (1.30, 1.25, 1.05, 1.12)]
    rows = table(LOSSES | {"doubtful": doubtful, "frozen": [1.0] * 4})
    found = judge(claims, rows, base(), ["data.samples"])
    assert 0.025 < found[-1]["p"] < 0.05 and found[-1]["verdict"] == "inconclusive"
    assert {one["verdict"] for one in found[:35]} == {"supported"}


def test_a_side_that_lost_and_diverged_did_worse_still():
    rows = table()
    rows.loc[(rows.arm == "frozen") & (rows.seed == 0), "status"] = "diverged"
    assert verdict(order(), rows)["verdict"] == "supported"


def test_json_has_no_nan():
    text = to_json(judge((order(),), table({"learned": [0.1], "frozen": [1.0]}), base(), ["data.samples"]))
    assert "NaN" not in text and json.loads(text)[0]["interval"] == [None, None]


def test_the_gap_adds_up():
    parts = diagnosis.gap(LAST).set_index("part")["mean"]
    whole = np.mean(np.log(np.array(LOSSES["frozen"]) / np.array(LOSSES["learned"])))
    assert parts["sharpness"] + parts["initial partition"] + parts["learning to route"] == pytest.approx(whole)
    assert parts["whole gap, top-1"] == pytest.approx(whole)
    assert not len(diagnosis.gap(table({"frozen": [1.0]})))


def test_a_missing_control_leaves_its_step_to_the_next():
    parts = diagnosis.gap(LAST[LAST.arm != "frozen_data"]).set_index("part")
    assert [*parts.index[:2]] == ["sharpness", "initial partition and learning to route"]
    assert parts["mean"].iloc[:2].sum() == pytest.approx(parts.loc["whole gap, top-1", "mean"])


def test_a_diverged_run_costs_its_seed_not_the_decomposition():
    lost = LAST.assign(status=np.where((LAST.arm == "frozen_data") & (LAST.seed == 1), "diverged", "ok"))
    parts = diagnosis.gap(lost).set_index("part")
    assert parts.loc["sharpness", "n"] == 3 and parts.loc["whole gap, top-1", "n"] == 4
    without = diagnosis.gap(LAST[LAST.seed != 1]).set_index("part")
    np.testing.assert_allclose(parts["mean"].iloc[:3], without["mean"].iloc[:3])


def test_shares_have_intervals_over_seeds():
    parts = diagnosis.gap(LAST).iloc[:3]
    assert ((parts.share_low < parts.share) & (parts.share < parts.share_high)).all()
    assert parts.share.sum() == pytest.approx(1.0)


def test_a_gap_that_may_be_none_has_no_shares():
    """log(1.02) to log(1 / 1.02), mean about 0: each part would be many times the whole."""
    for frozen, some in ((LOSSES["frozen"], 1.0), ([0.102, 0.108, 0.092, 0.098], 0.0)):
        shares = diagnosis.gap(table(LOSSES | {"frozen": frozen})[lambda rows: rows.step == 10])["share"]
        assert shares.sum() == pytest.approx(some) and shares.isna().all() == (not some)


def test_threats_are_filled_from_the_rows():
    swept = ["data.samples"]
    rows = table(halfway={"frozen": 2.0}).assign(
        **{"router/entropy_token": 0.5, "router/dropped": 0.0, "router/dead": 0.25}
    )
    other = table({"learned": [9.0] * 4}, samples=(32,)).assign(**{"router/entropy_token": 0.9})
    both = pd.concat([rows, other], ignore_index=True)
    both.loc[(both.arm == "frozen_sharp") & (both.seed == 2), "status"] = "diverged"
    answers = dict(diagnosis.threats(both, base(), swept))
    # log 2 over the tail's doubling: at 4 times the steps a quarter. Other points stand aside.
    assert "frozen -75 %" in answers["Converged?"] and "learned +0 %" in answers["Converged?"]
    assert "(at data.samples = 64)" in answers["Converged?"]
    assert "frozen_data 0.5" in answers["Sharpness equal?"] and "learned 0.5" in answers["Sharpness equal?"]
    assert answers["Diverged runs"] == "1 of 24: frozen_sharp 1"
    twice = pd.concat([both, both.assign(**{"data.separation": 2.0})]).fillna({"data.separation": 1.0})
    answers = dict(diagnosis.threats(twice, base(), [*swept, "data.separation"]))
    assert answers["Diverged runs"] == "1 of 24: frozen_sharp 1"  # each run stands at two points
    assert "file's rates" in answers["Tuned per arm?"]
    assert answers["Frozen is frozen"] == "router parameters differ from step 0 in: learned"
    free = dict(diagnosis.threats(table(), override(base(), {"gate.horizon": 1.0}), swept))
    assert free["Converged?"].startswith("not asked") and "4 seeds" not in free["Converged?"]
    assert "4" in free["Seeds and power"]
    single = dict(diagnosis.threats(table()[lambda rows: rows.step != 5], base(), swept))
    assert "unknown, as there is one evaluation" in single["Converged?"] and "nan" not in single["Converged?"]
    moved = table().assign(**{"train/coefficient_l1": [1e20, *[3.0] * (len(table()) - 1)]})
    assert "steered?" not in str(answers) and dict(diagnosis.threats(moved, base(), swept))["losses.l1 steered?"]
    loose = override(base(), {"selection.eval.renormalise": False})
    assert "do not sum to 1 in evaluation" in dict(diagnosis.threats(table(), loose, swept))["Weight scale"]


def test_an_arm_whose_own_weights_do_not_sum_to_1_is_named():
    seen = pd.concat(
        [table(), table({"learned_top1": [0.1] * 3}).assign(run=lambda rows: "t" + rows.run)], ignore_index=True
    )
    answer = dict(diagnosis.threats(seen, base(), ["data.samples"]))["Weight scale"]
    assert answer.startswith("weights do not sum to 1 in training and evaluation of learned_top1:")


def test_weights_that_are_never_made_to_sum_to_1_are_named():
    """Raw scores, and gates over all patches of a sample, do not read `renormalise`, which is true."""
    plain = override(base(), {"selection.name": "raw"})
    assert "do not sum to 1 in training of every arm" not in str(threats_of(base()))
    assert threats_of(plain)["Weight scale"].startswith(
        "weights do not sum to 1 in training of frozen, frozen_data, frozen_sharp, learned: a router"
    )
    for gate, free in (("all", True), ("chosen", False), ("one", False)):
        patches = override(base(), {"selection.name": "patch_choice", "selection.patch_weights": gate})
        assert ("do not sum to 1 in training" in threats_of(patches)["Weight scale"]) == free


def threats_of(config):
    return dict(diagnosis.threats(table(), config, ["data.samples"]))


def test_arms_evaluated_by_another_selection_than_they_train_with_are_named():
    config = override(base(), {"selection.name": "top_k", "selection.k": 4, "selection.eval.k": 4})
    assert threats_of(config)["Evaluated as trained?"] == (
        "trained by top_k of 1, evaluated by top_k of 4: frozen_top1"  # sets its own K of training
    )
    served = threats_of(override(config, {"selection.capacity_factor": 1.25, "selection.eval.capacity_factor": 2.0}))
    assert (
        "trained by top_k of 4 and capacity factor 1.25, evaluated by top_k of 4 and capacity factor 2: frozen, "
        in (served["Evaluated as trained?"])
    )
    phased = override(config, {"phases": ("until=50% selection.k=2", "train=experts"), "steps": 10, "eval_every": 10})
    assert (
        "trained by top_k of 2 then top_k of 4, evaluated by top_k of 4: "
        in threats_of(phased)["Evaluated as trained?"]
    )
    dense = pd.concat([LAST, LAST[LAST.arm == "learned"].assign(arm="dense_active", run="d")])  # selects nothing
    assert "dense_active" not in dict(diagnosis.threats(dense, base(), []))["Evaluated as trained?"]
    own = override(base(), {"selection.name": "soft", "selection.eval.name": "soft"})
    alone = LAST[LAST.arm == "learned"]
    assert dict(diagnosis.threats(alone, own, []))["Evaluated as trained?"] == "yes, in every arm"


def test_claims_of_points_that_a_command_takes_away_are_counted():
    """A side may set what its claim's point does; arms are not asked for."""
    claims = (
        order(at={"data.samples": 64}),
        order(at={"data.samples": 32}),
        order({"arm": "learned", "data.samples": 32}, {"value": 1.0}, at={}),
        order(at={}),
    )

    def asked(*points):
        return [i for i, claim in enumerate(claims) if claim not in unanswered(claims, base(), points)]

    assert asked({"data.samples": 64}, {"data.samples": 32}) == [0, 1, 2, 3]
    assert asked({"data.samples": 64}) == [0, 3]
    assert asked() == [3] and asked({"data.samples": 16, "data.dim": 3}) == [3]


def test_weights_are_asked_at_every_swept_point():
    """Top-k with and without renormalised weights; an arm that sets them itself is not reached by the sweep."""
    config = override(base(), {"selection.name": "top_k"})
    seen = [
        table(LOSSES | {"learned_top2": [0.1] * 3}).assign(
            run=lambda rows, one=one: f"{one}" + rows.run, **{"selection.renormalise": one}
        )
        for one in (True, False)
    ]
    swept = ["data.samples", "selection.renormalise"]
    answer = dict(diagnosis.threats(pd.concat(seen, ignore_index=True), config, swept))["Weight scale"]
    assert answer.startswith(
        "weights do not sum to 1 in training of frozen, frozen_data, frozen_sharp, learned: a router"
    )


def test_candidates_are_counted_by_arm_and_point():
    """Two multipliers on several seeds and points are two candidates; seeds that got .1 and 1 are both named."""
    tuning = table().assign(status="tuning", rates="tuned", run=lambda rows: "t" + rows.run)
    tuning["train/rate_scale"] = np.where(tuning.seed % 2, 0.1, 1.0)
    rows = table().assign(rates="tuned")
    rows["train/rate_scale"] = np.where(rows.seed == rows.seed.max(), 0.1, 1.0)
    answer = dict(diagnosis.threats(pd.concat([rows, tuning], ignore_index=True), base(), ["data.samples", "rates"]))
    assert "2 candidates for every arm" in answer["Tuned per arm?"] and "learned 0.1 or 1" in answer["Tuned per arm?"]
    # A router's rate is a second factor: of learned alone both were tried with both.
    tuning["train/router_rate"] = np.where((tuning.arm == "learned") & (tuning.seed < 2), 0.3, 1.0)
    answer = dict(diagnosis.threats(pd.concat([rows, tuning], ignore_index=True), base(), ["data.samples", "rates"]))
    assert "learned 4" in answer["Tuned per arm?"] and "frozen 2" in answer["Tuned per arm?"]


def test_unequal_tuning_is_said_in_words():
    tuning = table({"frozen": [1.0] * 3, "learned": [1.0] * 2}).assign(status="tuning", rates="tuned")
    tuning["train/rate_scale"] = 1.0 + tuning.seed
    rows = pd.concat([table().assign(rates="tuned"), tuning.assign(run="t" + tuning.run)], ignore_index=True)
    answer = dict(diagnosis.threats(rows, base(), ["data.samples", "rates"]))["Tuned per arm?"]
    assert answer == "unequal numbers of candidates: frozen 3, learned 2"
    rows.loc[(rows.status == "tuning") & (rows.arm == "learned") & (rows.step == 10), "train/rate_scale"] = np.nan
    assert dict(diagnosis.threats(rows, base(), ["data.samples", "rates"]))["Tuned per arm?"] == answer  # had diverged
