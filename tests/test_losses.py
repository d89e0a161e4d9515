"""Auxiliary losses at uniform, collapsed and random routing, with finite gradients at each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.layer.auxiliary import auxiliary
from routed.layer.rule import SelectionRule
from routed.layer.selection import select

E, T = 4, 400
LN4 = float(np.log(4))
#: All tokens on experts 0 and 1 with certainty; every expert alike; a hundred tokens certain of each expert.
COLLAPSED = jnp.tile(jnp.array([[50.0, 50.0, 0.0, 0.0]]), (T, 1))
UNIFORM = jnp.zeros((T, E))
SPECIALISED = 50.0 * jax.nn.one_hot(jnp.arange(T) % E, E)
ALL = dict.fromkeys(("balance", "importance", "z", "entropy"), 1.0)


def values(scores, k=2, groups=1, **changes):
    """Compiled as a whole: operation by operation takes longer."""
    losses = jax.jit(
        lambda scores, changes: auxiliary(select(SelectionRule(k=k), scores), ALL, groups=groups, **changes)[1]
    )
    return {name: float(value) for name, value in losses(scores, changes).items()}


def test_uniform():
    """f is (1/2, 1/2, 0, 0) by the tie-break, P uniform: E sum f P = 4 (1/8 + 1/8) = 1. logsumexp(0) = ln 4."""
    assert values(UNIFORM) == pytest.approx({"balance": 1.0, "importance": 0.0, "z": LN4**2, "entropy": LN4}, abs=1e-5)


def test_collapsed_onto_k():
    """f = P = (1/2, 1/2, 0, 0): balance 4 (1/4 + 1/4) = 2 = E/k. Sums 200, 200, 0, 0: variance 100^2 / mean 100^2."""
    found = values(COLLAPSED)
    assert found == pytest.approx(
        {"balance": 2.0, "importance": 1.0, "z": (50 + np.log(2)) ** 2, "entropy": np.log(2)}, rel=1e-5
    )


def test_specialised_and_balanced():
    """Certain of one expert each, all equally often: f = P = 1/4, balance 1, entropy 0."""
    found = values(SPECIALISED, k=1)
    assert found == pytest.approx({"balance": 1.0, "importance": 0.0, "z": 2500.0, "entropy": 0.0}, abs=1e-3)


def test_random():
    found = values(jax.random.normal(jax.random.key(0), (T, E)))
    assert found["balance"] == pytest.approx(1.0, abs=0.1) and found["importance"] < 0.05


@pytest.mark.parametrize("scores", [UNIFORM, COLLAPSED, SPECIALISED], ids=["uniform", "collapsed", "specialised"])
@pytest.mark.parametrize("name", ALL)
def test_gradients_are_finite(name, scores):
    def loss(scores):
        return auxiliary(select(SelectionRule(k=2), scores), {name: 1.0})[0]

    assert bool(jnp.isfinite(jax.jit(jax.grad(loss))(scores)).all())


def test_balance_pushes_probability_away_from_the_crowd():
    scores = jnp.zeros((T, E)).at[:, 0].set(1.0)
    gradient = jax.grad(lambda s: auxiliary(select(SelectionRule(), s), {"balance": 1.0})[0])(scores).sum(0)
    assert gradient[0] > 0 and bool((gradient[1:] < 0).all())


def test_coefficients_weigh_and_fixed_routers_have_none():
    routing = select(SelectionRule(k=2), COLLAPSED)
    total, _ = auxiliary(routing, {"balance": 0.5, "importance": 3.0})
    assert float(total) == pytest.approx(0.5 * 2 + 3 * 1)
    assert float(auxiliary(routing, ALL, learned=jnp.array(False))[0]) == 0.0


def test_padding_counts_nowhere():
    mask = jnp.arange(T) < 200
    scores = jnp.where(mask[:, None], jax.random.normal(jax.random.key(1), (T, E)), 9.0 * jax.nn.one_hot(0, E)[None])
    assert values(scores, mask=mask) == pytest.approx(values(scores[:200]), rel=1e-5)


def test_balance_within_groups():
    """One group all on expert 0, the other all on expert 1: in the batch half and half, in a group collapsed."""
    scores = 50.0 * jax.nn.one_hot(jnp.arange(T) // (T // 2), E)
    assert values(scores, k=1)["balance"] == pytest.approx(2.0)  # 4 (1/4 + 1/4)
    assert values(scores, k=1, groups=2)["balance"] == pytest.approx(4.0)


def test_the_load_has_no_gradient():
    """Soft routing of one token, f = p = (1/5, 4/5): E p_0 (f_0 - sum f p) = 2 / 5 (.2 - .68) = -.192.

    With the gradient of f = p it would be twice that.
    """
    scores = jnp.log(jnp.array([[1.0, 4.0]]))
    gradient = jax.grad(lambda s: auxiliary(select(SelectionRule("soft"), s), {"balance": 1.0})[0])(scores)
    np.testing.assert_allclose(gradient, [[-0.192, 0.192]], rtol=1e-5)


def test_soft_routing_has_losses_too():
    assert float(auxiliary(select(SelectionRule("soft"), UNIFORM), ALL)[1]["balance"]) == pytest.approx(1.0)
