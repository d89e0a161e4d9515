"""Published methods as arms: StableMoE, SMoE-Dropout, HyperRouter, and what Pham et al. made of StableMoE and XMoE."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.engine import checkpoint
from routed.papers.pham2024.stable import StableRouter, taught, unevenness
from routed.plan.arms import changes_of
from routed.plan.checks import validate
from routed.plan.config import base
from routed.routers import HyperRouter, ProductRouter
from routed.routers.features import Flat
from routed.settings.tree import flatten, override
from routed.training.phases import Phase, mean_so_far, phases_of
from tests.test_decoder import settings
from tests.test_language import run, stopped_after
from tests.test_phases import TOP2, compiled, equal, states

IDS = jnp.array([0, 1, 2, 0])


def test_what_a_student_learns_by_hand():
    """Softmax of (0, ln 3) is 1/4, 3/4: the first chosen costs ln 4, the second ln 4/3; of both choices the mean."""
    student = jnp.log(jnp.array([[1.0, 3.0]]))
    assert float(taught(student, jnp.array([[0]]))) == pytest.approx(np.log(4))
    assert float(taught(student, jnp.array([[1, 0]]))) == pytest.approx((np.log(4) + np.log(4 / 3)) / 2)


def test_uneven_load_by_hand():
    """Three of four tokens choose expert 0, one expert 1: n_e / n - 1 = 1/2 and -1/2; sigmoids 3/4 and 1/2.

    (3 x 1/2 x 3/4 - 1/2 x 1/2) / 4 = 7/32. Its gradient in the busy expert's scores is positive: they fall.
    """
    scores = jnp.array([[np.log(3), 0.0]] * 3 + [[-1.0, 0.0]])
    chosen = jnp.array([[0], [0], [0], [1]])
    assert float(unevenness(scores, chosen)) == pytest.approx(7 / 32)
    slope = jax.grad(unevenness)(scores, chosen)
    assert (slope[:3, 0] > 0).all() and slope[3, 1] < 0 and not slope[3, 0]


def stable(**changes):
    own = {
        "num_experts": 3,
        "vocabulary": 4,
        "choices": 1,
        "teach_steps": 2,
        "token_dim": 5,
        "distillation_coefficient": 0.3,
        "balance_coefficient": 0.3,
    }
    return StableRouter(**own | changes)


def test_scores_choose_first_and_then_the_table():
    router, x = stable(), jax.random.normal(jax.random.key(1), (4, 6))
    variables = router.init(jax.random.key(0), x, token_id=IDS)
    params = variables["params"]

    def call(params, state, step):
        return router.apply({"params": params, **state}, x, token_id=IDS, step=step, mutable=list(state))

    state = {name: tree for name, tree in variables.items() if name != "params"}

    scores, taught_state = call(params, state, 1)
    np.testing.assert_allclose(scores, x @ params["kernel"], rtol=1e-5)
    student = params["words"] @ params["word_kernel"]
    np.testing.assert_array_equal(taught_state["token_table"]["experts"], student.argmax(1)[:, None])
    expected = 0.3 * taught(student[IDS], scores.argmax(1)[:, None]) + 0.3 * unevenness(
        scores, scores.argmax(1)[:, None]
    )
    assert float(taught_state["objective"]["value"]) == pytest.approx(float(expected), rel=1e-5)

    moved = jax.tree.map(lambda a: -2 * a, params)  # whatever an optimiser still does to the student, the table stays
    scores, later = call(moved, taught_state, 2)
    assert equal(later["token_table"], taught_state["token_table"]) and not later["objective"]["value"]
    named = student.argmax(1)[IDS]
    assert scores.argmax(1).tolist() == named.tolist()
    chosen = np.asarray((x @ moved["kernel"])[jnp.arange(4), named])
    np.testing.assert_allclose(scores.max(1), chosen, rtol=1e-5)
    assert (np.sort(scores, 1)[:, :2] == -1e4).all()


def test_the_taught_losses_reach_who_they_should():
    """The student by its cross-entropy alone, the experts' embeddings by the load alone: the target has no gradient."""
    router, x = stable(balance_coefficient=0.0), jax.random.normal(jax.random.key(1), (4, 6))
    variables = router.init(jax.random.key(0), x, token_id=IDS)
    state = {name: tree for name, tree in variables.items() if name != "params"}

    def own(params, router):
        call = router.apply({"params": params, **state}, x, token_id=IDS, step=0, mutable=list(state))
        return call[1]["objective"]["value"]

    for router, reached in (
        (stable(balance_coefficient=0.0), {"words", "word_kernel"}),
        (stable(distillation_coefficient=0.0), {"kernel"}),
    ):
        grads = jax.grad(own)(variables["params"], router)
        assert {name for name, grad in grads.items() if jnp.abs(grad).max() > 0} == reached


def test_a_frozen_network_makes_the_weights_by_hand():
    """Embedding (2, -1), first layer the identity: ReLU (2, 0), times 3 for all and 1 for the bias: W = 6, b = 7."""
    first = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
    last = {"kernel": jnp.full((2, 6), 3.0), "bias": jnp.array([0, 0, 1.0, 0, 0, 1.0])}
    variables = {"params": {"embedding": jnp.array([2.0, -1.0])}, "hypernetwork": {"first": first, "last": last}}
    scores = HyperRouter(2, 2).apply(variables, jnp.array([[1.0, 2.0], [0.0, 1.0]]))
    assert scores.tolist() == [[25, 25], [13, 13]]  # 6 + 12 + 7, 6 + 7
    fresh = HyperRouter(2, 8).init(jax.random.key(0), jnp.ones((1, 3)))
    assert jax.tree.map(jnp.shape, fresh["params"]) == {"embedding": (3,)}  # all that is ever trained
    assert fresh["hypernetwork"]["last"]["kernel"].shape == (8, 2 * 4)


def test_a_direction_has_no_length():
    """Token (3, 4), columns (1, 0) and (0, 2): 3 and 4, whatever their lengths; the token's counts."""
    router, kernel = ProductRouter(2, Flat(), measure="direction"), jnp.array([[1.0, 0.0], [0.0, 2.0]])
    for times in (1, 5):
        scores = router.apply({"params": {"kernel": times * kernel}}, jnp.array([[3.0, 4.0], [6.0, 8.0]]))
        np.testing.assert_allclose(scores, [[3, 4], [6, 8]], rtol=1e-6)


def test_k_grows_to_all_experts():
    """From 2 to 16 in 4 stages: 2, 2 + 14/3, 2 + 28/3, 16."""
    config = override(base(), {"steps": 100, "eval_every": 100, "selection.k": 2, "experts.count": 16})
    changes = changes_of("smoe_dropout", config)
    assert changes["phases"] == (
        "until=25 selection.k=2", "until=50 selection.k=7", "until=75 selection.k=11", "selection.k=16"
    )  # fmt: skip
    assert changes["selection.eval.k"] == 16 and changes_of("stable", config)["router.teach_steps"] == 10


def test_experts_of_a_token_so_far_by_hand():
    """K = 2 for 25 of 100 steps, 7, 11, 16: after 10 steps 2, after 50 4.5, after 100 9; half of 25 steps at 4: 3."""
    phases = phases_of(
        override(base(), {"steps": 100, "eval_every": 100, "phases": ("until=25", "until=50", "until=75", "")})
    )
    found = [float(mean_so_far(phases, (2, 7, 11, 16), step)) for step in (0, 10, 50, 100)]
    assert found == pytest.approx([2, 2, 4.5, 9])
    phases = phases_of(override(base(), {"steps": 100, "eval_every": 100, "phases": ("until=25 fraction=0.5", "")}))
    assert float(mean_so_far(phases, (4, 2), 20)) == pytest.approx(3)
    phases = (Phase(40, 1.0, None, {}, epochs=2), Phase(40, 1.0, None, {}))  # 8 of 40 steps at 1, then 2
    assert float(mean_so_far(phases, (1, 2), 40, per_epoch=4)) == pytest.approx(1.8)


@pytest.mark.slow
def test_growing_k_compiles_once(small):
    phases = (*(f"until={4 * k} selection.k={k}" for k in (1, 2, 3)), "selection.k=4")
    changes = TOP2 | {"experts.count": 4, "phases": phases, "router.frozen": True}
    before = compiled.cache_info().currsize
    states(small, 3, 3, 3, 3, 3, **changes)
    assert compiled.cache_info().currsize == before + 1
    again = override(small, {"optimizer.name": "adam", "experts.name": "constant"} | changes)
    assert compiled(tuple(flatten(again).items()))[2]._cache_size() == 1


def test_impossible_schedules_and_tables_are_refused():
    for changes, words in (
        ({"phases": ("until=9 selection.k=2", "selection.k=5")}, r"selection.k=5: more than experts.count=4; lower"),
        (
            {"router.name": "stable", "router.experts_per_id": 2, "router.teach_steps": 5000},
            r"teach_steps=5000: must be at most",
        ),
        (
            {"router.name": "stable", "router.experts_per_id": 1},
            r"^config key router.experts_per_id=1: must be selection.k=2, as",
        ),
        ({"router.name": "stable", "data.name": "gmm", "model": "moe", "dispatch": "dense"}, r"router.name='stable'"),
        ({"router.name": "hash"}, r"^config key selection.k=2: must be 1, as router.name=hash has fixed experts"),
        ({"router.name": "oracle", "router.experts_per_id": 1}, r"router.experts_per_id=1: must be selection.k=2"),
    ):
        with pytest.raises(UserError, match=words):
            validate(settings(**changes))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("killed", [1, 3])
def test_a_stable_run_killed_in_each_phase_goes_on(killed, tmp_path, monkeypatch, tmp_path_factory):
    """Four steps, of which two learn and teach: killed after the first, and in the middle of the frozen ones."""
    cache = str(tmp_path_factory.getbasetemp() / "text")
    config = settings(
        **{"name": "stable", "data.cache": cache, "data.languages": ("qaa",), "data.eval_rows": 8, "steps": 4,
           "eval_every": 2,
           "checkpoint.every": 1, "seeds": 1, "arms": ("learned",), "optimizer.name": "adam", "mesh.run": 1,
           "router.teach_steps": 2, "checkpoint.final": True},
        **{key: value for key, value in changes_of("stable", base()).items() if key != "router.teach_steps"},
    )  # fmt: skip
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    with monkeypatch.context() as patch, pytest.raises(EOFError):
        stopped_after(patch, killed)
        run(config, tmp_path / "killed")
    assert checkpoint.latest(tmp_path / "killed" / "checkpoints")[1]["step"] == killed
    found, whole = run(config, tmp_path / "killed"), run(config, tmp_path / "whole")
    for column in [name for name in whole if "/" in name]:
        np.testing.assert_array_equal(found[column], whole[column])
    models = [
        checkpoint.load_model(next(checkpoint.models(tmp_path / name / "models"))[0]) for name in ("killed", "whole")
    ]
    assert any(leaf.any() for leaf in jax.tree.leaves(models[0]["router"]))  # the router of token ids is among them
    chex.assert_trees_all_equal(*models)
