"""Controls control: any router is sharpened and frozen, state too; wrong routers are named, or left out."""

import logging
import pathlib
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from routed.analysis import controls, diagnosis, page, workdirs
from routed.contracts import UserError
from routed.engine import execution
from routed.engine.results import described
from routed.plan import arms
from routed.plan.config import base, canonical, problem_of, traced
from routed.plan.runs import left_out, plan_runs
from routed.routers import ROUTERS, Router
from routed.settings.tree import override
from routed.training import program
from routed.training.freezing import has_moved, router_of
from tests.test_run import last, train

ARMS = ("learned", "frozen", "frozen_sharp", "frozen_data")


class Named(nn.Module):
    """A linear router whose weights have a name of their own."""

    experts: int

    @nn.compact
    def __call__(self, x, **context):
        return x @ self.param("places", nn.initializers.lecun_normal(), (x.shape[1], self.experts))


class Near(nn.Module):
    """Minus half the squared distance: weights that are twice as large make the gate far more than twice as sharp."""

    experts: int

    @nn.compact
    def __call__(self, x, **context):
        places = self.param("places", nn.initializers.lecun_normal(), (x.shape[1], self.experts))
        return x @ places - 0.5 * (places**2).sum(0, keepdims=True)


class Centroids(nn.Module):
    """Nothing is trained: centroids follow the tokens nearest to them by a moving average."""

    experts: int

    @nn.compact
    def __call__(self, x, **context):
        start = self.param("start", nn.initializers.lecun_normal(), (x.shape[1], self.experts))
        mean = self.variable("averages", "mean", lambda: jax.lax.stop_gradient(start))
        scores = x @ mean.value - 0.5 * (mean.value**2).sum(0, keepdims=True)
        if self.is_mutable_collection("averages") and not self.is_initializing():
            chosen = jax.nn.one_hot(scores.argmax(1), self.experts)
            mean.value += 0.1 * (x.T @ chosen / jnp.maximum(chosen.sum(0, keepdims=True), 1) - mean.value)
        return scores


@pytest.fixture(autouse=True)
def own_routers(monkeypatch):
    for module in (Named, Near, Centroids):
        monkeypatch.setitem(ROUTERS, module.__name__, Router(lambda own, experts, module=module: module(experts)))


@pytest.mark.slow
def test_a_router_of_any_form_is_made_as_sharp_as_the_learned_one(small, tmp_path, caplog):
    """Without functions that scale it or fill it; a router without rows to fill is left out, in log and workdir."""
    config = override(small, {"router.name": "Near", "arms": ARMS, "router.learning_rate": 1.0})
    with caplog.at_level(logging.WARNING, logger="absl"):
        table = train(config, ({"data.samples": 32},), tmp_path)
    assert "the arm frozen_data is left out: it sets router.init_from_data, without effect" in caplog.text
    assert "frozen_data is" not in described(tmp_path) and '"frozen_data": "sets router.init_from_data' in described(
        tmp_path
    )
    assert set(table.arm) == set(ARMS[:-1])
    asked = last(table, "frozen_sharp", "router/entropy_target")
    np.testing.assert_array_equal(asked, last(table, "learned", "router/entropy_token_train").astype(np.float32))
    np.testing.assert_allclose(last(table, "frozen_sharp", "router/entropy_token_train"), asked, atol=1e-3)
    assert (np.abs(last(table, "frozen", "router/entropy_token_train") - asked) > 0.1).all()
    assert np.isnan(last(table, "learned", "router/entropy_target")).all()
    assert not controls.failed(table[table.step == 20], "test/loss")


def test_an_arm_that_matches_what_is_not_there_is_refused(small, monkeypatch, tmp_path):
    monkeypatch.setitem(arms.ARMS, "lost", arms.Arm({}, "lost", "#000000", match=arms.Match("a", "lerned", "b")))
    with pytest.raises(UserError, match=r"an arm needs the unknown arm 'lerned' \(did you mean 'learned'"):
        plan_runs(override(small, {"arms": ("lost",)}), ({},))
    runs = {
        run.arm: run for run in plan_runs(override(small, {"arms": ("learned", "frozen_sharp"), "seeds": 1}), ({},))
    }
    rows = {runs["learned"].key: {"router/entropy_token": 1.0}}
    with pytest.raises(UserError, match="matches router/entropy_token_train, which no run has"):
        execution.traced_of(runs["frozen_sharp"], rows, [runs["learned"]])


def test_an_arm_without_effect_is_left_out_or_refused_if_it_was_named(small, monkeypatch):
    config = override(small, {"router.name": "Named", "arms": ARMS})
    assert {run.arm for run in plan_runs(config, ())} == set(ARMS[:-1])
    assert list(left_out(config, ())) == ["frozen_data"]
    with pytest.raises(
        UserError, match=r"the arm frozen_data sets router.init_from_data, .*Router.from_examples.; drop"
    ):
        plan_runs(config, (), ["arms"])
    with pytest.raises(
        UserError, match=r"the arm frozen_data sets router.init_from_data, without effect: .* drop the arm"
    ):
        plan_runs(override(config, {"arms": ("frozen_data",)}), ())  # the only arm
    filled = ROUTERS["Named"]._replace(from_examples=lambda module, params, examples: params | {"places": examples.T})
    monkeypatch.setitem(ROUTERS, "Filled", filled)
    assert not left_out(override(config, {"router.name": "Filled"}), ())
    both = ({"router.name": "linear"}, {"router.name": "Named"})
    assert left_out(config, both)["frozen_data"].endswith("(Router.from_examples) (at 1 of 2 points)")
    assert {run.config.router.name for run in plan_runs(config, both) if run.arm == "frozen_data"} == {"linear"}


def stepped(config, steps):
    """The run at step 0, after some steps, and after an evaluation."""
    config = canonical(config)
    one = program.make_program(config, problem_of(config).build(config, config.data.samples, None))
    values = {key: jnp.asarray(value) for key, value in traced(config).items()}
    world, run = jax.jit(partial(program.start, one))(0, values)
    moved = jax.jit(partial(program.advance, one))(steps, 0, values, world, run)
    return run, moved, jax.jit(partial(program.record, one))(0, values, world, moved)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_router_keeps_its_state_and_an_evaluation_moves_none(small, frozen):
    start, moved, seen = stepped(override(small, {"router.name": "Centroids", "router.frozen": frozen}), 10)
    before, after, evaluated = (run["state"]["averages"]["router"]["mean"] for run in (start, moved, seen))
    assert (np.asarray(before) == np.asarray(after)).all() == frozen
    np.testing.assert_array_equal(after, evaluated)
    np.testing.assert_array_equal(start["params"]["router"]["start"], moved["params"]["router"]["start"])
    assert float(seen["history"]["router/params_changed"][1]) == (not frozen)
    assert has_moved(router_of(moved["params"], moved["state"]), start["router0"]) == (not frozen)


def rows(**losses):
    """Last rows at one point: arm -> losses by seed."""
    found = [
        {"arm": arm, "seed": seed, "status": "ok", "test/loss": loss, "router/entropy_token_train": 2.0,
         "router/entropy_target": 2.0 if arm == "frozen_sharp" else np.nan}
        for arm, values in losses.items() for seed, loss in enumerate(values)
    ]  # fmt: skip
    return pd.DataFrame(found)


PATH = {"learned": [1.0, 1.1], "frozen": [4.0, 4.1], "frozen_sharp": [3.0, 3.1], "frozen_data": [2.0, 2.1]}


def test_a_control_that_missed_its_entropy_is_named_and_no_effect():
    table = rows(**PATH)
    assert not controls.failed(table, "test/loss") and len(diagnosis.gap(table)) == 4  # three parts and the whole
    table.loc[(table.arm == "frozen_sharp") & (table.seed == 1), "router/entropy_token_train"] = 2.011
    why = controls.failed(table, "test/loss")
    assert why == {"frozen_sharp": "its gate was asked for 2 nats of entropy and has 2.01 (seed 1)"}
    assert "sharpness and initial partition" in set(diagnosis.gap(table).part)
    table["data.samples"] = [8, 32] * 4  # seed 1 at the second point
    assert "frozen_sharp is no control at 1 of 2 points: its gate" in controls.named(
        table, ["data.samples"], "test/loss", {}
    )


def test_a_learned_gate_may_leave_the_entropy_it_began_with():
    table = rows(**PATH)
    table.loc[table.arm == "learned", "router/entropy_target"] = 3.0
    assert not controls.failed(table, "test/loss")


def test_a_control_that_changed_nothing_is_named_and_no_effect():
    table = rows(**PATH | {"frozen_data": PATH["frozen"]})
    assert controls.failed(table, "test/loss") == {
        "frozen_data": "test/loss equals that of frozen to the last bit, so it changed nothing"
    }
    assert "initial partition and learning to route" in set(diagnosis.gap(table).part)
    assert not controls.failed(rows(**PATH | {"frozen_data": [4.0, 4.2]}), "test/loss")
    assert "learned" in controls.failed(rows(**PATH | {"learned": PATH["frozen"]}), "test/loss")  # it cannot learn


def test_an_arm_that_a_later_command_ran_was_left_out_at_some_points(monkeypatch):
    reasons = {"frozen_data": "has no rows", "frozen": "has no rows (at 1 of 2 points)", "oracle": "has none"}
    monkeypatch.setattr(page.results, "stored_config", lambda folder: {"left_out": reasons})
    reasons_now = page._left_out([pathlib.Path()], pd.DataFrame({"arm": ["frozen_data", "frozen"]}))
    assert reasons_now == reasons | {"frozen_data": "has no rows (at some points)"}


def test_joined_folders_have_the_arms_of_all(monkeypatch):
    """A control of the second folder alone is asked for, whichever comes first: the claim is about all controls."""
    stored = {"a": ["learned", "frozen"], "b": ["learned", "frozen_kmeans"]}
    monkeypatch.setattr(workdirs.results, "stored_config", lambda folder: {"config": {"arms": stored[folder.name]}})
    for names in ("ab", "ba"):
        arms = workdirs.with_arms_of_all(base(), [*map(pathlib.Path, names)]).arms
        assert {*arms} == {"learned", "frozen", "frozen_kmeans"} and len(arms) == 3


def test_what_was_left_out_is_told():
    words = controls.named(rows(**PATH), [], "test/loss", {"frozen_data": "sets router.init_from_data, without effect"})
    assert words == "frozen_data was left out: sets router.init_from_data, without effect"
    assert controls.named(rows(**PATH), [], "test/loss", {}).startswith("every control")
