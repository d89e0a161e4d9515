"""Competition: who wins, what the router learns of it, where gradients go, and that share 0 is nothing but top-k."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import Routing, UserError
from routed.experts import EXPERTS, Constant, Linear
from routed.layer.auxiliary import auxiliary
from routed.layer.moe import MoE
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import select, work
from routed.papers.pham2024 import competition
from routed.papers.pham2024.arms import ARMS
from routed.plan.checks import validate
from routed.plan.config import base
from routed.routers import ROUTERS
from routed.routers.product import OnlineKMeansRouter
from routed.settings.tree import node_of, override
from routed.training.samples import experts_per_token
from tests.parallel_case import make_mesh
from tests.test_decoder import ready
from tests.test_decoder import rows as rows_of_text
from tests.test_decoder import settings as settings_of_text


def settings(**changes):
    flat = {"selection.name": "compete", "selection.k": 2, "experts.count": 4, "dispatch": "auto"}
    return override(base(), flat | changes)


def layer(expert, mesh=None, dispatch="auto", **changes):
    config = settings(**changes)
    return MoE(
        router=ROUTERS["linear"].make(node_of(config).router, 4), expert=expert, num_experts=4,
        rule=selection_rule(config.selection), mesh=mesh, dispatch=dispatch,
    )  # fmt: skip


X = jax.random.normal(jax.random.key(0), (6, 3))


def ran(moe, params, x=X, key=None):
    rngs = {"rngs": {"noise": jax.random.key(7) if key is None else key}}
    return moe.apply({"params": params}, x, step=0, **rngs)


def made(moe):
    return jax.tree.map(lambda a: a.value if hasattr(a, "value") else a,
                        moe.init(jax.random.key(1), X, step=0)["params"],
                        is_leaf=lambda a: hasattr(a, "value"))  # fmt: skip


def test_the_largest_outputs_win_by_hand():
    """Constant experts of norms 1, 3, 0, 2: 3 and 2 win for every token, with e^3 / (e^3 + e^2) = .731 and .269."""
    moe = layer(Constant(2), **{"selection.competition_rate": 1.0})
    value = jnp.array([[1.0, 0], [0, 3], [0, 0], [-2, 0]])[:, None]
    params = made(moe) | {"experts": {"value": value}}
    y, routing = ran(moe, params)
    assert routing.expert.reshape(6, 2).tolist() == [[1, 3]] * 6
    np.testing.assert_allclose(y, np.tile([-2 * 0.268941, 3 * 0.731059], (6, 1)), rtol=1e-5)
    np.testing.assert_allclose(routing.scores, X @ params["router"]["kernel"], rtol=1e-5)  # the router's, whoever wins


def test_a_balance_loss_counts_the_winners_load():
    """Experts 1 and 3 win, the router is sure of 0 and 2 (half each): 4 (.5 * 0 + .5 * 0) = 0.

    A layer that does not compete sends tokens where its router is sure: 4 (.5 * .5 + .5 * .5) = 2.
    """
    value = jnp.array([[1.0, 0], [0, 3], [0, 0], [-2, 0]])[:, None]
    x = jnp.ones((6, 3))
    for share, expected in ((1.0, 0.0), (0.0, 2.0)):
        moe = layer(Constant(2), **{"selection.competition_rate": share})
        kernel = jnp.zeros((3, 4)).at[0].set(jnp.array([20.0, 0.0, 20.0, 0.0]))
        _, routing = ran(moe, made(moe) | {"experts": {"value": value}, "router": {"kernel": kernel}}, x)
        total, _ = auxiliary(routing, {"balance": 1.0})
        np.testing.assert_allclose(total, expected, atol=1e-6)
    assert ARMS["compete_balanced"].changes == ARMS["compete"].changes | {"losses.balance": 0.01}


@pytest.mark.slow
def test_share_0_is_top_k():
    params = made(layer(Linear(2)))
    both = []
    for changes in ({"selection.competition_rate": 0.0}, {"selection.name": "top_k"}):
        moe = layer(Linear(2), **changes)
        loss = lambda p, moe=moe: (ran(moe, p)[0] ** 2).sum()  # noqa: E731
        both.append((ran(moe, params)[0], jax.grad(loss)(params)))
    chex.assert_trees_all_equal(*both)


def test_an_evaluation_competes_always():
    moe = layer(Linear(2), **{"selection.competition_rate": 0.0})
    params = made(moe)
    _, routing = moe.apply({"params": params}, X, step=0)
    norms = jnp.linalg.norm(jax.vmap(lambda own: Linear(2).apply({"params": own}, X))(params["experts"]), axis=-1).T
    np.testing.assert_array_equal(routing.expert.reshape(6, 2), jax.lax.top_k(norms, 2)[1])


@pytest.mark.slow
def test_a_shuffled_target_is_dealt_among_tokens_that_count():
    """20 of 40 tokens are padding: its values change nothing that the router learns, by either computation."""
    x, mask, rngs = jax.random.normal(jax.random.key(0), (40, 3)), jnp.arange(40) % 2 == 0, {"noise": jax.random.key(7)}

    def learned(x, dispatch, target):
        moe = layer(
            Linear(2), dispatch=dispatch, **{"selection.competition_rate": 1.0, "selection.distillation_target": target}
        )
        routing = moe.apply({"params": made(layer(Linear(2)))}, x, mask=mask, step=0, rngs=rngs)[1]
        return float(competition.distillation(moe.rule, routing)), routing.extra.norms[mask]

    louder = jnp.where(mask[:, None], x, 100 * x)
    found = [learned(one, dispatch, "shuffled") for one in (x, louder) for dispatch in ("dense", "ragged")]
    assert [loss for loss, _ in found] == pytest.approx([found[0][0]] * 4, rel=1e-4)
    own, (_, dealt) = learned(x, "dense", "own")[1], found[0]
    np.testing.assert_allclose(np.sort(dealt, 0), np.sort(own, 0), rtol=1e-5)
    assert not np.allclose(dealt, own)


#: Settings that an evaluation has no use for, with values that differ from the defaults.
OF_TRAINING = {
    "competition_rate": 0.0,
    "schedule": "root",
    "distillation_coefficient": 7.0,
    "distillation_target": "shuffled",
    "distillation_trunk": True,
}


@pytest.mark.parametrize(("key", "changed"), OF_TRAINING.items())
def test_what_an_evaluation_does_not_do_is_refused(key, changed):
    competing = {
        f"selection.{node}{name}": value for node in ("", "eval.") for name, value in (("name", "compete"), ("k", 2))
    }
    config = override(base(), competing | {"experts.count": 4, f"selection.eval.{key}": changed})
    with pytest.raises(
        UserError,
        match=rf"selection.eval.{key}=.*an evaluation competes always and teaches nobody; set selection.{key}",
    ):
        validate(config)


def test_a_loss_that_nothing_lets_through_is_refused():
    config = settings_of_text(
        **{"selection.name": "compete", "selection.distillation_trunk": True, "router.stop_gradient": True}
    )
    with pytest.raises(
        UserError, match=r"selection.distillation_trunk=True: router.stop_gradient=true lets nothing through"
    ):
        validate(config)


def test_an_evaluation_that_competes_has_no_noise():
    config = override(
        base(), {"selection.eval.name": "compete", "router.noise": "gaussian", "router.noise_at_eval": True}
    )
    with pytest.raises(UserError, match=r"router.noise_at_eval=True: an evaluation that competes draws nothing"):
        validate(config)


@pytest.mark.slow
@pytest.mark.parametrize("renormalise", [False, True], ids=["contest", "elected"])
def test_padding_takes_no_part(renormalise):
    """Of six tokens two are padding: nobody computes them, and the router learns what it learns from the four alone."""
    moe = layer(Linear(2), **{"selection.competition_rate": 1.0, "selection.renormalise": renormalise})
    params, mask, rngs = made(moe), jnp.arange(6) < 4, {"noise": jax.random.key(7)}
    alone, of_four = moe.apply({"params": params}, X[:4], step=0, rngs=rngs)
    for x in (X, X.at[4:].mul(100)):
        y, routing = moe.apply({"params": params}, x, mask=mask, step=0, rngs=rngs)
        np.testing.assert_allclose(y, jnp.concatenate([alone, jnp.zeros((2, 2))]), rtol=1e-5, atol=1e-6)
        assert routing.kept.tolist() == [True] * 8 + [False] * 4
        learned = [float(competition.distillation(moe.rule, one)) for one in (routing, of_four)]
        assert learned[0] > 0 and learned[0] == pytest.approx(learned[1], rel=1e-5)


def test_a_rule_without_a_config_competes_by_default_settings():
    plain = layer(Linear(2))
    bare = plain.clone(rule=SelectionRule("compete", k=2))
    assert bare.rule.settings.competition_rate == 0.05
    y, routing = bare.apply({"params": made(plain)}, X, rngs={"noise": jax.random.key(7)})  # no step: the first
    assert y.shape == (6, 2) and routing.extra.active.shape == ()


def test_a_sharpened_router_is_distilled_as_it_routes():
    """With a sharpness of 3 the contest's scores, and those that choose, are three times the router's."""
    moe = layer(Linear(2), **{"selection.competition_rate": 1.0})
    params, controls = made(moe), {"control": {"sharpness": jnp.array(3.0)}}
    _, routing = moe.apply({"params": params, **controls}, X, step=0, rngs={"noise": jax.random.key(7)})
    for scores in (routing.scores, routing.extra.scores):
        np.testing.assert_allclose(scores, 3 * X @ params["router"]["kernel"], rtol=1e-5)


def test_coins_come_up_as_often_as_the_share():
    """2,000 tosses at .3: 600, five standard deviations sqrt(2000 x .3 x .7) = 20.5 are 102."""
    rule = selection_rule(node_of(settings(**{"selection.competition_rate": 0.3})).selection)
    tosses = jax.vmap(lambda key: competition.is_active(rule, key, 0))(jax.random.split(jax.random.key(3), 2000))
    assert abs(int(tosses.sum()) - 600) < 102
    falling = selection_rule(
        node_of(settings(**{"selection.competition_rate": 1.0, "selection.schedule": "root"})).selection
    )
    shares = [jax.vmap(lambda key, t=t: competition.is_active(falling, key, t))(jax.random.split(jax.random.key(3),
        2000)).mean()
              for t in (0, 999, 8000)]  # fmt: skip
    np.testing.assert_allclose(shares, [2 / 3, 2 / 3, 2 / 5], atol=0.06)  # 2 / (2 + sqrt(1)), 2 / (2 + sqrt(9))


def routed(scores, norms, held=True):
    scores = jnp.asarray(scores, jnp.float32)
    plain = select(selection_rule(settings().selection), scores)
    return plain._replace(extra=competition.Lesson(jnp.array(held), scores, jnp.asarray(norms, jnp.float32)))


def distilled(routing, **changes):
    return float(competition.distillation(selection_rule(node_of(settings(**changes)).selection), routing))


def test_what_the_router_learns_by_hand():
    """Scores 0, ln 3, 0 - 9, -9: 1 and 0 chosen with 3/4, 1/4. Norms ln 3, 0, ...: 0 and 1 win so: error 2 x 1/4.

    Over all experts the softmax of 0, ln 3, ln 1, ln 3 is 1/8, 3/8, 1/8, 3/8: from (3/4, 1/4, 0, 0) it is
    25/64 + 1/64 + 1/64 + 9/64 = 36/64.
    """
    ln3 = np.log(3)
    one = routed([[0, ln3, -9, -9]], [[10 + ln3, 10, 0, 0]])
    assert distilled(one) == pytest.approx(0.5)
    assert distilled(
        one, **{"selection.distillation_coefficient": 3.0, "selection.distillation_mean": "entries"}
    ) == pytest.approx(1.5 / 4)
    assert distilled(one._replace(extra=one.extra._replace(active=jnp.array(False)))) == 0
    assert distilled(one, **{"selection.winners": "all"}) == 0
    whole = routed([[0, ln3, 0, ln3]], [[10 + ln3, 10, 0, 0]])
    assert distilled(whole, **{"selection.distillation_softmax": "all"}) == pytest.approx(36 / 64)
    same = routed([[1, 2, 5, 4]], [[0, 0, 3, 2]])
    assert distilled(same) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(("changes", "reached"), [
    ({}, {"router"}),
    ({"selection.distillation_detached": False}, {"router", "experts", "x"}),
    ({"selection.distillation_trunk": True}, {"router", "x"}),
])  # fmt: skip
def test_whom_the_routers_loss_reaches(changes, reached):
    moe = layer(Linear(2), **{"selection.competition_rate": 1.0} | changes)
    rule = moe.rule
    grads, to_x = jax.grad(lambda p, x: competition.distillation(rule, ran(moe, p, x)[1]), (0, 1))(made(moe), X)
    found = {
        name for name, tree in (grads | {"x": to_x}).items() if any(jnp.abs(g).max() > 0 for g in jax.tree.leaves(tree))
    }
    assert found == reached


@pytest.mark.slow
def test_the_tasks_gradient_where_only_the_router_hears():
    """With forward=false the output is the router's own; alpha scales what the task sends to the router, no more."""
    params = made(layer(Linear(2)))

    def of(**changes):
        moe = layer(Linear(2), **{"selection.competition_rate": 1.0, "selection.output_of_winners": False} | changes)
        grads, to_x = jax.grad(lambda p, x: (ran(moe, p, x)[0] ** 2).sum(), (0, 1))(params, X)
        return ran(moe, params)[0], grads | {"x": to_x}

    (y, one), (_, three) = of(), of(**{"selection.alpha": 3.0})
    np.testing.assert_allclose(one["x"], three["x"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y, ran(layer(Linear(2), **{"selection.name": "top_k"}), params)[0], rtol=1e-5)
    np.testing.assert_allclose(three["router"]["kernel"], 3 * one["router"]["kernel"], rtol=1e-4)
    chex.assert_trees_all_equal(one["experts"], three["experts"])

    def heard(alpha):
        """The gradient of what an auxiliary loss would be of: the scores."""
        moe = layer(
            Linear(2),
            **{"selection.competition_rate": 1.0, "selection.output_of_winners": False, "selection.alpha": alpha},
        )
        return jax.grad(lambda p: (ran(moe, p)[1].scores ** 2).sum())(params)["router"]["kernel"]

    np.testing.assert_allclose(heard(0.0), heard(1.0), rtol=1e-5)
    assert jnp.abs(heard(0.0)).max() > 0.1
    winning, _ = of(**{"selection.output_of_winners": True})
    assert not np.allclose(winning, y)


def test_shuffles_deal_the_same_norms():
    rule = selection_rule(node_of(settings(**{"selection.winners": "random"})).selection)
    outputs = jax.random.normal(jax.random.key(2), (4, 6, 2))
    plain = select(rule, jnp.zeros((6, 4)))
    combine = lambda routing, outputs: outputs[0]  # noqa: E731
    norms = np.linalg.norm(outputs, axis=-1).T

    def learned(**changes):
        own = selection_rule(node_of(settings(**changes)).selection)
        return competition.compete_dense(own, lambda s: select(own, s), combine, outputs, plain, jax.random.key(5))[2]

    among_experts, among_tokens = (
        learned(**{"selection.winners": "random"}),
        learned(**{"selection.distillation_target": "shuffled"}),
    )
    np.testing.assert_allclose(np.sort(among_experts, 1), np.sort(norms, 1), rtol=1e-5)
    np.testing.assert_allclose(np.sort(among_tokens, 0), np.sort(norms, 0), rtol=1e-5)
    assert not np.allclose(among_experts, norms) and not np.allclose(among_tokens, norms)
    assert isinstance(plain, Routing)


@pytest.mark.slow
def test_every_layer_tosses_its_own_coin():
    config, model, params, state = ready((("selection.name", "compete"), ("selection.competition_rate", 0.5)))

    @jax.jit
    def coins(key):
        outputs = model.apply(params, state, rows_of_text(), selection_rule(config.selection), config.dispatch, key, 0)
        return outputs.sites["decoder"].routing.extra.active

    tossed = {tuple(coins(jax.random.key(seed)).tolist()) for seed in range(16)}
    assert tossed == {(a, b) for a in (False, True) for b in (False, True)}


#: Elections that an evaluation holds otherwise than training.
EVALUATED = ("by norms", "the router hears alone", "weights of all norms", "with queues")
ELECTIONS: dict[str, dict] = {
    "by norms": {},
    "all share the router's loss": {"selection.distillation_detached": False, "selection.distillation_trunk": True},
    "of other tokens": {"selection.distillation_target": "shuffled", "selection.distillation_detached": False},
    "the router hears alone": {"selection.output_of_winners": False, "selection.alpha": 3.0},
    "by random norms": {"selection.winners": "random"},
    "no contest on this step": {"selection.competition_rate": 0.0},
    "weights of all norms": {"selection.renormalise": False},
    "with queues": {"selection.capacity_factor": 0.75},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("election", "training"), [*((name, True) for name in ELECTIONS), *((name, False) for name in EVALUATED)]
)
def test_winners_computed_alone_are_those_of_all_at_once(election, training):
    """Output, choices, norms, the router's loss and every gradient: dispatch dense is the oracle."""
    changes = {"selection.competition_rate": 1.0} | ELECTIONS[election]
    x, params = jax.random.normal(jax.random.key(0), (40, 3)), made(layer(Linear(2)))

    def numbers(dispatch):
        moe = layer(Linear(2), dispatch=dispatch, **changes)

        def loss(params, x):
            y, routing = ran(moe, params, x) if training else moe.apply({"params": params}, x, step=0)
            learned = competition.distillation(moe.rule, routing)
            return (y**2).sum() + learned, (y, routing.expert, routing.weight, learned)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), numbers("ragged"), numbers("dense")
    )


def test_losers_leave_nothing_for_the_gradient():
    """A compiled step holds no array of all experts' outputs on all tokens, 4 x 512 x 2 numbers, as dense does."""
    x, params = jnp.ones((512, 3)), made(layer(Linear(2)))

    def text(dispatch):
        moe = layer(Linear(2), dispatch=dispatch, **{"selection.competition_rate": 0.5})
        return jax.jit(jax.grad(lambda p: (ran(moe, p, x)[0] ** 2).sum())).lower(params).as_text()

    assert "4x512x2xf32" in text("dense") and "4x512x2xf32" not in text("ragged")


CONTESTS: dict[str, dict] = {
    "the largest outputs win": {},
    "with queues": {"selection.capacity_factor": 0.75},
    "by random norms": {"selection.winners": "random"},
    "nobody wins": {"selection.winners": "all"},
    "the router hears alone, of other tokens": {
        "selection.output_of_winners": False,
        "selection.distillation_target": "shuffled",
    },
}


@pytest.mark.slow
def test_constant_experts_compete_over_devices():
    """16 tokens on 2 x 2 devices; a constant expert has one row for all of a device's."""
    x, changes = (
        jax.random.normal(jax.random.key(0), (16, 3)),
        {"selection.competition_rate": 1.0, "selection.group_size": 4},
    )
    params = made(layer(Constant(2)))
    alone, shared = (layer(Constant(2), mesh, **changes) for mesh in (None, make_mesh(2, 2)))
    outputs = [jax.jit(lambda params, moe=moe: ran(moe, params, x)[0])(params) for moe in (shared, alone)]
    np.testing.assert_allclose(*outputs, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("contest", CONTESTS)
def test_a_contest_over_devices_has_the_numbers_of_one(contest):
    """Output, loss of the router, and gradients, of 64 tokens in groups of 8, on 2 x 4 devices with an expert each."""
    changes = {
        "selection.competition_rate": 1.0,
        "selection.group_size": 8,
        "selection.distillation_detached": False,
    } | CONTESTS[contest]
    x = jax.random.normal(jax.random.key(0), (64, 3))
    params = made(layer(Linear(2)))

    def numbers(mesh):
        moe = layer(Linear(2), mesh, **changes)

        def loss(params, x):
            y, routing = ran(moe, params, x)
            return (y**2).sum() + competition.distillation(moe.rule, routing), (y, routing.expert)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), numbers(make_mesh(2, 4)), numbers(None)
    )


def test_computed_experts():
    rule = selection_rule(node_of(settings(**{"selection.competition_rate": 0.25})).selection)
    assert competition.experts_per_token(rule, 9, 16) == 2 + 0.25 * 14


def test_what_losers_cost():
    """14 of 16 lose on a quarter of the steps: one pass of three. All 16 learn without winners, or by norms."""
    thirds, whole = 2 + 0.25 * 14 / 3, 2 + 0.25 * 14
    shares = {"selection.renormalise": True}
    for changes, expected in (
        (shares, thirds),
        ({"selection.winners": "random"}, thirds),
        ({"selection.output_of_winners": False}, thirds),
        (shares | {"selection.winners": "all"}, whole),
        ({"selection.renormalise": False}, whole),
        ({"selection.output_of_winners": False, "selection.distillation_detached": False}, whole),
    ):
        changes = {"selection.competition_rate": 0.25} | changes
        assert work(selection_rule(node_of(settings(**changes)).selection), 9, 16) == pytest.approx(expected)
    assert work(selection_rule(settings(**{"selection.name": "top_k"}).selection), 9, 16) == 2


def test_a_schedule_is_counted_by_its_mean_step():
    """root: in the first 1,000 steps 2 / 3 of the share, in the second 2 / (2 + sqrt 2) = .585786; mean .626227."""
    rule = selection_rule(
        node_of(settings(**{"selection.competition_rate": 0.5, "selection.schedule": "root"})).selection
    )
    assert competition.averaged(rule, 2000).settings.competition_rate == pytest.approx(0.5 * 0.626227, rel=1e-5)
    assert competition.averaged(rule._replace(settings=None, name="top_k"), 2000).settings is None
    sizes = {"experts.count": 4, "steps": 2000, "data.fresh": True, "eval_every": 2000}
    config = settings(**sizes, **{"selection.competition_rate": 0.5, "selection.schedule": "root"})
    assert experts_per_token(node_of(config)) == pytest.approx(2 + 0.5 * 0.626227 * 2, rel=1e-5)


def test_a_contest_moves_the_state_of_its_router_once():
    """Six tokens of decay 1: six counts after a step, and the scores are those of the centres before."""
    moe = layer(Linear(2), **{"selection.distillation_trunk": True}).clone(router=OnlineKMeansRouter(4, decay=1.0))
    variables = moe.init(jax.random.key(1), X)
    centres = variables["centres"]["router"]["centres"]
    state = [name for name in variables if name != "params"]
    (_, routing), moved = moe.apply(variables, X, step=0, rngs={"noise": jax.random.key(7)}, mutable=state)
    assert float(moved["centres"]["router"]["counts"].sum()) == 6
    np.testing.assert_allclose(routing.scores, X @ centres.T - (centres**2).sum(1)[None] / 2, atol=1e-5)


@pytest.mark.parametrize(("changes", "words"), [
    ({"selection.competition_rate": 1.5}, r"selection.competition_rate=1.5: must be in \[0, 1\]"),
    ({"selection.eval.name": "compete", "selection.eval.k": 2, "selection.eval.winners": "random"},
     "an evaluation tosses no coins"),
    ({"selection.competition_rate": 1.0, "selection.distillation_coefficient": 0.0},
     "an accidental frozen router; lower the rate"),
    ({"selection.competition_rate": 1.0, "selection.k": 1, "selection.renormalise": False},
     "of which a softmax is always 1"),
    ({"selection.name": "top_k", "selection.winners": "elected"}, "must be one of norms, random, all"),
])  # fmt: skip
def test_contests_that_cannot_be(changes, words):
    with pytest.raises(UserError, match=words):
        validate(settings(**changes))


@pytest.mark.parametrize("changes", [
    {"selection.competition_rate": 0.9, "selection.distillation_coefficient": 0.0},
    {"selection.competition_rate": 1.0, "selection.distillation_coefficient": 0.0,
     "selection.output_of_winners": False},
    {"selection.competition_rate": 1.0, "selection.k": 1, "selection.renormalise": False,
     "selection.distillation_softmax": "all"},
    {"selection.competition_rate": 1.0, "selection.winners": "all"},
    {"selection.competition_rate": 1.0, "selection.distillation_coefficient": 0.0, "router.frozen": True},
    {"selection.name": "top_k", "selection.eval.name": "compete", "selection.eval.k": 2,
     "selection.competition_rate": 1.0, "selection.distillation_coefficient": 0.0},
])  # fmt: skip
def test_contests_that_teach_a_router_or_need_not(changes):
    validate(settings(**changes))


@pytest.mark.parametrize(("initial", "bounds", "biases"), [
    ("uniform", (1 / 400**0.5, 1 / 900**0.5), True), ("stacked", (1 / (400 * 900) ** 0.5, 1 / (900 * 2) ** 0.5), False),
])  # fmt: skip
def test_experts_start_as_in_the_released_code(initial, bounds, biases):
    """400 inputs, 900 units, 2 outputs: +- 1 / sqrt(D) with biases, +- 1 / sqrt(D O) without; deviation / sqrt 3."""
    module = EXPERTS["mlp"].make(
        node_of(settings(**{"experts.init": initial, "experts.depth": 2, "experts.width": 900})).experts, 2
    )
    params = module.init(jax.random.key(0), jnp.zeros((1, 400)))["params"]
    for name, bound in zip(("Dense_0", "Dense_1"), bounds, strict=True):
        kernel = np.asarray(params[name]["kernel"])
        assert np.abs(kernel).max() <= bound and kernel.std() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert bool(np.asarray(params[name]["bias"]).any()) is biases


def test_a_cnn_is_no_stack_of_matrices():
    with pytest.raises(UserError, match=r"experts.init='stacked': of experts.name=mlp only"):
        EXPERTS["cnn"].check(settings(**{"experts.name": "cnn", "experts.init": "stacked"}))
