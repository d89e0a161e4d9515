"""Auxiliary losses at uniform, collapsed and random routing, with finite gradients at each."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.layer.auxiliary import AUXILIARY, Auxiliary, auxiliary
from routed.layer.rule import SelectionRule
from routed.layer.selection import SELECTIONS, select
from routed.settings.tree import from_flat

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


#: Scores of which softmax and sigmoids are 0 in float32; one such token among others makes a NaN of all gradients.
FAR = [jnp.zeros((8, E)).at[0].set(low + jnp.arange(E)) for low in (-50.0, -120.0, -200.0, 200.0)]
#: Losses of a layer's scores alone.
OF_SCORES = (*ALL, "balance_sigmoid", "l1", "load")


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("name", SELECTIONS)
def test_every_selection_and_loss_is_finite_at_any_score(name, renormalise):
    """E = 4 experts; k = 2 of them, or what the selection has."""
    rule = SelectionRule(name, k=1 if SELECTIONS[name].weighs_inputs else 2, renormalise=renormalise)
    if SELECTIONS[name].within_samples:
        rule = rule._replace(group_size=8)

    @jax.jit
    def both(scores):
        def total(scores):
            routing = select(rule, scores)
            return auxiliary(routing, dict.fromkeys(OF_SCORES, 1.0))[0] + (routing.weight**2).sum()

        return jax.value_and_grad(total)(scores)

    for scores in (
        *FAR,
        UNIFORM[:8],
        COLLAPSED[:8],
        SPECIALISED[:8],
        100 * jax.random.normal(jax.random.key(1), (8, E)),
    ):
        value, gradient = both(scores)
        assert np.isfinite(value) and np.isfinite(gradient).all(), scores[0]


def test_vanishing_sigmoids_share_their_weight():
    """Two equal sigmoids of -120, which are 0 in float32, have half of the weight each, as those of -1 have."""
    groups = SELECTIONS["group_limited"].settings
    settings = from_flat({name: setting.default for name, setting in groups.items()} | {"affinity": "sigmoid"})
    rule = SelectionRule("group_limited", k=2, renormalise=True, settings=settings)
    for score in (-1.0, -120.0):
        scaling = settings["scaling"]
        assert select(rule, jnp.full((1, E), score)).weight.tolist() == pytest.approx([scaling / 2] * 2)


@pytest.mark.parametrize("name", ["balance", "balance_sigmoid", "l1"])
def test_a_group_of_padding_counts_nowhere(name):
    """Three groups of tokens and one of padding have the loss of the three."""
    scores, mask = 2 * jax.random.normal(jax.random.key(2), (64, E)), jnp.arange(64) < 48

    @partial(jax.jit, static_argnums=2)
    def loss(scores, mask, groups):
        return auxiliary(select(SelectionRule(k=2), scores, mask=mask), {name: 1.0}, mask=mask, groups=groups)[0]

    assert float(loss(scores, mask, 4)) == pytest.approx(float(loss(scores[:48], mask[:48], 3)), rel=1e-5)


def test_balance_pushes_probability_away_from_the_crowd():
    scores = jnp.zeros((T, E)).at[:, 0].set(1.0)
    gradient = jax.grad(lambda s: auxiliary(select(SelectionRule(), s), {"balance": 1.0})[0])(scores).sum(0)
    assert gradient[0] > 0 and bool((gradient[1:] < 0).all())


def test_coefficients_weigh_and_fixed_routers_have_none():
    routing = select(SelectionRule(k=2), COLLAPSED)
    total, _ = auxiliary(routing, {"balance": 0.5, "importance": 3.0})
    assert float(total) == pytest.approx(0.5 * 2 + 3 * 1)
    assert float(auxiliary(routing, ALL, learned=jnp.array(False))[0]) == 0.0


def test_a_loss_that_is_none_is_named(monkeypatch):
    routing = select(SelectionRule(k=2), COLLAPSED)
    with pytest.raises(UserError, match=r"loss 'balanc' is unknown \(did you mean 'balance'\?\); known: balance, "):
        auxiliary(routing, {"balanc": 1.0})
    monkeypatch.setitem(AUXILIARY, "own", Auxiliary(lambda inputs: inputs.probs.max(1), ""))
    with pytest.raises(UserError, match=rf"loss 'own' returns \[{T}\]; it must return one number"):
        auxiliary(routing, {"own": 1.0})


def test_losses_of_several_layers_at_once_are_refused():
    routing = select(SelectionRule(), UNIFORM[:8])
    layers = jax.tree.map(lambda a: jnp.stack([a, a]), routing)
    with pytest.raises(UserError, match=r"scores \[2, 8, 4\]: must be \[T, E\]; of several layers take jax.vmap"):
        auxiliary(layers, {"z": 1.0})


def test_padding_counts_nowhere():
    mask = jnp.arange(T) < 200
    scores = jnp.where(mask[:, None], jax.random.normal(jax.random.key(1), (T, E)), 9.0 * jax.nn.one_hot(0, E)[None])
    assert values(scores, mask=mask) == pytest.approx(values(scores[:200]), rel=1e-5)


def test_balance_within_groups():
    """One group all on expert 0, the other all on expert 1: in the batch half and half, in a group collapsed."""
    scores = 50.0 * jax.nn.one_hot(jnp.arange(T) // (T // 2), E)
    assert values(scores, k=1)["balance"] == pytest.approx(2.0)  # 4 (1/4 + 1/4)
    assert values(scores, k=1, groups=2)["balance"] == pytest.approx(4.0)
    with pytest.raises(UserError, match="groups=3: 400 tokens do not make"):
        values(scores, k=1, groups=3)


def test_a_mask_of_numpy_is_a_mask():
    """Half of the tokens, all on expert 0: 4 (1 x 1)."""
    scores, mask = 50.0 * jax.nn.one_hot(jnp.arange(T) // (T // 2), E), np.arange(T) < T // 2
    lost = jax.jit(lambda scores: auxiliary(select(SelectionRule(k=1), scores), {"balance": 1.0}, mask=mask)[0])
    assert lost(scores) == pytest.approx(4.0)


def test_the_load_has_no_gradient():
    """Soft routing of one token, f = p = (1/5, 4/5): E p_0 (f_0 - sum f p) = 2 / 5 (.2 - .68) = -.192.

    With the gradient of f = p it would be twice that.
    """
    scores = jnp.log(jnp.array([[1.0, 4.0]]))
    gradient = jax.grad(lambda s: auxiliary(select(SelectionRule("soft"), s), {"balance": 1.0})[0])(scores)
    np.testing.assert_allclose(gradient, [[-0.192, 0.192]], rtol=1e-5)


def test_soft_routing_has_losses_too():
    assert float(auxiliary(select(SelectionRule("soft"), UNIFORM), ALL)[1]["balance"]) == pytest.approx(1.0)
