"""Other choices of a decoder's experts (experiments/token_choices.py), against hand values and permuted experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.plan import experiment
from routed.plan.config import base, canonical, problem_of
from routed.settings.tree import node_of, override
from routed.training import program
from routed.training.probes import Evaluation
from tests.test_decoder import TINY, rows

choices = experiment.load("token_choices")


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """A decoder of two sparse layers with four experts, two a token, and fresh parameters; the first row alone."""
    cache = {"data.cache": str(tmp_path_factory.mktemp("cache")), "experts.count": 4}
    config = canonical(override(base(), TINY | cache | {"model": choices.MODEL, "selection.eval.k": 2}))
    problem = problem_of(config).build(config, 0, None)
    inputs = program.Inputs(program.streams(0, config), node_of(config), (), {"validation": rows(), "test": rows()})
    params, state = jax.jit(lambda: problem.init(inputs))()
    params["router"] = jax.tree.map(lambda a: 3 * a, params["router"])
    row = jax.tree.map(lambda a: a[:1], rows())
    return Evaluation(problem, inputs, params, state, jnp.int32(0), None, row)


def test_choices_by_hand():
    order = choices.order(jnp.array([[2, 0]]), 4)
    np.testing.assert_array_equal(order, [[2, 0, 1, 3]])
    dropped = choices.DROPPED
    np.testing.assert_array_equal(choices.kept(jnp.array([5.0, 1, 3, 9]), 0.5), np.float32([0, dropped, dropped, 0]))
    scores, taken = jnp.array([[0.4, 0.1, 0.9, 0.2]]), jnp.array([[2, 0]])
    control = choices.swapped(scores, taken, jnp.array([[[1, 2]]]))
    # Expert 1 gets the .9 of expert 2, expert 2 the .4 of expert 0; experts 0 and 3 share the scores .1 and .2.
    np.testing.assert_allclose(control["offset"][0, 0], [0.1 - 0.4, 0.9 - 0.1, 0.4 - 0.9, 0.0], atol=1e-6)
    np.testing.assert_array_equal(control["choice"][0, 0], np.float32([dropped, 0, 0, dropped]))


@pytest.mark.parametrize(("count", "number"), [(4, 12), (20, 36)])  # 4 x 3 pairs; 2 x 18 exchanges, as 380 > 256
def test_a_token_tries_every_choice_or_every_exchange_once(count, number):
    taken = jnp.array([[2, 0], [1, 3]])
    tried = np.asarray(choices.tries(taken, count))
    assert tried.shape == (2, number, 2)
    for pair, some in zip(np.asarray(taken), tried, strict=True):
        assert len({tuple(row) for row in some.tolist()}) == number and (some[:, 0] != some[:, 1]).all()
        if count == 20:
            assert ((some == pair).sum(1) == 1).all()


@pytest.mark.parametrize("layer", [0, 1])
def test_forced_experts_are_those_of_a_model_with_permuted_experts(evaluation, layer):
    """The first token sees no other one: its loss with experts (a, b) is that with (a, b) in the places of its own."""
    sample = jax.jit(lambda: choices.sample(evaluation, evaluation.batch, jax.random.key(0)))()
    sites = jax.jit(lambda: choices.run(evaluation, evaluation.batch).sites)()
    routing, position = sites["decoder"].routing, jnp.array([0])
    experts = routing.expert.reshape(2, -1, 2)[:, position]
    first = sample._replace(position=position, scores=routing.scores[:, position], experts=experts)
    tried = choices.tries(first.experts[layer], 4)
    control = choices.swapped(first.scores[layer], first.experts[layer], tried)
    found = jax.jit(lambda given: choices.losses_with(evaluation, first, jnp.int32(layer), given))(control)[0]

    @jax.jit
    def permuted(source):
        stacks = jax.tree.map(lambda a: a.at[layer].set(a[layer][source]), evaluation.params["experts"])
        logits = choices.run(evaluation, evaluation.batch, evaluation.params | {"experts": stacks}).prediction
        return choices.nats(logits, evaluation.batch, position)[0]

    chosen = np.asarray(first.experts[layer, 0])
    for loss, pair in zip(found, np.asarray(tried[0]), strict=True):
        source = np.arange(4)
        source[chosen] = pair
        np.testing.assert_allclose(loss, permuted(source), rtol=1e-5)
    assert np.ptp(found) > 1e-4


def test_a_selection_without_k_is_refused():
    _, config = experiment.configure("token_choices:smoke", ["selection.eval.name=relu"])
    with pytest.raises(UserError, match="decoder_choices tries other choices of k experts; use top_k"):
        choices.check(config)


def test_dropped_experts_get_no_token(evaluation):
    offset = jnp.stack([choices.kept(jnp.array([[5.0, 1, 3, 9]]), 0.5)] * 2)
    routing = choices.run(evaluation, evaluation.batch, offset=offset).sites["decoder"].routing
    assert {*np.asarray(routing.expert).ravel().tolist()} == {0, 3}
    assert choices.loss_on(evaluation, jax.tree.map(lambda a: a[None], evaluation.batch), offset=offset) > 0


def test_a_repair_trains_the_router_of_one_layer(evaluation):
    blocks = jax.tree.map(lambda a: jnp.stack([a] * 8), evaluation.batch)
    after = jax.jit(lambda: choices.repaired(evaluation, blocks, jnp.int32(1)))()
    loss = jax.jit(lambda params: choices.loss_on(evaluation, blocks, params))
    assert loss(after) < loss(evaluation.params) - 1e-4
    moved = jax.tree.map(lambda a, b: (a != b).any((1, 2)).tolist(), after["router"], evaluation.params["router"])
    assert jax.tree.leaves(moved) == [False, True]


def test_evaluations_have_the_losses_and_regrets(evaluation):
    """The best of all choices has no regret, and a table of this text's own choices no more than random ones."""
    metrics = jax.jit(lambda: choices.evaluate(evaluation._replace(batch=evaluation.inputs.shared["validation"])))()
    regrets = {
        name.removeprefix("decoder/regret"): np.asarray(value) for name, value in metrics.items() if "regret" in name
    }
    assert regrets.keys() == choices.ROUTERS.keys()
    assert all(value.shape == (2,) and (value >= 0).all() for value in regrets.values())
    assert {name for name in metrics if "kept" in name} == {
        f"test/kept_{w}{e}" for w in choices.WAYS for e in choices.SHARES
    }
