"""Rules and losses of published models by hand; tests/external compares them with transformers' own modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import FrozenConfigDict

from routed.contracts import UserError
from routed.experts.ffn import Ffn
from routed.experts.mlp import Mlp
from routed.layer import model_losses, model_rules, selection
from routed.layer.auxiliary import AUXILIARY, auxiliary
from routed.layer.dispatch.direct import combine_weights
from routed.layer.moe import MoE
from routed.layer.rule import SelectionRule
from routed.layer.selection import capacity, select
from routed.metrics import load
from routed.metrics.agreement import churn
from routed.metrics.router import chosen
from routed.plan.config import base
from routed.routers.features import Flat
from routed.routers.product import ProductRouter
from routed.settings.tree import from_flat, override

X = jax.random.normal(jax.random.key(0), (6, 4))


def own(**changes):
    defaults = {name: setting.default for name, setting in model_rules.GROUPS.items()}
    return FrozenConfigDict(defaults | changes)


def logit(rows):
    p = np.array(rows, np.float32)
    return jnp.asarray(np.log(p / (1 - p)))


def weights(rule, scores, **more):
    return np.asarray(combine_weights(select(rule, scores, **more)))


def test_groups_of_experts_by_hand():
    """V3: groups count .9 + .1 = 1 and .6 + .7 = 1.3, so the best expert is out of reach; a bias of .4 lets it in."""
    scores = logit([[0.9, 0.1, 0.6, 0.7]])
    rule = SelectionRule("group_limited", k=1, settings=own(expert_groups=2, groups_kept=1, scaling=2.5))
    np.testing.assert_allclose(weights(rule, scores), [[0, 0, 0, 2.5 * 0.7]], rtol=1e-5)
    bias = jnp.array([0.4, 0, 0, 0])  # chooses, and does not weigh
    np.testing.assert_allclose(weights(rule, scores, bias=bias), [[2.5 * 0.9, 0, 0, 0]], rtol=1e-5)
    both = rule._replace(k=2, renormalise=True)
    np.testing.assert_allclose(weights(both, scores), [[0, 0, 2.5 * 6 / 13, 2.5 * 7 / 13]], rtol=1e-5)
    free = SelectionRule("group_limited", k=2, settings=own())
    np.testing.assert_allclose(weights(free, scores), [[0.9, 0, 0, 0.7]], rtol=1e-5)


def test_sure_sigmoids_are_chosen_by_their_scores_and_counted_by_their_sigmoids():
    """sigmoid(20) = sigmoid(30) = 1 in float32. Groups count 1 + 1 and 1 + sigmoid(-5) = 1.007: the first wins."""
    scores = jnp.array([[20.0, 30.0, -5.0, 40.0]])
    assert select(SelectionRule("group_limited", settings=own()), scores).expert.tolist() == [3]
    rule = SelectionRule("group_limited", settings=own(expert_groups=2, groups_kept=1))
    assert select(rule, scores).expert.tolist() == [1]


def test_groups_of_experts_by_their_best():
    """V2: of shares 5/12, 1/12, 3/12, 3/12 the first group has the best; its second expert goes before better ones."""
    scores = jnp.log(jnp.array([[5.0, 1.0, 3.0, 3.0]]))
    rule = SelectionRule("group_limited", k=2, settings=own(expert_groups=2, groups_kept=1, affinity="softmax"))
    np.testing.assert_allclose(weights(rule, scores), [[5 / 12, 1 / 12, 0, 0]], rtol=1e-5)


def test_groups_that_do_not_fit_are_refused():
    for changes, message in (
        ({"selection.expert_groups": 3}, "does not divide experts.count=8"),
        ({"selection.expert_groups": 4, "selection.groups_kept": 1, "selection.k": 3}, "must leave k experts"),
    ):
        config = override(base(), {"experts.count": 8, "selection.name": "group_limited"} | changes)
        with pytest.raises(UserError, match=message):
            selection.SELECTIONS["group_limited"].check(config)


def test_relu_gates_weigh_with_their_scores_and_keep_what_is_positive():
    scores = jnp.array([[1.0, -1.0, 2.0], [-1.0, -2.0, -3.0]])
    routing = select(SelectionRule("relu"), scores)
    np.testing.assert_allclose(combine_weights(routing), [[1, 0, 2], [0, 0, 0]])
    assert routing.kept.reshape(2, 3).tolist() == [[True, False, True], [False, False, False]]
    gradient = jax.grad(
        lambda s: (combine_weights(select(SelectionRule("relu"), s)) * jnp.array([[3.0, 5.0, 7.0]] * 2)).sum()
    )(scores)
    np.testing.assert_allclose(gradient, [[3, 0, 7], [0, 0, 0]])


@pytest.mark.slow
def test_relu_gates_have_places_for_all_tokens_whatever_the_capacity():
    """All 4 tokens choose both experts: ranks reach 3; 1.0 x 1 x 4 / 2 = 2 places would make experts overwrite."""
    x, rule = jnp.abs(X[:4]), SelectionRule("relu", capacity_factor=1.0)
    of = lambda dispatch: MoE(ProductRouter(2, Flat()), Mlp(4, 2, 5), 2, rule, dispatch=dispatch)  # noqa: E731
    params = nn.meta.unbox(of("dense").init(jax.random.key(1), x))["params"] | {"router": {"kernel": jnp.ones((4, 2))}}
    expected, routing = of("dense").apply({"params": params}, x)
    assert bool(routing.kept.all()) and int(routing.rank.max()) == 3
    for dispatch in ("slots", "auto"):
        np.testing.assert_allclose(of(dispatch).apply({"params": params}, x)[0], expected, atol=1e-5)


def test_what_relu_gates_pay():
    """Two tokens, scores (1, -1) and (3, -1): expert 0 has all load, twice a fair one: 2 (1 + 3) / (2 x 2) = 2."""
    routing = select(SelectionRule("relu"), jnp.array([[1.0, -1.0], [3.0, -1.0]]))
    assert float(auxiliary(routing, {"l1": 1.0})[1]["l1"]) == pytest.approx(2.0)
    even = select(SelectionRule("relu"), jnp.array([[1.0, 1.0], [3.0, 3.0]]))  # fair: (1 + 1 + 3 + 3) / 4
    assert float(auxiliary(even, {"l1": 1.0})[1]["l1"]) == pytest.approx(2.0)


def test_the_coefficient_of_what_relu_gates_pay_follows_how_many_are_positive():
    """Two layers of 2 tokens, 2, 1, 1 and 0 positive scores: 1 a token, so the factor rises for .5, falls for 1.5."""
    scores = [jnp.array([[1.0, 2.0], [3.0, -1.0]]), jnp.array([[[-1.0, 1.0], [-1.0, 0.0]]])]
    for wanted, expected in ((0.5, 1.2e-8), (1.5, 1e-8 / 1.2), (1.0, 1e-8)):
        losses = from_flat({"l1_gates": wanted, "l1_factor": 1.2})
        assert float(model_losses.adapted(losses, 1e-8, scores)) == pytest.approx(expected)
    many = from_flat({"l1_gates": 2.0, "l1_factor": 1.2})
    assert float(model_losses.adapted(many, 1e-20, scores)) == pytest.approx(1e-20)  # from where it can return


def test_places_of_relu_gates_that_are_not_chosen_are_no_load_and_no_drop():
    """Scores (1, -1), (3, -1), (-1, 2): experts have 2 and 1 of 3 choices; nothing found no place."""
    routing = select(SelectionRule("relu"), jnp.array([[1.0, -1.0], [3.0, -1.0], [-1.0, 2.0]]))
    np.testing.assert_allclose(load.load_of(routing), [[2 / 3, 1 / 3]])
    assert float(load.dropped(routing)) == 0
    assert chosen(routing).tolist() == [[0, -1], [0, -1], [-1, 1]]
    np.testing.assert_allclose(load.load(chosen(routing), 2), [2 / 3, 1 / 3])
    assert churn(np.asarray(chosen(routing)), np.array([[0, 1], [1, -1], [-1, 1]])) == pytest.approx(1 / 3)


def test_the_load_loss_by_hand():
    """Scores 0 and 1, k = 1, deviation 1: 1 - Phi(1) = .158655, 1/2; mean .329328, variance .170672^2 = .029129."""
    scores = jnp.array([[0.0, 1.0]])
    assert float(model_losses.load(scores, scores, 1.0, 1)) == pytest.approx(0.029129 / 0.329328**2, rel=1e-4)
    assert float(model_losses.load(jnp.zeros((3, 4)), jnp.zeros((3, 4)), 1.0, 2)) == pytest.approx(0, abs=1e-7)
    padded = model_losses.load(
        jnp.array([[0.0, 1.0], [9.0, 0.0]]), jnp.array([[0.0, 1.0], [9.0, 0.0]]), 1.0, 1, jnp.array([True, False])
    )
    assert float(padded) == pytest.approx(0.029129 / 0.329328**2, rel=1e-4)
    # Equal shifts of a token's scores change nothing, so its gradients sum to 0: the threshold has one, too.
    gradient = jax.grad(lambda scores: auxiliary(select(SelectionRule(k=1), scores), {"load": 1.0})[1]["load"])(scores)
    assert float(gradient.sum()) == pytest.approx(0, abs=1e-6) and float(gradient[0, 1]) > 0.1
    config = override(base(), {"selection.name": "relu", "losses.load": 0.1})
    with pytest.raises(UserError, match=r"losses.load=0.1: selection.name=relu has no k; set it to 0"):
        AUXILIARY["load"].check(config)
    found = auxiliary(select(SelectionRule(k=1), scores), {"load": 1.0})[1]["load"]
    assert float(found) == pytest.approx(0.029129 / 0.329328**2, rel=1e-4)


def test_balance_of_sigmoids_by_sequence():
    """A sequence a group. First: both tokens at expert 0, gates (.8, .2), sum 1: 2 (.8) = 1.6; second: one each: 1."""
    scores = logit([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.2, 0.8]])
    routing = select(SelectionRule("sigmoid", k=1), scores)
    assert float(auxiliary(routing, {"balance_sigmoid": 1.0}, groups=2)[1]["balance_sigmoid"]) == pytest.approx(
        (1.6 + 1.0) / 2, rel=1e-5
    )


def test_balance_pooled_over_layers_lets_layers_make_up_for_each_other():
    """Layers all on expert 0 and all on expert 1, probabilities .8: alone 2 (.8) = 1.6, together 2 (.25 + .25) = 1."""
    probs = jnp.array([[[0.8, 0.2]] * 3, [[0.2, 0.8]] * 3])
    assert float(model_losses.balance_pooled(probs, jnp.array([[1.0, 0.0], [0.0, 1.0]]))) == pytest.approx(1.0)
    assert float(model_losses.balance_pooled(probs[:1], jnp.array([[1.0, 0.0]]))) == pytest.approx(1.6)


def test_a_capacity_is_rounded_up_to_a_multiple():
    rule = SelectionRule(k=1, capacity_factor=1.0)
    assert [capacity(rule._replace(capacity_multiple=m), 20, 4) for m in (1, 4, 8, 64)] == [
        5,
        8,
        8,
        20,
    ]  # 20 / 4; at most 20


@pytest.mark.slow
def test_a_shared_expert_is_added_to_all():
    experts = {
        "router": ProductRouter(4, Flat()),
        "expert": Mlp(4, 2, 5),
        "num_experts": 4,
        "rule": SelectionRule(k=2),
        "dispatch": "dense",
    }
    moe, plain = MoE(**experts, shared=Ffn(4, 3)), MoE(**experts)
    params = nn.meta.unbox(moe.init(jax.random.key(1), X))["params"]
    common = Ffn(4, 3).apply({"params": params["shared"]}, X)
    apart = plain.apply({"params": {name: params[name] for name in ("router", "experts")}}, X)[0]
    np.testing.assert_allclose(moe.apply({"params": params}, X)[0], apart + common, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["dense", "gather", "slots"])
def test_weights_may_scale_the_input(dispatch, monkeypatch):
    """Of a linear expert without bias nothing changes; of one with a bias b, w (A x + b) becomes A (w x) + b."""
    experts = {
        "router": ProductRouter(4, Flat()),
        "expert": nn.Dense(3),
        "num_experts": 4,
        "rule": SelectionRule("sigmoid", k=1),
        "dispatch": dispatch,
    }
    moe, outside = MoE(**experts | {"rule": SelectionRule("sigmoid_input", k=1)}), MoE(**experts)
    params = nn.meta.unbox(moe.init(jax.random.key(1), X))["params"]
    np.testing.assert_allclose(moe.apply({"params": params}, X)[0], outside.apply({"params": params}, X)[0], atol=1e-6)
    params["experts"]["bias"] = jnp.ones((4, 3))
    y, routing = outside.apply({"params": params}, X)
    np.testing.assert_allclose(moe.apply({"params": params}, X)[0], y - routing.weight[:, None] + 1, atol=1e-6)
    with pytest.raises(ValueError, match="6 tokens have 12"):
        MoE(**experts | {"rule": SelectionRule("sigmoid_input", k=2)}).apply({"params": params}, X)
    # 8 tokens, 4 experts of 2 places: as many weights as tokens, and they are not the tokens'.
    both = selection.SELECTIONS["expert_choice"]._replace(weighs_inputs=True)
    monkeypatch.setitem(selection.SELECTIONS, "both", both)
    with pytest.raises(ValueError, match="by 'both' experts choose"):
        MoE(**experts | {"rule": SelectionRule("both")}).apply({"params": params}, jnp.ones((8, 4)))


def test_llama_4s_rule_is_a_selection():
    """Tokens of several experts are refused, and evaluations by another rule."""
    asked = {"selection.name": "sigmoid_input", "selection.eval.name": "sigmoid_input"}
    check = selection.SELECTIONS["sigmoid_input"].check
    check(override(base(), asked))
    for changes, message in (
        ({"selection.k": 2}, r"selection\.k=2.*scales the input of one expert"),
        ({"selection.eval.name": "top_k"}, r"selection\.eval\.name='top_k'.*use the same"),
    ):
        with pytest.raises(UserError, match=message):
            check(override(base(), asked | changes))
