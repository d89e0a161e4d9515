"""The layer: routers, selections and experts joined, inside any Linen model."""

import re
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from routed.contracts import Routing, UserError
from routed.experts.ffn import Ffn
from routed.experts.mlp import Mlp
from routed.layer import moe as moe_module
from routed.layer.dispatch.direct import combine_weights
from routed.layer.moe import MoE
from routed.layer.rule import SelectionRule
from routed.metrics import load
from routed.routers.features import Flat
from routed.routers.product import ProductRouter

X = jax.random.normal(jax.random.key(0), (12, 4))


def layer(experts=4, expert=None, rule=None, **changes):
    return MoE(
        ProductRouter(experts, Flat()), expert or Mlp(4, 2, 5), experts, rule or SelectionRule(k=2),
        **({"dispatch": "dense"} | changes)
    )  # fmt: skip


@pytest.mark.parametrize("dispatch", ["ragged", "slots", "gather"])
def test_arrays_of_numpy_are_tokens(dispatch):
    moe = layer(dispatch=dispatch, rule=SelectionRule(k=2, capacity_factor=1.0))
    variables = jax.jit(moe.init)(jax.random.key(1), X)
    y, _ = moe.apply(variables, np.asarray(X), mask=np.ones(len(X), bool))
    np.testing.assert_allclose(y, jax.jit(moe.apply)(variables, X)[0], rtol=1e-6)


class Wrong(nn.Module):
    """A user's router whose scores have another shape or type."""

    change: Callable

    def __call__(self, x):
        return self.change(jnp.zeros((len(x), 4)))


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda scores: scores[:, :1], "float32[12, 1]"),
        (lambda scores: scores.T, "float32[4, 12]"),
        (lambda scores: jnp.pad(scores, ((0, 0), (0, 1))), "float32[12, 5]"),
        (lambda scores: scores.astype(int), "int32[12, 4]"),
        (lambda scores: (scores, scores), "tuple"),
    ],
)
def test_scores_of_a_users_router_are_checked_before_they_are_used(change, given):
    moe = MoE(Wrong(change), Mlp(4, 2, 5), 4, SelectionRule(k=2))
    refusal = f"Wrong: of tokens [12, 4] the router with 4 experts makes {given}; it must return scores"
    with pytest.raises(UserError, match=re.escape(refusal)):
        jax.eval_shape(moe.init, jax.random.key(0), X)


@pytest.fixture
def untyped(monkeypatch):
    """Without the types that are checked in tests alone."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"rule": SelectionRule(k=5)}, "k=5: a token has 1 to 4 of 4 experts"),
        ({"rule": SelectionRule("sigmoid", k=0)}, "k=0: a token has 1 to 4 of 4 experts"),
        ({"rule": SelectionRule("topk")}, "rule 'topk' is unknown (did you mean 'top_k'?); known: soft, top_k"),
        ({"rule": SelectionRule(k=1.5)}, "k=1.5: a token has 1 to 4 of 4 experts"),
        ({"rule": "top_k"}, "rule='top_k': must be a rule, such as SelectionRule('top_k', k=2)"),
        ({"rule": SelectionRule(capacity_factor=-1.0)}, "capacity_factor=-1.0: must be at least 0, of type float"),
        (
            {"rule": SelectionRule(capacity_factor=float("nan"))},
            "capacity_factor=nan: must be at least 0, of type float",
        ),
        ({"rule": SelectionRule(group_size=-4)}, "group_size=-4: must be at least 0, of type int"),
        ({"rule": SelectionRule(priority="scor")}, "priority='scor': must be one of position, score, causal"),
        ({"dispatch": "einsum"}, "dispatch 'einsum' is unknown"),
        ({"noise": "gumble"}, "noise 'gumble' is unknown"),
        ({"noise": "learned"}, "noise='learned': without effect, as a choice has no gradient"),
        ({"rule": SelectionRule("soft"), "noise": "gaussian"}, "soft chooses no experts: set noise_in_weights=True"),
        ({"rule": SelectionRule("relu"), "noise": "uniform"}, "relu chooses no experts: set noise_in_weights=True"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(changes, refusal, untyped):
    with pytest.raises(UserError, match=re.escape(refusal)):
        layer(**changes)


@pytest.mark.parametrize("given", [{"mask": jnp.ones(5, bool)}, {"routed_by": X[:5]}])
def test_a_mask_of_other_tokens_is_refused(given, untyped):
    with pytest.raises(UserError, match=r"tokens \[12, 4\]: `mask` is \[T\], and `routed_by` \[T, \.\.\.\]"):
        layer().init(jax.random.key(0), X, **given)


@pytest.mark.parametrize("name", ["soft", "expert_choice", "sinkhorn", "relu"])
def test_a_selection_without_a_bias_is_not_balanced_by_one(name):
    balanced = layer(rule=SelectionRule(name), balance_rate=0.1)
    with pytest.raises(UserError, match=f"balance_rate=0.1: {name} takes no bias; use 0, or top_k"):
        balanced.init(jax.random.key(0), X)


class Other(nn.Module):
    change: Any

    @nn.compact
    def __call__(self, x):
        return self.change(nn.Dense(2)(x))


@pytest.mark.parametrize(
    ("tokens", "change", "output"),
    [
        (X.reshape(3, 4, 4), lambda y: y, "[1, 4, 2]"),
        (X, lambda y: y[:, 0], "[1]"),
        (X, lambda y: y[:, None], "[1, 1, 2]"),
        (X, lambda y: (y, y), "tuple"),
    ],
)
def test_tokens_and_outputs_of_another_rank_are_refused(tokens, change, output):
    refusal = f"tokens {list(tokens.shape)}: Other returns {output} for one token, not [1, outputs]"
    with pytest.raises(UserError, match=re.escape(refusal)):
        jax.eval_shape(layer().clone(expert=Other(change)).init, jax.random.key(0), tokens)
    with pytest.raises(UserError, match=r"tokens \[0, 4\]: a layer needs at least one token"):
        layer().init(jax.random.key(0), X[:0])


def test_eight_experts_are_a_prefix_of_sixteen_and_all_differ():
    few, many = (nn.meta.unbox(jax.jit(layer(experts=n).init)(jax.random.key(3), X))["params"] for n in (8, 16))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:8]), few["experts"], many["experts"])
    np.testing.assert_array_equal(few["router"]["kernel"], many["router"]["kernel"][:, :8])
    kernel = many["experts"]["Dense_0"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1])


def test_expert_is_a_logical_axis_of_every_parameter_of_the_experts():
    specs = nn.get_partition_spec(layer().init(jax.random.key(1), X))["params"]
    assert {spec[0] for spec in jax.tree.leaves(specs["experts"])} == {"expert"}
    assert not [name for spec in jax.tree.leaves(specs["router"]) for name in spec]
    named = nn.Dense(2, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "mlp")))
    variables = layer(expert=named).init(jax.random.key(1), X)
    assert nn.get_partition_spec(variables)["params"]["experts"]["kernel"] == PartitionSpec("expert", None, "mlp")


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"expert_groups": 2}, "groups_kept=1, k=3: groups must divide the 4 experts, and the kept ones must have k"),
        ({"expert_groups": 3}, "expert_groups=3, groups_kept=1, k=3"),
    ],
)
def test_groups_that_cannot_be_are_refused(settings, refusal):
    """Two experts in the group that is kept, and three are wanted; the other settings have their defaults."""
    rule = SelectionRule("group_limited", k=3, settings=settings)
    with pytest.raises(UserError, match=refusal):
        layer(rule=rule).init(jax.random.key(0), X)
    layer(rule=rule._replace(settings={"expert_groups": 2, "groups_kept": 2})).init(jax.random.key(0), X)


def test_scores_of_few_bits_make_weights_of_float32():
    """A router of bfloat16: the dense dispatch adds weights into a table of the scores' type."""
    halves = MoE(lambda x: x.astype(jnp.bfloat16), Mlp(4, 2, 5), 4, SelectionRule(k=2), dispatch="dense")
    variables = halves.init(jax.random.key(1), X)
    _, routing = halves.apply(variables, X)
    assert routing.scores.dtype == combine_weights(routing).dtype == jnp.float32


def test_the_layer_is_its_parts():
    moe = layer()
    variables = nn.meta.unbox(jax.jit(moe.init)(jax.random.key(1), X))
    y, routing = moe.apply(variables, X)
    assert isinstance(routing, Routing) and routing.token.shape == (24,)
    weight, experts = combine_weights(routing), variables["params"]["experts"]
    by_hand = sum(
        weight[:, e : e + 1] * Mlp(4, 2, 5).apply({"params": jax.tree.map(lambda a, e=e: a[e], experts)}, X)
        for e in range(4)
    )
    np.testing.assert_allclose(y, by_hand, atol=1e-5)


class Block(nn.Module):
    """One layer of a transformer's kind, for scanning."""

    @nn.compact
    def __call__(self, x, _):
        y, routing = layer(expert=Ffn(4, 5), dispatch="ragged", balance_rate=0.1)(x)
        return x + y, load.load_of(routing)[0]


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_over_layers_with_and_without_remat(remat):
    block = nn.remat(Block) if remat else Block
    stack = nn.scan(
        block,
        length=3,
        variable_axes={"params": 0, "balance": 0},
        split_rngs={"params": True},
        metadata_params={nn.PARTITION_NAME: "layer"},
    )()
    variables = jax.jit(stack.init)(jax.random.key(0), X, None)
    specs = jax.tree.leaves(nn.get_partition_spec(variables["params"])["MoE_0"]["experts"])
    assert set(specs) == {PartitionSpec("layer", "expert", None, None)}
    variables = nn.meta.unbox(variables)
    assert jax.tree.leaves(variables["params"])[0].shape[0] == 3

    def loss(params, x):
        (y, loads), state = stack.apply(variables | {"params": params}, x, None, mutable=["balance"])
        return (y**2).sum(), (loads, state)

    (value, (loads, state)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"], X)
    x, apply = X, jax.jit(lambda one, x: Block().apply(one, x, None))
    for i in range(3):  # by hand
        x, load = apply(jax.tree.map(lambda a, i=i: a[i], variables), x)
        np.testing.assert_allclose(load, loads[i], atol=1e-6)
    np.testing.assert_allclose(value, (x**2).sum(), rtol=1e-4)
    assert all(bool(jnp.isfinite(g).all()) and bool(g.any()) for g in jax.tree.leaves(grads))
    bias = jax.tree.leaves(state)[0]
    np.testing.assert_allclose(bias, 0.1 * np.sign(np.round(1 / 4 - loads, 5)), atol=1e-6)


@pytest.mark.parametrize("name", ["dense", "slots", "ragged"])
def test_a_batch_of_seeds_equals_a_loop_and_compiles_once(name):
    moe, keys = layer(dispatch=name), jax.random.split(jax.random.key(5), 3)
    traces = []

    @jax.jit
    def run(keys, x):
        traces.append(1)
        return jax.vmap(lambda key: moe.apply(nn.meta.unbox(moe.init(key, x)), x)[0])(keys)

    together = run(keys, X)
    one = jax.jit(lambda key: moe.apply(nn.meta.unbox(moe.init(key, X)), X)[0])
    alone = jnp.stack([one(key) for key in keys])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    run(keys, X + 1)
    assert len(traces) == 1


def test_bfloat16_experts_and_float32_routing():
    full, half = layer(rule=SelectionRule(k=2)), layer(rule=SelectionRule(k=2), dtype=jnp.bfloat16)
    variables = nn.meta.unbox(jax.jit(full.init)(jax.random.key(1), X))
    (y, routing), (z, rounded) = jax.jit(full.apply)(variables, X), jax.jit(half.apply)(variables, X)
    assert z.dtype == jnp.bfloat16 and y.dtype == jnp.float32
    chex.assert_trees_all_equal(routing, rounded)  # routing is not rounded
    np.testing.assert_allclose(z.astype(jnp.float32), y, atol=0.05)
    grads = jax.jit(jax.grad(lambda v: (half.apply(v, X)[0].astype(jnp.float32) ** 2).sum()))(variables)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    shared = half.clone(shared=half.expert.clone())
    assert jax.eval_shape(shared.init_with_output, jax.random.key(1), X)[0][0].dtype == jnp.bfloat16


class Spy(nn.Module):
    """An expert that returns what it sees."""

    @nn.compact
    def __call__(self, x):
        return x + 0 * self.param("weight", nn.initializers.zeros, ())


def test_jitter_changes_the_choice_and_never_reaches_the_experts():
    moe = layer(expert=Spy(), rule=SelectionRule(k=1, renormalise=True), noise="jitter", noise_scale=0.9)
    variables = nn.meta.unbox(jax.jit(moe.init)(jax.random.key(1), X))
    y, routing = moe.apply(variables, X, rngs={"noise": jax.random.key(2)})
    np.testing.assert_array_equal(y, X)
    assert bool((routing.scores != moe.apply(variables, X)[1].scores).any())


@pytest.mark.parametrize("reaches", [False, True])
def test_noise_reaches_the_weights_only_when_asked(reaches):
    moe = layer(rule=SelectionRule(), noise="uniform", noise_scale=5.0, noise_in_weights=reaches)
    variables = nn.meta.unbox(jax.jit(moe.init)(jax.random.key(1), X))
    clean, noisy = moe.apply(variables, X)[1], moe.apply(variables, X, rngs={"noise": jax.random.key(2)})[1]
    assert bool((clean.expert != noisy.expert).any())
    assert bool((clean.scores == noisy.scores).all()) is not reaches


def test_the_balancing_bias_balances_a_router_that_learns_nothing():
    moe = layer(rule=SelectionRule(), balance_rate=0.02)
    x = jax.random.normal(jax.random.key(1), (256, 4)) + 1.0
    state = nn.meta.unbox(jax.jit(moe.init)(jax.random.key(0), x))
    assert not jax.tree.leaves(state["balance"])[0].any()  # initialising is no step
    first = float(4 * load.load_of(moe.apply(state, x)[1]).max())
    step = jax.jit(lambda state: moe.apply(state, x, mutable=["balance"]))
    for _ in range(100):
        (_, routing), moved = step(state)
        state = state | moved
    assert first > 1.5 and float(4 * load.load_of(routing).max()) < 1.2
    np.testing.assert_array_equal(moe.apply(state, x)[1].scores, routing.scores)  # evaluation moves nothing


def test_rebalanced_by_hand():
    """Fair is 1/4: up for 0 and .2, down for .5, still at .25 (and .05 more would be up)."""
    bias = load.rebalanced(jnp.zeros(4), jnp.array([0.0, 0.2, 0.55, 0.25]), 0.1)
    np.testing.assert_allclose(bias, [0.1, 0.1, -0.1, 0.0])


def test_loads_and_drops():
    moe, mask = layer(rule=SelectionRule(capacity_factor=1.0)), jnp.arange(12) < 9
    routing = moe.apply(nn.meta.unbox(jax.jit(moe.init)(jax.random.key(1), X)), X + 1, mask=mask)[1]
    chosen = np.bincount(np.asarray(routing.expert)[:9], minlength=4)
    np.testing.assert_allclose(load.load_of(routing, mask)[0], chosen / 9, rtol=1e-6)
    dropped = np.maximum(chosen - 3, 0).sum()  # ceil(12 / 4) = 3 places
    assert dropped > 0 and float(load.dropped(routing, mask)) == pytest.approx(dropped / 9)
    soft = layer(rule=SelectionRule("soft"))
    routing = soft.apply(nn.meta.unbox(jax.jit(soft.init)(jax.random.key(1), X)), X)[1]
    np.testing.assert_allclose(load.load_of(routing)[0], jax.nn.softmax(routing.scores).mean(0), rtol=1e-5)
    assert float(load.dropped(routing)) == 0


def test_a_dispatch_that_cannot_is_refused():
    with pytest.raises(TypeError, match="'slots' needs a sparse selection; with selection 'soft' use 'dense'"):
        layer(rule=SelectionRule("soft"), dispatch="slots").init(jax.random.key(0), X)


def test_auto_says_what_it_chose(monkeypatch):
    """Once a process for each dispatch, so an earlier test may have heard it."""
    said, moe = [], layer(dispatch="auto")
    monkeypatch.setattr(moe_module, "tell_choice", lambda *words: said.append(words))
    variables = nn.meta.unbox(jax.jit(moe.init)(jax.random.key(0), X))
    same = layer(dispatch="dense").apply(variables, X)[0]
    np.testing.assert_allclose(moe.apply(variables, X)[0], same, atol=1e-5)
    assert said[0][0] == "ragged" and said[0][1].startswith("dropless")
