"""Phases of training: which groups move, by which losses and selection, on which share of the steps."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.layer.auxiliary import AUXILIARY, users_losses
from routed.layer.selection import select
from routed.models.model import Outputs, Site
from routed.plan.checks import validate
from routed.plan.config import base, canonical, problem_of, traced
from routed.settings.tree import flatten, node_of, override
from routed.training import probes, program
from routed.training.objective import training_loss
from routed.training.phases import active_phase, mean_so_far_of, phases_of
from routed.training.sample_problem import SampleProblem
from routed.training.samples import cost, experts_per_token

TOP2 = {"selection.name": "top_k", "selection.k": 2, "dispatch": "dense"}


@cache
def compiled(items):
    """What starts and advances the runs of a config: several tests look at one."""
    config = canonical(override(base(), dict(items)))
    one = program.make_program(config, problem_of(config).build(config, config.data.samples, None))
    return traced(config), jax.jit(partial(program.start, one)), jax.jit(partial(program.advance, one))


def states(small, *stretches, **changes):
    """The run at step 0 and after each of the stretches of steps."""
    config = override(small, {"optimizer.name": "adam", "experts.name": "constant"} | changes)
    values, start, advance = compiled(tuple(flatten(config).items()))
    values = {key: jnp.asarray(value) for key, value in values.items()}
    world, run = start(0, values)
    found = [run]
    for steps in stretches:
        found.append(advance(steps, 0, values, world, found[-1]))
    return found


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), a, b))


@pytest.mark.slow
def test_a_router_may_train_alone_first(small):
    start, early, late = states(small, 4, 4, phases=("until=4 train=router", ""))
    assert equal(start["params"]["experts"], early["params"]["experts"])
    assert not equal(start["params"]["router"], early["params"]["router"])
    assert not equal(early["params"]["experts"], late["params"]["experts"])
    # Adam's count of the experts' group waited with them: its first step is as large as any first step, the rate.
    first = states(small, 4, 1, phases=("until=4 train=router", ""))[-1]["params"]["experts"]
    moved = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.abs(a - b).max(), first, early["params"]["experts"]))
    assert max(map(float, moved)) == pytest.approx(small.experts.learning_rate, rel=1e-3)


def test_a_frozen_router_stays_in_every_phase(small):
    changes = {"router.frozen": True, "phases": ("until=4 train=router", "")}
    start, early, late = states(small, 4, 4, **changes)
    assert equal(start["params"], early["params"])  # there was nothing else to train
    assert equal(start["params"]["router"], late["params"]["router"])
    assert not equal(start["params"]["experts"], late["params"]["experts"])


def test_a_phase_has_its_own_rate_of_the_balancing_bias(small):
    """A step moves an expert's bias by the rate, or not at all: .5 a step, then nothing (DeepSeek-V3 ends with 0)."""
    rate = TOP2 | {"selection.balance_rate": 0.5}
    _, early, late = states(small, 3, 3, **rate, phases=("until=3", "selection.balance_rate=0.0"))
    bias = early["state"]["balance"]["bias"]
    assert bool((bias % 0.5 == 0).all()) and float(jnp.abs(bias).max()) >= 0.5
    assert equal(bias, late["state"]["balance"]["bias"])
    assert not equal(early["params"], states(small, 3, **TOP2)[-1]["params"])  # the bias chose
    phased = ("until=3 selection.name=expert_choice selection.balance_rate=0.0", "")
    assert not states(small, 3, **rate, phases=phased)[-1]["state"]["balance"]["bias"].any()


@pytest.mark.slow
@pytest.mark.parametrize("word", ["losses.balance=5", "losses.entropy=5"])
def test_a_loss_counts_in_its_phase_only(small, word):
    plain = states(small, 3, **TOP2)[-1]["params"]
    counted = states(small, 3, **TOP2, phases=(f"until=4 {word}", ""))[-1]["params"]
    key, value = word.split("=")
    always = states(small, 3, **TOP2, **{key: float(value)})[-1]["params"]
    assert not equal(plain, counted) and equal(always, counted)
    assert equal(plain, states(small, 3, **TOP2, phases=("until=3", word))[-1]["params"])


class WithoutLoss(SampleProblem):
    """Samples whose task loss is 0."""

    def task_loss(self, config, outputs, batch):
        return jnp.float32(0), jnp.float32(0)


def test_a_router_that_rests_has_no_losses(small):
    """Two tokens of scores (ln 3, 0): probabilities 3/4 and 1/4, all load on expert 0: 2 E sum f P = 2 x 2 x 3/4 = 3.

    Its slope in the first score, which is the trunk's, is 2 x 2 x 3/4 x 1/4 = 3/4. Both are 0 where the router rests.
    """
    config = override(small, TOP2 | {"selection.k": 1, "losses.balance": 2.0})
    problem, tokens = problem_of(config).build(config, 1, None), jnp.array([[1.0, 0.0], [1.0, 0.0]])

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        return Outputs(jnp.zeros((2, 1)), {"layer": Site(select(rule, params["trunk"] * batch), batch)}, state)

    problem = WithoutLoss(**{field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)})
    problem = dataclasses.replace(problem, model=problem.model._replace(apply=apply))
    node = node_of(config, {"router.frozen": jnp.array(False)})

    def loss(trunk, still):
        return training_loss(problem, node, tokens, jax.random.key(0), 0, {"trunk": trunk}, {}, {}, still=still)[0]

    for still, value, slope in ((None, 3, 0.75), (jnp.array(False), 3, 0.75), (jnp.array(True), 0, 0)):
        found = jax.value_and_grad(loss)(jnp.log(3.0), still)
        assert list(map(float, found)) == pytest.approx([value, slope])


def test_where_nothing_trains_no_state_moves(small):
    """An expert's balancing bias moves by .1 a step, so it is not 0 after three; then it stays, and steps go on."""
    changes = TOP2 | {"selection.balance_rate": 0.1, "phases": ("until=3", "train=nothing")}
    start, early, late = states(small, 3, 3, **changes)
    assert not equal(start["state"], early["state"]) and equal(early["state"], late["state"])
    assert equal(early["params"], late["params"]) and int(late["taken"]) == 6


def test_experts_of_a_token_are_the_mean_over_phases(small):
    """K = 1 for 5 of 20 steps, then 3: after 10 steps 2, at the end 2.5: 6 FLOPs, 8 tokens, router 12, experts 62."""
    config = override(small, TOP2 | {"phases": ("until=5 selection.k=1", "selection.k=3")})
    assert float(mean_so_far_of(experts_per_token, config, node_of(config), 10)) == pytest.approx(2)
    assert cost(config).flops == pytest.approx(6 * 8 * (12 + 2.5 * 62))


@pytest.mark.slow
def test_k_may_grow(small):
    _, early, late = states(small, 4, 4, **TOP2, phases=("until=4 selection.k=1 selection.renormalise=false", ""))
    _, same, other = states(small, 4, 4, **TOP2 | {"selection.k": 1, "selection.renormalise": False})
    assert equal(early["params"], same["params"]) and not equal(late["params"], other["params"])


def test_a_share_of_the_steps_is_drawn_by_a_coin(small):
    config = override(small, {"phases": ("fraction=0.25 train=router", "train=experts")})
    phases, keys = phases_of(config), jax.random.split(jax.random.key(0), 2000)
    drawn = np.asarray(jax.vmap(lambda key: active_phase(phases, jnp.int32(0), key))(keys))
    assert set(drawn) == {0, 1} and (drawn == 0).mean() == pytest.approx(0.25, abs=0.04)  # four deviations


def test_pieces_of_a_run_are_the_whole_across_phases(small):
    phases = ("until=7 fraction=0.5 train=router losses.balance=1", "until=13 train=experts", "")
    whole = states(small, 20, phases=phases)[-1]
    pieces = states(small, 3, 5, 1, 9, 2, phases=phases)[-1]
    for name in ("params", "opt", "state", "total", "taken"):
        assert equal(whole[name], pieces[name]), name


def test_a_phase_that_trains_nothing_is_refused(small, caplog):
    """Of an arm without a router, beside others whose router trains alone at first, it is said."""
    with pytest.raises(
        UserError, match=r"^config key phases='train=head': nothing would train: .* are router, experts"
    ):
        states(small, 1, phases=("until=4 train=head", ""))
    first, last = states(small, 1, model="dense_active", phases=("until=4 train=router", ""))
    assert equal(first["params"], last["params"])
    assert "phases: this model has no router: nothing trains in that phase" in caplog.text


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        (("until=3",), "no phase covers all of the last steps"),
        (("fraction=0.5",), "no phase covers all of the last steps"),
        (("until=3 train=gate", ""), "unknown group 'gate'; known: router, experts, trunk"),
        (("until=3 learning", ""), "'learning' is not until=STEP"),
        (("until=3 router.bias=true", ""), "'router.bias=true' is not until=STEP"),
        (("until=30", ""), "until must be in 1 to steps=20"),
        (("until=1%", ""), "until must be in 1 to steps=20"),
        (("until=3", "router=initial"), "'router=initial' is not until=STEP"),
        (("train=experts", "train=router"), "'train=router' never comes, as one before it takes all steps up to 20"),
        (("until=10", "until=5 train=router", ""), "'until=5 train=router' never comes"),
        (("until=3 selection.k=9", ""), "k=9"),
        (("until=3 selection.k=0", ""), "config key selection.k=0: must be at least 1"),
        (
            ("until=3 selection.competition_rate=1.5", ""),
            r"config key selection.competition_rate=1.5: must be in \[0, 1\]",
        ),
        (("until=3 selection.schedule=never", ""), "selection.schedule='never': must be one of constant, root"),
        (("until=3 selection.balance_rate=0.1", ""), "selection.balance_rate=0.1: needs a bias from step 0: set it"),
        (("until=3 selection.eval.k=1", ""), "selection.eval.k is of evaluations, which are the same in all phases"),
    ],
)
def test_a_wrong_phase_is_named(small, phases, text):
    with pytest.raises(UserError, match=text):
        validate(override(small, TOP2 | {"phases": phases}))


RELU = {"selection.name": "relu", "selection.eval.name": "relu", "dispatch": "dense", "losses.l1": 1e-8}


@pytest.mark.slow
def test_the_value_of_a_users_loss_is_kept(small, monkeypatch):
    """A loss of a user's file that is 2 at each step: 8 after four, whether or not the router pays for it."""
    mine = AUXILIARY["z"]._replace(value=lambda gate: 2.0 + 0.0 * gate.probs.sum())
    monkeypatch.setitem(AUXILIARY, "z", mine)
    changes = {"losses.z": 0.0125, "router.frozen": True}
    *_, run = states(small, 4, **changes)
    assert float(run["penalties"]["z"]) == pytest.approx(8) and "train/loss_z" in run["history"]
    assert probes.own_columns()["train/loss_z"].label == "auxiliary loss z"
    monkeypatch.undo()
    assert not probes.own_columns()  # those of the package have no column
    assert not users_losses(override(small, changes).losses)


@pytest.mark.slow
def test_the_coefficient_of_relu_gates_is_steered_where_it_is_paid(small):
    """A fresh router has over half a positive gate a token, so its factor grows 1.2-fold a step from its phase on."""
    steer = RELU | {"losses.l1_gates": 0.5}
    start, later = states(small, 3, **steer)
    assert float(start["coefficients"]["l1"]) == pytest.approx(1e-8)
    assert float(later["coefficients"]["l1"]) == pytest.approx(1.2**3 * 1e-8)
    assert not states(small, 1, **RELU)[-1]["coefficients"]  # steered by nothing
    *_, phased = states(small, 3, **steer | {"losses.l1": 0.0}, phases=("until=2 losses.l1_gates=0", "losses.l1=1e-8"))
    assert float(phased["coefficients"]["l1"]) == pytest.approx(1.2e-8)
    *_, rested = states(small, 3, **steer, phases=("until=2 train=experts", ""))
    assert float(rested["coefficients"]["l1"]) == pytest.approx(1.2e-8)
    *_, still = states(small, 3, **steer | {"router.frozen": True})
    assert float(still["coefficients"]["l1"]) == pytest.approx(1e-8)


def test_a_coefficient_that_cannot_be_steered_is_refused(small):
    for changes, message in (
        (
            {"selection.name": "top_k", "selection.renormalise": False},
            "steers the gates of selection.name='relu', not of 'top_k'",
        ),
        ({"losses.l1": 0.0}, "multiplies losses.l1, which is 0"),
        ({"losses.l1_gates": 64.0}, "must be below experts.count="),
        ({"phases": ("until=3", "losses.l1=0.1")}, r"\('l1', 0.1\)\]: a coefficient that training moves has one start"),
    ):
        config = override(small, RELU | {"losses.l1_gates": 2.0} | changes)
        with pytest.raises(UserError, match=message):
            validate(config)
