"""Routers whose experts have other numbers: equal choices under the best permutation, beside those of chance."""

import math

import numpy as np
import pytest

import routed
from routed import trace
from routed.trace import analysis, features, findings, similarity, tokens

RNG = np.random.default_rng(3)
TOKENS, EXPERTS, DIM = 900, 6, 8
ROWS = np.arange(TOKENS) // 30
FIRST = RNG.integers(0, EXPERTS, TOKENS)
CYCLE = (np.arange(EXPERTS) + 1) % EXPERTS


def test_the_best_permutation_by_hand():
    # 0 -> 1 has 5, 1 -> 0 has 4, 2 -> 2 has 1: 10 of 16. The largest cell of every row would name column 1 twice.
    table = np.array([[3, 5, 0], [4, 2, 1], [0, 0, 1]])
    share, permutation = similarity.matched(table)
    assert share == 10 / 16 and permutation.tolist() == [1, 0, 2]


def test_chance_is_what_independent_choices_reach():
    """A constant pair of routers is equal by chance; with equal loads it is 1 / E plus the best permutation's gain."""
    assert similarity.by_chance(np.array([[9, 0], [0, 0]])) == 1 and similarity.matched(np.zeros((3, 3)))[0] == 0
    other = RNG.permutation(FIRST)
    table = similarity.together(FIRST[:, None], other[:, None], EXPERTS)
    chance = similarity.by_chance(table, draws=50)
    assert 1 / EXPERTS < chance < 1.3 / EXPERTS and similarity.matched(table)[0] == pytest.approx(chance, abs=0.02)


def test_pairs_of_experts_are_counted_by_hand():
    old, new = np.array([[0, 1], [1, 2]]), np.array([[2, 1], [0, -1]])
    np.testing.assert_array_equal(similarity.together(old, new, 3), [[0, 1, 1], [1, 1, 1], [1, 0, 0]])


def test_a_renumbered_layer_is_alike_and_a_hash_is_beside_it(tmp_path):
    """Layer 1 is layer 0 with other numbers; layer 2 differs for a third of the tokens; layer 3 is independent."""
    third = np.where(np.arange(TOKENS) % 3 == 0, RNG.integers(0, EXPERTS, TOKENS), FIRST)
    layers = np.stack([FIRST, CYCLE[FIRST], third, RNG.permutation(FIRST)])[:, :, None]
    result = routed.analyse(experts=layers, num_experts=EXPERTS, sequence=ROWS, token_ids=FIRST, out=tmp_path)
    rows = result["numbers"][result["numbers"].number == "alike"]
    assert rows.value.iloc[0] == 1 and rows.value.iloc[1] == (third == FIRST).mean()
    assert (rows.low < rows.value).tolist()[1:] == [True, True] and rows.value.iloc[2] == pytest.approx(
        rows.chance.iloc[2], abs=0.03
    )
    assert rows.hash.nunique() == 1 and result["equal"][0, 2] == rows.value.iloc[1]
    assert any("After the best renumbering of experts," in text for text in result["findings"])


def test_tokens_without_a_first_expert_are_in_no_pair(tmp_path):
    """Tokens 0 and 1 have both: cells (0, 1) and (1, 0), one each: layers tell ln 2. As expert 0, -1 made it 3 of 4."""
    first, second = np.array([[0], [1], [-1], [1]]), np.array([[1], [0], [0], [-1]])
    stored = trace.write(tmp_path, experts=[first, second], num_experts=2)
    result = similarity.compare_layers(stored, tokens.tokens_of(stored), None)
    assert result.alike[0].value == result.equal[0, 1] == 1
    assert result.following[0].value == pytest.approx(math.log(2), rel=1e-5)
    # the bias of the information is (2 - 1)^2 / (2 * 2 tokens), and both entropies are ln 2
    assert result.shares[0, 1] == pytest.approx((math.log(2) - 0.25) / math.log(2), rel=1e-5)


def test_the_first_of_open_choices_is_that_of_the_largest_weight(tmp_path):
    """Column e holds expert e or -1. By weight token 0 has 2 first, token 1 has 1, token 2 none: (2, 2), (1, 1)."""
    chosen = np.array([[0, -1, 2], [-1, 1, -1], [-1, -1, -1]])
    weights = np.array([[0.2, 0, 0.7], [0, 0.5, 0], [0, 0, 0]], np.float32)
    stored = trace.write(tmp_path / "weighed", experts=[chosen] * 2, weights=[weights] * 2, num_experts=3)
    result = similarity.compare_layers(stored, tokens.tokens_of(stored), None)
    assert result.alike[0].value == 1 and result.following[0].value == pytest.approx(math.log(2), rel=1e-5)
    stored = trace.write(tmp_path / "plain", experts=[chosen] * 2, num_experts=3)
    assert similarity.compare_layers(stored, tokens.tokens_of(stored), None) is None


def test_a_page_of_open_choices_says_what_it_lacks(tmp_path):
    random = np.random.default_rng(5)
    layers = np.where(random.random((2, 200, 3)) < 0.6, np.arange(3), -1)
    result = routed.analyse(experts=layers, num_experts=3, out=tmp_path)
    assert not result["numbers"].number.isin(["next", "alike"]).any() and result["between"] is None
    assert "are in no order; give weights" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("old", "new", "changed", "alike"),
    [
        ([[0], [-1]], [[0], [-1]], 0, 1),  # kept 1 of 1; by tokens it was the half that has none
        # kept 2 of 2; pairs (0, 0) and (1, 1) for 2 experts, which times k were twice as many
        ([[0, -1], [1, -1]], [[0, -1], [1, -1]], 0, 1),
        # kept 2 of 3; of pairs (0, 0), (0, 2), (1, 0), (1, 2), (2, 2) a permutation has two at most
        ([[0, 1], [2, -1]], [[0, 2], [2, -1]], 1 / 3, 2 / 3),
    ],
)
def test_churn_is_of_the_experts_that_are_there(old, new, changed, alike, tmp_path):
    traces = [
        trace.write(tmp_path / name, experts=[np.array(experts)], num_experts=3)
        for name, experts in (("old", old), ("new", new))
    ]
    (row,) = similarity.churn(traces, tokens.tokens_of(traces[1]), None)
    assert row["value"] == pytest.approx(changed) and row["alike"] == pytest.approx(alike)
    assert 0 <= row["chance"] <= 1 and (row["before"], row["after"]) == ("old", "new")


def test_checkpoints_of_one_name_are_numbered(tmp_path):
    """As the encoders of three captures: two pairs, not one of all their rows."""
    traces = [
        trace.write(tmp_path / name / "encoder", experts=FIRST[None, :, None], num_experts=EXPERTS, sequence=ROWS)
        for name in "abc"
    ]
    result = analysis.analyse(traces)
    assert result.churn.before.tolist() == ["encoder (1)", "encoder (2)"]
    assert result.churn.after.tolist() == ["encoder (2)", "encoder (3)"]
    said = [found for found in findings.findings(result) if found.text.startswith("From encoder (")]
    assert len(said) == 2


def checkpoint(out, experts, step, kernel):
    values = RNG.standard_normal((50, DIM)).astype(np.float32)
    inputs = features.Features(np.arange(50), [values] * 2, [kernel] * 2)
    return trace.write(
        out, experts=np.stack([experts] * 2), num_experts=EXPERTS, sequence=ROWS, step=step, features=inputs
    )


def test_checkpoints_whose_experts_were_renumbered(tmp_path):
    """Every choice changed, and none under the best permutation; the earlier kernel decides on later features."""
    chosen = np.stack([FIRST, (FIRST + 2) % EXPERTS], 1)
    kernel = RNG.standard_normal((DIM, EXPERTS)).astype(np.float32)
    before = checkpoint(tmp_path / "1", chosen, 1, kernel)
    after = checkpoint(tmp_path / "2", CYCLE[chosen], 2, kernel[:, np.argsort(CYCLE)])
    result = analysis.analyse([before, after])
    assert result.churn.alike.tolist() == pytest.approx([1, 1]) and (result.churn.value > 0.4).all()
    # chance: the best permutation has about a sixth of all pairs, 2 / 6 of the experts
    assert result.churn.alike_chance.between(0.33, 0.42).all()
    _, values, _, _ = features.load(after.folder, 0)
    first, second = (
        np.argsort(-values @ kernel_of, axis=1)[:, :2] for kernel_of in (kernel, kernel[:, np.argsort(CYCLE)])
    )
    same = np.mean([len(set(a) & set(b)) / 2 for a, b in zip(first, second, strict=True)])
    assert result.churn.router_alone[0] == pytest.approx(1 - same)
    (said,) = [found.more for found in findings.findings(result) if found.text.startswith("From step 1 to step 2")]
    assert (
        "much of the change is in the numbers of the experts alone" in said
        and "On the later features, the earlier router" in said
    )
    assert np.isnan(similarity.router_alone((before, before._replace(has_features=False)), 0, 1))


def test_routers_that_read_the_same_are_told_from_others(tmp_path):
    """The second layer's kernel is the first's with other columns; a third reads other features."""
    values = RNG.standard_normal((400, DIM)).astype(np.float32)
    kernel, other = np.zeros((2, DIM, EXPERTS), np.float32)
    kernel[:4], other[4:] = RNG.standard_normal((2, 4, EXPERTS))
    kernels = [kernel, kernel[:, CYCLE], other]
    inputs = features.Features(np.arange(400), [values] * 3, kernels)
    stored = trace.write(tmp_path, scores=np.stack([values @ kernel_of for kernel_of in kernels]), k=1, features=inputs)
    shares, chance = similarity.routers(stored)
    assert shares[0, 1] == shares[1, 0] == shares[2, 2] == 1
    assert shares[0, 2] < 0.45 and (chance < 0.6).all() and (chance > 1 / EXPERTS).all()
