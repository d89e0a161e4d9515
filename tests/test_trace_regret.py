"""Regret and subsets about given numbers: which experts are tried, with which scores, and what the table says."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routed.contracts import UserError
from routed.trace import regret, surgery_results
from routed.trace.kinds import EVERY, SUBSETS, most_chosen, untrained
from routed.trace.replacements import Linear, Site
from routed.trace.surgery_jobs import ALL, Job, SurgeryResult, jobs_of, repair_steps_of, replacements_of

RNG = np.random.default_rng(0)


def site_of(experts, k, counts=None, features=None):
    counts = np.zeros((2, experts), int) if counts is None else np.asarray(counts)
    return Site(experts, k, None, None, features, counts, np.zeros(9, int), None)


@given(st.integers(2, 7), st.data())
def test_tried_experts_get_the_scores_of_the_chosen_ones(experts, data):
    k = data.draw(st.integers(1, experts))
    scores = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(1, experts)).astype(np.float32)
    chosen = np.argsort(-scores, axis=1)[:, :k]
    tried = np.array(data.draw(st.permutations(range(experts))))[None, None, :k]
    made = regret.moved(scores, chosen, tried, alone=False)
    assert (np.argsort(-made[0, 0])[:k] == tried[0, 0]).all()
    np.testing.assert_array_equal(np.sort(made[0, 0]), np.sort(scores[0]))  # so a softmax has the same denominator
    alone = regret.moved(scores, chosen, tried, alone=True)
    np.testing.assert_array_equal(alone[0, 0, tried[0, 0]], scores[0, chosen[0]])
    assert (np.delete(alone[0, 0], tried[0, 0]) == regret.DROPPED).all()


def test_a_token_that_has_all_experts_has_no_regret():
    with pytest.raises(UserError, match="every token has all 4 experts"):
        regret.regret_of(None, {}, "0", site_of(4, 4), [], {}, regret.RegretSettings(8, 1, 0))


def test_no_position_comes_twice_before_all_have_come():
    """5 rows of 12 tokens: 10 positions of a batch, and rows in groups of their own."""
    settings = regret.RegretSettings(tokens=40, batch_size=4, seed=0)
    batches = list(regret.batches_of(5, 12, settings))
    assert sorted(position for _, position in batches) == [*range(1, 11)]
    assert {tuple(where) for where, _ in batches} == {(0, 1, 2, 3), (1, 2, 3, 4)}
    with pytest.raises(UserError, match="rows have 2 tokens: regret needs 3"):
        list(regret.batches_of(5, 2, settings))


def test_tries_are_all_sets_or_exchanges_of_one_expert():
    chosen, ids = np.array([[2], [0]]), np.array([0, 1])
    one = regret.tries_of(chosen, ids, site_of(5, 1), RNG, 0)
    assert one.every and sorted(one.choices[0, :, 0]) == [0, 1, 2, 3, 4] and one.random.size == 0
    pairs = regret.tries_of(np.array([[1, 0]]), ids[:1], site_of(4, 2), RNG, 0)
    assert {tuple(pair) for pair in pairs.choices[0]} == set(itertools.permutations(range(4), 2))
    three = regret.tries_of(np.array([[4, 1, 0]]), ids[:1], site_of(6, 3), RNG, 0)
    # 3 ranks, each of which takes one of the 3 other experts
    expected = {(e, 1, 0) for e in (2, 3, 5)} | {(4, e, 0) for e in (2, 3, 5)} | {(4, 1, e) for e in (2, 3, 5)}
    assert {tuple(row) for row in three.choices[0]} == expected and three.complete and not three.every
    many = regret.tries_of(np.arange(8)[None], ids[:1], site_of(64, 8), RNG, 0)
    assert many.choices.shape == (1, regret.MOST, 8) and not many.complete
    assert len({tuple(row) for row in many.choices[0]}) == regret.MOST
    assert (many.hashed == regret.tries_of(np.arange(8)[None], ids[:1], site_of(64, 8), RNG, 0).hashed).all()


def test_the_best_of_half_of_the_tries():
    # Of {1, 2, 4, 8} two are drawn: 1 is among 3 of 6 pairs, else 2 in 2 of 6, else 4 in 1 of 6: (3 + 4 + 4) / 6.
    assert regret.best_of_half(np.array([[8.0, 1, 4, 2]]), np.array([9.0])) == pytest.approx(11 / 6)
    # The choice as it is has 2, which the pairs without 1 cannot beat: (3 * 1 + 3 * 2) / 6.
    assert regret.best_of_half(np.array([[8.0, 1, 4, 2]]), np.array([2.0])) == pytest.approx(9 / 6)


def result(**columns):
    losses = {
        "as_is": [2.0, 3, 4, 5], "best": [1.0, 3, 3, 3], "random": [3.0, 3, 5, 7], "repaired": [1.5, 3, 4, 4],
        "hash": [3.0, np.nan, 5, 7], "table": [np.nan] * 4, "sharpened": [2.0, 3, 4, 5], "half": [1.5, 3, 3.5, 4],
        "group": [0, 0, 1, 1], "refused": [0.0] * 4, "tries": [8] * 4, "complete": [True] * 4, "every": [True] * 4,
        "deviation": [0.0] * 4,
    }  # fmt: skip
    arrays = {name: np.array(values) for name, values in (losses | columns).items()}
    return SurgeryResult(
        ("a", "b"), 8, {Job(ALL, ""): np.zeros(2)}, {}, 0.0, 9, 4, regret={"a": arrays, "b": "no cache"}
    )


def test_the_table_of_regret():
    table = surgery_results.regret_table(result()).set_index("router")
    assert table.regret["as_is"] == pytest.approx((1 + 0 + 1 + 2) / 4)
    assert table.regret["random"] == pytest.approx((2 + 0 + 2 + 4) / 4)
    assert table.regret["hash"] == pytest.approx((2 + 2 + 4) / 3)  # the second token's hash was refused
    assert table.recovered["repaired"] == pytest.approx(1 - (0.5 + 0 + 1 + 1) / 4) and "table" not in table.index
    assert table.best["as_is"] == 1 / 4 and table.half["as_is"] == pytest.approx((0.5 + 0 + 0.5 + 1) / 4)
    # Draws take the groups [0, 0], [0, 1], [1, 0] or [1, 1], whose means are 1/2, 1 and 3/2.
    assert table.low["as_is"] == pytest.approx(0.5) and table.high["as_is"] == pytest.approx(1.5)
    values = surgery_results.regret_summary(surgery_results.regret_table(result()))
    assert values["most"].layer == "a" and values["rows"]["hash"].regret == pytest.approx(8 / 3)
    assert surgery_results.regret_summary(surgery_results.regret_table(result()._replace(regret={}))) is None


def test_kept_experts_are_those_chosen_most_on_other_text():
    site = site_of(8, 2, counts=[[0] * 8, [5, 1, 9, 2, 0, 7, 3, 4]])
    assert list(most_chosen(site, 3, RNG)) == [2, 5, 0]
    router = EVERY["most25"].make(site, RNG)  # 2 of 8 experts, k = 2: k stays
    assert router.k == 0 and EVERY["most12"].make(site, RNG).k == 1
    assert EVERY["most12"].make(site_of(3, 1), RNG) == "12.5 % of 3 experts is less than one"
    biased = site._replace(trained=Linear(np.zeros((4, 8)), None, np.arange(8.0, dtype=np.float32)))
    bias = EVERY["most25"].make(biased, RNG).bias
    assert (bias[[2, 5]] == [2, 5]).all() and (np.delete(bias, [2, 5]) < -100).all()


def test_experts_of_an_untrained_router_depend_on_its_draw_alone():
    site = site_of(16, 2, features=RNG.normal(size=(500, 8)) + 3)
    first, same, other = (untrained(site, 4, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert (first == same).all() and set(first) != set(other)


def test_jobs_of_curves_and_subsets():
    jobs = jobs_of(["a"], ["noise", "random", "table", *SUBSETS], 3, [5, 20])
    of = {name: [job for job in jobs if job.replacement == name] for name in ("noise", "random", "table", "trained")}
    assert len(of["noise"]) == 6 and len(of["table"]) == 1 + 2 * 3 + 1 + 1  # plain, curves in all; plain, longest alone
    assert {job.repair_steps for job in of["trained"] if job.layer == "a"} == {20}
    subsets = [job for job in jobs if job.replacement in SUBSETS]
    assert len(subsets) == 3 * (1 + 3 + 3) and {job.layer for job in subsets} == {ALL}
    assert replacements_of(["subsets"], False) == list(SUBSETS)
    assert repair_steps_of(["200", "0", "50"]) == [50, 200] and repair_steps_of([0]) == []
    for steps in (["a"], ["-1"], ["1.5"]):
        with pytest.raises(UserError, match=r"--repair_steps=.*as in --repair_steps=50,200"):
            repair_steps_of(steps)
