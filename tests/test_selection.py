"""Selections against hand-computed values: weights, queues, capacity, balance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed.contracts import UserError
from routed.kernels.ranks import ranks
from routed.layer import selection
from routed.layer.dispatch import direct
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import SELECTIONS, capacity
from routed.metrics.load import dropped, load_of
from routed.plan.config import base

# Compiled as wholes: operation by operation takes longer.
select, combine_weights = jax.jit(selection.select, static_argnums=0), jax.jit(direct.combine_weights)

LN2 = float(np.log(2))


def log(rows):
    return jnp.log(jnp.array(rows, jnp.float32))


def assigned(routing):
    """(token, expert) of what was kept."""
    return {(int(t), int(e)) for t, e, kept in zip(routing.token, routing.expert, routing.kept, strict=True) if kept}


def test_scores_of_another_width_are_refused(monkeypatch):
    narrow = SELECTIONS["soft"]._replace(route=lambda rule, scores, *rest: selection.soft(rule, scores[:, :1], *rest))
    monkeypatch.setitem(SELECTIONS, "narrow", narrow)
    for size in (0, 2):
        with pytest.raises(UserError, match=r"selection 'narrow' returns scores of another shape; it must be \[4, 2\]"):
            selection.select(SelectionRule("narrow", group_size=size), jnp.zeros((4, 2)))


def test_soft_weights_are_the_softmax():
    # exp(0), exp(ln 2): shares 1/3 and 2/3.
    weight = combine_weights(select(SelectionRule("soft"), jnp.array([[0.0, LN2]])))
    np.testing.assert_allclose(weight, [[1 / 3, 2 / 3]], rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        (SelectionRule(k=1), [0, 0, 5 / 8]),  # Switch: the probability of the chosen one
        (SelectionRule(k=1, renormalise=True), [0, 0, 1]),
        (SelectionRule(k=2), [0, 2 / 8, 5 / 8]),  # V-MoE: softmax, then top-k
        (SelectionRule(k=2, renormalise=True), [0, 2 / 7, 5 / 7]),  # GShard: over the two
        (SelectionRule("sigmoid", k=2), [0, 2 / 3, 5 / 6]),  # sigmoid(ln w) = w / (1 + w)
        (SelectionRule("sigmoid", k=2, renormalise=True), [0, 4 / 9, 5 / 9]),  # 2/3 and 5/6 over 9/6
    ],
)
def test_weights(rule, weights):
    """Scores ln 1, ln 2, ln 5: softmax 1/8, 2/8, 5/8."""
    np.testing.assert_allclose(combine_weights(select(rule, log([[1, 2, 5]]))), [weights], rtol=1e-6)


@pytest.mark.parametrize(("name", "weight"), [("top_k", 1 / 8), ("sigmoid", 1 / 2)])  # 1 / (1 + 2 + 5), 1 / (1 + 1)
def test_preferences_choose_and_scores_weigh(name, weight):
    """Noise makes such preferences: scores are highest at expert 2, preferences at expert 0."""
    routing = select(SelectionRule(name, k=1), log([[1, 2, 5]]), preference=jnp.array([[9.0, 1.0, 0.0]]))
    assert routing.expert.tolist() == [0]
    np.testing.assert_allclose(routing.weight, [weight], rtol=1e-6)


@pytest.mark.parametrize("score", [0.0, -45.0, -88.0, -1e4])
def test_sigmoids_that_vanish_have_weights_and_gradients(score):
    """For low scores sigmoid(s) = e^s, so weights are the softmax of the scores: e^.5 / (e^.5 + 1) = .6225 of two."""
    rule = SelectionRule("sigmoid", k=2, renormalise=True)
    first = lambda scores: combine_weights(select(rule, scores))[0, 0]  # noqa: E731
    value, gradient = jax.value_and_grad(first)(jnp.array([[score + 0.5, score]]))
    # At 0: sigmoid(.5) = .6225 against .5, so .6225 / 1.1225 = .5546. The slope is w (1 - w) times 1 - sigmoid of each
    # score.
    expected, slopes = (0.5546, [0.3775, -0.5]) if score == 0 else (0.6225, [1, -1])
    assert float(value) == pytest.approx(expected, abs=1e-3)
    np.testing.assert_allclose(gradient, [expected * (1 - expected) * np.array(slopes)], atol=1e-3)


def test_sigmoids_that_are_1_or_0_in_float32_keep_the_order_of_their_scores():
    """1 - sigmoid(20) = 2e-9 and 1 - sigmoid(30) = 9e-14 vanish beside 1; e^-150 is less than the smallest number."""
    scores = jnp.array([[20.0, 30.0, 0.0], [-200.0, -150.0, -160.0], [-150.0, 1.0, 20.0]])
    assert select(SelectionRule("sigmoid", k=2), scores).expert.tolist() == [1, 0, 1, 2, 2, 1]
    biased = select(SelectionRule("sigmoid"), scores[:1], bias=jnp.array([0.1, 0.0, 0.0]))
    assert biased.expert.tolist() == [0]  # 1.1 against 1: a bias is in units of sigmoids


@pytest.mark.parametrize("name", ["top_k", "sigmoid"])
def test_ties_go_to_the_lower_index(name):
    routing = select(SelectionRule(name, k=2), jnp.zeros((3, 4)))
    assert routing.expert.tolist() == [0, 1] * 3 and routing.token.tolist() == [0, 0, 1, 1, 2, 2]
    assert select(SelectionRule("expert_choice", capacity_factor=0.5), jnp.zeros((4, 2))).token.tolist() == [0, 0]


@pytest.mark.parametrize(("k", "renormalise", "gradient"), [(1, True, False), (1, False, True), (2, True, True)])
@pytest.mark.parametrize("name", ["top_k", "sigmoid", "sinkhorn"])
def test_router_gradient_through_selection(name, k, renormalise, gradient):
    def loss(scores):
        weight = combine_weights(select(SelectionRule(name, k=k, renormalise=renormalise), scores))
        return (weight * jnp.array([[1.0, 2.0, 4.0]])).sum()

    assert bool(jnp.abs(jax.grad(loss)(jnp.array([[0.1, 0.5, 0.2]]))).sum() > 1e-6) is gradient


@pytest.mark.parametrize(
    ("rule", "places"),
    [
        (SelectionRule(k=2, capacity_factor=1.25), 5),  # ceil(1.25 * 2 * 8 / 4)
        (
            SelectionRule(k=2, capacity_factor=1.25, capacity_rule="per_token"),
            2,
        ),  # round(1.25 * 8 / 4) = round(2.5), to even
        (SelectionRule(k=1, capacity_factor=1.1), 3),  # ceil(2.2)
        (SelectionRule(k=1, capacity_factor=0.1, min_capacity=4), 4),
        (SelectionRule(k=1, capacity_factor=100.0), 8),  # a token chooses an expert once
        (SelectionRule(k=2), 8),  # dropless
        (SelectionRule("expert_choice", k=2), 4),  # k T / E
        (SelectionRule("relu", capacity_factor=1.0), 8),  # all tokens may choose an expert
    ],
)
def test_capacity_of_8_tokens_and_4_experts(rule, places):
    assert capacity(rule, 8, 4) == places


def test_capacity_is_not_raised_by_rounding():
    assert capacity(SelectionRule(k=1, capacity_factor=1.1), 100, 10) == 11  # 1.1 * 10 is 11.000000000000002


def test_first_choices_queue_before_second_ones():
    """GShard. Expert 0 has 2 places: tokens 1 and 2 choose it first, token 0 second and comes too late."""
    scores = log([[2, 5, 1], [5, 1, 2], [5, 1, 2]])
    routing = select(SelectionRule(k=2, capacity_factor=1.0), scores)  # ceil(1 * 2 * 3 / 3) = 2 places
    assert assigned(routing) == {(0, 1), (1, 0), (1, 2), (2, 0), (2, 2)}
    assert routing.rank.tolist() == [0, 2, 0, 0, 1, 1]  # token by token: first choice, second choice


def test_a_causal_queue_holds_all_choices_of_a_token_before_the_next():
    """Two tokens prefer experts (0, 1) and (1, 0). Causal: 0 is first at both. By position: each at its best."""
    scores = jnp.array([[2.0, 1.0], [1.0, 2.0]])
    causal = select(SelectionRule(k=2, priority="causal"), scores)
    assert causal.expert.tolist() == [0, 1, 1, 0] and causal.rank.tolist() == [0, 0, 1, 1]
    assert select(SelectionRule(k=2), scores).rank.tolist() == [0, 1, 0, 1]


def test_priority_by_score():
    scores = log([[2, 1], [9, 1], [3, 1]])  # all choose expert 0, with probability .67, .9, .75
    by_position = select(SelectionRule(capacity_factor=1.0), scores)  # ceil(3 / 2) = 2 places
    by_score = select(SelectionRule(capacity_factor=1.0, priority="score"), scores)
    assert assigned(by_position) == {(0, 0), (1, 0)}
    assert assigned(by_score) == {(1, 0), (2, 0)}
    assert by_score.token.tolist() == [0, 1, 2] and by_score.rank.tolist() == [2, 0, 1]


@pytest.mark.parametrize("name", ["top_k", "sinkhorn", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2])
def test_priority_by_score_does_not_depend_on_renormalisation(name, k):
    """Weights that sum to 1 say nothing of a token's claim to a place: with k = 1 all of them are 1."""
    scores = log([[2, 1, 1], [9, 1, 1], [3, 1, 1], [3, 2, 1]])
    rule = SelectionRule(name, k=k, capacity_factor=1.0, priority="score")
    raw, equal = (select(rule._replace(renormalise=renormalise), scores) for renormalise in (False, True))
    assert raw.rank.tolist() == equal.rank.tolist()
    # All choose expert 0: of softmax 1/2, 9/11, 3/5, 1/2; of sigmoid 2/3, 9/10, 3/4, 3/4. Sinkhorn shares them out.
    if k == 1 and name != "sinkhorn":
        assert raw.rank.tolist() == ([2, 0, 1, 3] if name == "top_k" else [3, 0, 1, 2])


def test_expert_choice():
    """Zhou et al. (2022), 4 tokens, 2 experts, k = 1: two tokens each. Probabilities of expert 0: .9, .8, .6, .1."""
    routing = select(SelectionRule("expert_choice", k=1), log([[9, 1], [8, 2], [6, 4], [1, 9]]))
    assert assigned(routing) == {(0, 0), (1, 0), (3, 1), (2, 1)}
    np.testing.assert_allclose(combine_weights(routing), [[0.9, 0], [0.8, 0], [0, 0.4], [0, 0.9]], rtol=1e-6)
    everyone = select(SelectionRule("expert_choice", k=2), log([[9, 1], [8, 2], [6, 4], [1, 9]]))
    np.testing.assert_allclose(combine_weights(everyone).sum(1), 1.0, rtol=1e-6)  # C = 4: all take all


@pytest.mark.parametrize(
    ("gate", "weights"),
    [
        # Sample 1, expert 0 takes patches 1 and 2 with 5 and 3 of 9 in all, expert 1 patches 0 and 2 with 4 and 2 of 7.
        ("one", [[0, 1], [1, 0], [1, 1], [1, 1], [0, 0], [1, 1]]),
        ("chosen", [[0, 4 / 6], [5 / 8, 0], [3 / 8, 2 / 6], [6 / 8, 1 / 3], [0, 0], [2 / 8, 2 / 3]]),
        ("all", [[0, 4 / 7], [5 / 9, 0], [3 / 9, 2 / 7], [6 / 9, 1 / 3.5], [0, 0], [2 / 9, 2 / 3.5]]),
    ],
)
def test_patch_choice(gate, weights):
    """Chowdhury et al. (2023): two samples of three patches, two experts, l = 2; scores are the logs of these."""
    scores = log([[1, 4], [5, 1], [3, 2], [6, 1], [1, 0.5], [2, 2]])
    rule = SelectionRule("patch_choice", patches=2, patch_weights=gate, group_size=3)
    routing = select(rule, scores)
    np.testing.assert_allclose(combine_weights(routing), weights, rtol=1e-6)
    # The largest score first: sample by sample, expert by expert; a patch may have both experts, or none.
    assert routing.token.tolist() == [1, 2, 0, 2, 3, 5, 5, 3] and routing.rank.tolist() == [0, 1] * 4
    assert routing.expert.tolist() == [0, 0, 1, 1] * 2 and capacity(rule, 3, 2) == 2


def test_patches_are_compared_by_their_scores_and_tokens_by_their_shares():
    """Expert 0 scores the first of two patches higher (ln 8, ln 4), but has a smaller share of it: 8/24 against 4/5."""
    scores = log([[8, 16], [4, 1]])
    assert assigned(select(SelectionRule("patch_choice", group_size=2), scores)) == {(0, 0), (0, 1)}
    assert assigned(select(SelectionRule("expert_choice", group_size=2), scores)) == {(1, 0), (0, 1)}


def test_sinkhorn_balances_what_top_1_would_not():
    scores = jax.random.normal(jax.random.key(0), (64, 4)) + jnp.array([[3.0, 0, 0, 0]])
    load = lambda rule: np.bincount(select(rule, scores).expert, minlength=4)  # noqa: E731
    assert load(SelectionRule()).max() > 50
    assert load(SelectionRule("sinkhorn")).max() < 24 and load(SelectionRule("sinkhorn")).min() > 8  # 16 each is fair
    steep = 5 * jax.random.normal(jax.random.key(0), (64, 4)) + jnp.array([[10.0, 0, 0, -10.0]])
    assert np.bincount(select(SelectionRule("sinkhorn"), steep).expert, minlength=4).max() < 19  # after one round 23
    routing = select(SelectionRule("sinkhorn"), scores)  # the plan chooses, the scores weigh
    np.testing.assert_allclose(routing.weight, jax.nn.softmax(scores)[jnp.arange(64), routing.expert], rtol=1e-6)


def test_a_bias_chooses_but_does_not_weigh_and_has_no_gradient():
    bias = jnp.array([3.0, 0.0])
    for name, weight in (("top_k", 1 / 5), ("sigmoid", 1 / 2)):  # of ln 1 beside ln 4
        routing = select(SelectionRule(name), log([[1, 4]]), bias=bias)
        assert routing.expert.tolist() == [0]
        np.testing.assert_allclose(routing.weight, [weight], rtol=1e-6)
        of_bias = jax.grad(lambda b, n=name: select(SelectionRule(n), log([[1, 4]]), bias=b).weight.sum())(bias)
        assert not of_bias.any()


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("group_size", [0, 4])
def test_padding_takes_no_place(name, group_size):
    """Real tokens are routed as if the padding before them were not there."""
    rule = SelectionRule(name, k=1, capacity_factor=1.0, group_size=group_size)
    scores = jax.random.normal(jax.random.key(1), (8, 3))
    mask = jnp.array([True, False, True, True, True, True, False, True])
    routing = select(rule, scores, mask=mask)
    weight = combine_weights(routing)
    assert not weight[~mask].any()
    junk = jnp.where(mask[:, None], scores, 7.0)
    np.testing.assert_allclose(combine_weights(select(rule, junk, mask=mask)), weight, atol=1e-6)
    if name != "soft":
        assert bool(mask[routing.token[routing.kept]].all())
    assert bool(jnp.isfinite(combine_weights(select(rule, scores, mask=jnp.zeros(8, bool)))).all())


@pytest.mark.parametrize("name", SELECTIONS)
def test_groups_do_not_know_each_other(name):
    rule = SelectionRule(name, k=2, capacity_factor=0.75, group_size=5)
    scores = jax.random.normal(jax.random.key(2), (10, 4))
    apart = [combine_weights(select(rule, part)) for part in (scores[:5], scores[5:])]
    np.testing.assert_allclose(combine_weights(select(rule, scores)), jnp.concatenate(apart), atol=1e-6)
    with pytest.raises(UserError, match=r"^group_size=5 does not divide 9 tokens"):
        select(rule, scores[:9])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(SELECTIONS)), st.integers(1, 4), st.integers(0, 10_000))
def test_permuting_tokens_permutes_the_routing(name, k, seed):
    """Where nothing is dropped, or the experts choose, order means nothing."""
    key, order = jax.random.key(seed), jax.random.permutation(jax.random.key(seed + 1), 6)
    scores = jax.random.normal(key, (6, 4))
    weight = combine_weights(select(SelectionRule(name, k=k), scores))
    np.testing.assert_allclose(
        combine_weights(select(SelectionRule(name, k=k), scores[order])), weight[order], atol=1e-6
    )


@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
def test_ranks(length):
    """Counting by hand, within a block and over several; 3 stands for nobody."""
    experts = np.random.default_rng(length).integers(0, 4, length)
    by_hand = [int((experts[:i] == e).sum()) for i, e in enumerate(experts)]
    assert ranks(jnp.array(experts), 3).tolist() == by_hand


@pytest.mark.parametrize("name", SELECTIONS)
def test_scores_are_float32_whatever_comes_in(name):
    routing = select(SelectionRule(name), jnp.ones((4, 2), jnp.bfloat16))
    assert routing.scores.dtype == routing.weight.dtype == jnp.float32


def test_rules_come_from_the_config():
    node = base().selection
    assert selection_rule(node)._replace(settings=None) == SelectionRule(name="soft", k=1, renormalise=True)
    assert selection_rule(node, evaluation=True)._replace(settings=None) == SelectionRule(
        name="top_k", k=1, renormalise=True
    )


@pytest.mark.parametrize(("name", "scores"), [("top_k", [200.0, -200.0]), ("raw", [0.0, 0.0])])
def test_drops_are_counted_where_weights_are_0(name, scores):
    """8 tokens choose both of 2 experts, 4 places each: 8 of 16 assignments are dropped, whatever they weigh."""
    routing = select(SelectionRule(name, k=2, capacity_factor=0.5), jnp.tile(jnp.array([scores]), (8, 1)))
    assert float(dropped(routing)) == 0.5 and load_of(routing)[0].tolist() == [0.5, 0.5]
