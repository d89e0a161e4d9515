"""Routers, selections, dispatches and the layer that joins them, against hand-computed values and the dense oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed.dispatch import DISPATCHES, dense, gather
from routed.experts import Constant, Linear, Mlp, mlp_parameters, width_for
from routed.moe import MoE
from routed.routers import ROUTERS, HashRouter, LinearRouter, OracleRouter
from routed.routers.linear import initialise, temperature_for
from routed.selection import combine_weights, soft, top_k

LN2 = float(np.log(2))


def test_soft_weights_are_the_softmax():
    # exp(0), exp(ln 2): shares 1/3 and 2/3.
    weight = combine_weights(soft(jnp.array([[0.0, LN2]])))
    np.testing.assert_allclose(weight, [[1 / 3, 2 / 3]], rtol=1e-6)


def test_top_k_weights_full_and_renormalised():
    scores = jnp.log(jnp.array([[1.0, 2.0, 5.0]]))  # softmax 1/8, 2/8, 5/8
    full = combine_weights(top_k(scores, k=2, renormalise=False))
    np.testing.assert_allclose(full, [[0, 2 / 8, 5 / 8]], rtol=1e-6)
    share = combine_weights(top_k(scores, k=2, renormalise=True))
    np.testing.assert_allclose(share, [[0, 2 / 7, 5 / 7]], rtol=1e-6)
    one = combine_weights(top_k(scores, k=1, renormalise=True))
    np.testing.assert_array_equal(one, [[0, 0, 1.0]])


def test_ties_go_to_the_lower_index():
    routing = top_k(jnp.zeros((3, 4)), k=2, renormalise=True)
    assert routing.expert.tolist() == [0, 1] * 3 and routing.token.tolist() == [0, 0, 1, 1, 2, 2]


def test_dropped_assignments_weigh_nothing():
    routing = top_k(jnp.array([[3.0, 1.0]]), k=2, renormalise=True)
    weight = combine_weights(routing._replace(kept=jnp.array([True, False])))
    assert weight[0, 0] > 0 and weight[0, 1] == 0


@pytest.mark.parametrize(("k", "renormalise", "gradient"), [(1, True, False), (1, False, True), (2, True, True)])
def test_router_gradient_through_selection(k, renormalise, gradient):
    def loss(scores):
        return (combine_weights(top_k(scores, k=k, renormalise=renormalise)) * jnp.array([[1.0, 2.0, 4.0]])).sum()

    assert bool(jnp.abs(jax.grad(loss)(jnp.array([[0.1, 0.5, 0.2]]))).sum() > 0) is gradient


EXPERTS = {"constant": Constant(2), "linear": Linear(2), "mlp": Mlp(2, 3, 5)}


def layer(router="linear", expert="mlp", experts=4, select=soft, dispatch=dense):
    return MoE(ROUTERS[router](experts), EXPERTS[expert], experts, select, dispatch)


@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (1, 5, 2), (7, 3, 3), (6, 4, 1)])
def test_gather_equals_dense(expert, tokens, experts, k):
    x = jax.random.normal(jax.random.key(0), (tokens, 3))
    pick = lambda scores: top_k(scores, k=k, renormalise=False)  # noqa: E731
    parts = [layer(expert=expert, experts=experts, select=pick, dispatch=d) for d in (dense, gather)]
    variables = parts[0].init(jax.random.key(1), x)
    value = [p.apply(variables, x)[0] for p in parts]
    np.testing.assert_allclose(value[0], value[1], atol=1e-5)
    grads = [jax.grad(lambda v, p=p: (p.apply(v, x)[0] ** 2).sum())(variables) for p in parts]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *grads)


def test_gather_refuses_soft_routing():
    with pytest.raises(TypeError, match="sparse selection"):
        layer(dispatch=DISPATCHES["gather"]).init(jax.random.key(0), jnp.ones((2, 3)))


def test_one_expert_is_the_expert():
    x = jax.random.normal(jax.random.key(0), (5, 3))
    moe = layer(experts=1)
    params = moe.init(jax.random.key(1), x)["params"]
    alone = Mlp(2, 3, 5).apply({"params": jax.tree.map(lambda a: a[0], params["experts"])}, x)
    np.testing.assert_allclose(moe.apply({"params": params}, x)[0], alone, atol=1e-6)


def test_equal_experts_make_routing_irrelevant():
    x = jax.random.normal(jax.random.key(0), (5, 3))
    moe = layer()
    params = moe.init(jax.random.key(1), x)["params"]
    same = params | {"experts": jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), params["experts"])}
    other = same | {"router": jax.tree.map(lambda a: -3 * a, same["router"])}
    np.testing.assert_allclose(*(moe.apply({"params": p}, x)[0] for p in (same, other)), atol=1e-5)


def test_eight_experts_are_a_prefix_of_sixteen():
    x = jnp.ones((2, 3))
    few, many = (layer(experts=n).init(jax.random.key(3), x)["params"] for n in (8, 16))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:8]), few["experts"], many["experts"])
    np.testing.assert_array_equal(few["router"]["kernel"], many["router"]["kernel"][:, :8])


def test_experts_start_different():
    kernel = layer().init(jax.random.key(3), jnp.ones((2, 3)))["params"]["experts"]["Dense_0"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1])


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router(name):
    """Shape, finite scores, permuting tokens permutes scores, seeds under vmap equal a loop."""
    router, x, cluster = ROUTERS[name](4), jax.random.normal(jax.random.key(0), (6, 3)), jnp.arange(6) % 4
    keys = jax.random.split(jax.random.key(1), 2)
    one = lambda key: router.apply(router.init(key, x, cluster=cluster), x, cluster=cluster)  # noqa: E731
    scores = one(keys[0])
    assert scores.shape == (6, 4) and bool(jnp.isfinite(scores).all())
    np.testing.assert_allclose(jax.vmap(one)(keys), jnp.stack([one(k) for k in keys]), atol=1e-5)
    order = jnp.array([3, 1, 0, 5, 4, 2])
    variables = router.init(keys[0], x, cluster=cluster)
    moved = router.apply(variables, x[order], cluster=cluster[order])
    np.testing.assert_allclose(moved, scores[order], atol=1e-5)


def test_oracle_sends_cluster_c_to_expert_c_mod_e():
    scores = OracleRouter(3).apply({}, jnp.zeros((4, 2)), cluster=jnp.array([0, 1, 2, 5]))
    assert scores.argmax(-1).tolist() == [0, 1, 2, 2]
    np.testing.assert_array_equal(jax.nn.softmax(scores).max(-1), 1.0)


def test_hash_depends_on_signs_only():
    variables = {"params": {"planes": jnp.eye(2)}}  # bits are the signs of the two inputs
    x = jnp.array([[1.0, 1.0], [9.0, 0.1], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    buckets = HashRouter(4).apply(variables, x).argmax(-1)
    assert buckets.tolist() == [3, 3, 1, 2, 0]  # 1*first + 2*second


def test_linear_router_is_x_times_w_without_bias():
    scores = LinearRouter(2).apply(
        {"params": {"kernel": jnp.array([[1.0, 2.0], [0.0, -1.0]])}}, jnp.array([[3.0, 4.0]])
    )
    assert scores.tolist() == [[3.0, 2.0]]  # 3*1+4*0, 3*2-4*1


def asked(**changes):
    plain = {"router.from_data": False, "router.init_scale": 1.0, "router.entropy": 0.0}
    return {k: jnp.asarray(v) for k, v in (plain | {f"router.{k}": v for k, v in changes.items()}).items()}


def test_initialise_scales_copies_and_sharpens():
    key = jax.random.key(0)
    kernel, x = jax.random.normal(key, (3, 4)), jax.random.normal(jax.random.key(1), (50, 3))
    np.testing.assert_array_equal(initialise(kernel, x[:4], x, asked()), kernel)
    np.testing.assert_array_equal(initialise(kernel, x[:4], x, asked(init_scale=0.5)), kernel * 0.5)
    np.testing.assert_array_equal(initialise(kernel, x[:4], x, asked(from_data=True)), x[:4].T)
    probs = jax.nn.softmax(x @ initialise(kernel, x[:4], x, asked(entropy=0.3)))
    assert float(-(probs * jnp.log(probs)).sum(-1).mean()) == pytest.approx(0.3, abs=1e-3)
    assert bool(jnp.isnan(initialise(kernel, x[:4], x, asked(entropy=jnp.nan))).all())


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 1.3), st.integers(0, 1000))
def test_temperature_reaches_any_entropy_between_zero_and_uniform(entropy, seed):
    scores = jax.random.normal(jax.random.key(seed), (30, 4))  # entropy 0 .. log 4 = 1.386
    probs = jax.nn.softmax(temperature_for(scores, jnp.float32(entropy)) * scores)
    assert float(-jax.scipy.special.xlogy(probs, probs).sum(-1).mean()) == pytest.approx(entropy, abs=2e-3)


def test_mlp_parameters_and_width():
    # 3 -> 5 -> 5 -> 2 with biases: 4*5 + 6*5 + 6*2 = 62.
    assert mlp_parameters(3, 2, 3, 5) == 62
    counted = sum(a.size for a in jax.tree.leaves(Mlp(2, 3, 5).init(jax.random.key(0), jnp.ones((1, 3)))))
    assert counted == 62
    assert width_for(62, 3, 2, 3) == 5 and width_for(63, 3, 2, 3) == 5
