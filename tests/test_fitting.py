"""Routers on hidden states of language models: fitted once, online, frozen behind a share of the steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.engine import checkpoint, execution, results, tables
from routed.engine.devices import make_mesh
from routed.plan.checks import validate
from routed.plan.config import base, canonical, problem_of
from routed.plan.runs import plan_runs
from routed.settings.tree import node_of, override
from routed.training import fitting, program
from tests import language_case
from tests.test_decoder import TINY, rows
from tests.test_language import same, stopped_after

pytestmark = pytest.mark.usefixtures("compiled")
FITTED = {"router.fit": "clusters", "router.score": "distance", "router.frozen": True}
FIRST = "first=1 router.fit=clusters router.score=distance"


@functools.lru_cache
def moment(cache, **changes):
    """A decoder of two sparse layers, its fresh parameters, the fitted ones, and the features of both layers there."""
    config = canonical(override(base(), TINY | changes | {"data.cache": cache}))
    problem = problem_of(config).build(config, 0, None)
    fit_rows = jax.tree.map(lambda *a: jnp.stack(a), *(rows(8, length) for length in (8, 8)))
    keys = program.streams(0, config)
    node = node_of(config, {"router.fit_entropy": jnp.float32(changes.get("router.fit_entropy", 0))})
    inputs = program.Inputs(keys, node, (), {"validation": rows(), "fitted_on": fit_rows})

    @jax.jit
    def fit():
        params, state = problem.init(inputs)
        new = problem.fit(inputs, params, state, 0, None)
        rule, dispatch = problem.evaluation_rule()
        batch = jax.tree.map(lambda a: a[0], fit_rows)
        site = problem.model.apply(new, state, batch, rule, dispatch).sites["decoder"]
        return params, new, site.features

    return fit()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One folder for all tests here: what two of them fit is fitted once."""
    return str(tmp_path_factory.mktemp("cache"))


def test_sharp_clusters_choose_as_clusters_do_and_have_the_asked_entropy(cache):
    asked = {"router.fit": "sharp_clusters", "router.fit_entropy": 0.7, "router.score": "product", "router.bias": True}
    (_, plain, features), (_, sharp, _) = moment(cache, **FITTED), moment(cache, **FITTED | asked)
    plain, sharp = (jax.tree.map(np.asarray, params["router"]["decoder"]["router"]) for params in (plain, sharp))
    x, centres = np.asarray(features[0]), plain["kernel"][0].T  # the first layer sees the same in both
    scores = x @ sharp["kernel"][0] + sharp["bias"][0]
    np.testing.assert_array_equal(scores.argmax(1), (x @ centres.T - (centres**2).sum(1) / 2).argmax(1))
    probs = np.asarray(jax.nn.softmax(scores))
    np.testing.assert_allclose(-(probs * np.log(probs)).sum(1).mean(), 0.7, atol=0.05)


@pytest.mark.parametrize("size", ["clusters", "balanced"])
def test_a_fitted_router_has_the_means_of_what_its_layer_sees(size, cache):
    """Both layers at once: the features are those that the second layer sees behind the fitted first one."""
    bias = {"router.bias": True} if size == "balanced" else {}
    old, new, features = moment(cache, **FITTED | bias | {"router.fit": size})
    for layer in range(2):
        router = jax.tree.map(lambda a, layer=layer: np.asarray(a[layer]), new["router"]["decoder"]["router"])
        centres, x = router["kernel"].T, np.asarray(features[layer])
        scores = x @ centres.T - (centres**2).sum(1) / 2 + router.get("bias", 0)
        chosen = scores.argmax(1)
        if size == "balanced":
            assert np.bincount(chosen, minlength=4).max() <= 18  # of 64
        else:
            members = np.stack([x[chosen == e].mean(0) for e in range(4)])
            np.testing.assert_allclose(centres, members, rtol=1e-3, atol=1e-3)
    jax.tree.map(np.testing.assert_array_equal, old["trunk"], new["trunk"])


def test_a_single_layer_may_be_fitted(cache):
    old, new, _ = moment(cache, **{"router.layers": (FIRST,)})
    old, new = (params["router"]["decoder"]["router"] for params in (old, new))
    np.testing.assert_array_equal(old["routers_1"]["kernel"], new["routers_1"]["kernel"])
    moved = (old["routers_0"]["kernel"] != new["routers_0"]["kernel"]).any((1, 2))
    np.testing.assert_array_equal(moved, [True, False])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"router.name": "hash_id"}, "router.name=hash_id has no columns to fill; use one of linear"),
        ({"router.fit": "balanced"}, "needs router.score=distance and router.bias=true"),
        ({"router.fit": "sharpness", "router.score": "product", "router.bias": True}, "and router.bias=false"),
        ({"router.fit": "sharp_clusters"}, "needs router.score=product and router.bias=true"),
        ({"router.fit_at": 0.3}, "there is no evaluation at step 3, where routers are fitted; use eval_every=1"),
    ],
)
def test_a_fit_that_is_not_possible_is_refused_with_the_way_that_works(changes, told):
    needed = {"router.experts_per_id": 2, "steps": 10, "eval_every": 5, "arms": ("learned",)}
    with pytest.raises(UserError, match=told):
        validate(override(base(), TINY | needed | FITTED | changes))


def test_shorter_tuning_runs_have_the_evaluation_at_which_routers_are_fitted():
    """Step 5 of 10 has one; step 2 of 5 had none, so tuning runs would never have been fitted."""
    changes = {"steps": 10, "eval_every": 5, "router.fit_at": 0.5, "arms": ("learned",)}
    config = override(base(), TINY | FITTED | changes | {"rates": "tuned", "tune.steps": 5})
    plan_runs(override(config, {"tune.steps": 0}), ())
    with pytest.raises(UserError, match="there is no evaluation at step 2, where routers are fitted"):
        plan_runs(config, ())


@pytest.fixture
def tiny(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(fitting, "TOKENS", 512)
    cache = {"data.cache": str(tmp_path_factory.getbasetemp() / "text"), "checkpoint.every": 1}
    return override(base(), language_case.TINY | cache)


@pytest.fixture
def small(tiny):
    return override(base(), language_case.DECODER | {"data.cache": tiny.data.cache})


def run(config, workdir, *sweep):
    workdir.mkdir(exist_ok=True)
    sweep = sweep or ({},)
    runs = plan_runs(config, sweep)
    table = results.open_workdir(workdir, "tiny", config, sweep)
    return execution.execute(runs, table, workdir, make_mesh(config))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["kmeans_fitted", "kmeans_online"])
def test_a_run_that_was_killed_and_one_on_a_mesh_have_the_numbers_of_a_whole_one(small, tmp_path, monkeypatch, arm):
    config = override(small, {"arms": (arm,), **({"router.fit_at": 0.5} if arm == "kmeans_fitted" else {})})
    whole = run(config, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(EOFError):
        stopped_after(patch, 2)
        run(config, tmp_path / "killed")
    assert checkpoint.latest(tmp_path / "killed" / "checkpoints")[1]["step"] == 2
    same(run(config, tmp_path / "killed"), whole, layer="decoder_0")
    spread = run(override(config, {"mesh.data": 2, "mesh.expert": 2}), tmp_path / "mesh")
    same(spread, whole, rtol=2e-4, layer="decoder_0")
    churn = whole["router/churn_router"].to_numpy()[1:]
    assert (churn > 0).tolist() == {"kmeans_fitted": [True, False], "kmeans_online": [True, True]}[arm]


@pytest.mark.slow
def test_a_freeze_curve_is_a_sweep_in_one_line(small, tmp_path):
    """0 is the frozen arm, 1 the learned one, and between them the phases that say the same."""
    sweep = tuple({"router.freeze_at": share} for share in (0.0, 0.5, 1.0))
    curve = run(override(small, {"arms": ("learned", "frozen")}), tmp_path / "curve", *sweep)
    phases = run(override(small, {"phases": ("until=50%", "train=experts+trunk")}), tmp_path / "phases")
    learned = curve[curve.arm == "learned"].set_index("router.freeze_at")
    frozen = curve[(curve.arm == "frozen") & (curve["router.freeze_at"] == 1)].reset_index(drop=True)
    for share, table in ((0.0, frozen), (0.5, phases)):  # programs of their own, which round otherwise
        same(learned.loc[share].reset_index(drop=True), table, rtol=1e-5, layer="decoder_0")
    losses = learned.loc[learned.step == 4, "eval/loss"]
    assert losses.nunique() == 3 and learned.loc[0.0, "router/params_changed"].max() == 0


@pytest.mark.slow
def test_frozen_routers_may_be_as_sharp_as_the_learned_one_and_choose_as_it_does(tiny, tmp_path):
    """At step 0, where fresh routers are softer, and choose by chance the teacher's first expert for a quarter."""
    arms = ("learned", "frozen", "frozen_as_sharp", "distilled")
    config = override(tiny, {"arms": arms, "checkpoint.final": True, "router.learning_rate": 0.3, "trace.every": 1})
    table = run(config, tmp_path / "arms")
    first, last = (table[table.step == step].set_index("arm") for step in (0, 4))
    entropy = "router/entropy_token"
    assert abs(first.loc["frozen_as_sharp", entropy] - last.loc["learned", entropy]) < 0.05
    assert abs(first.loc["frozen", entropy] - last.loc["learned", entropy]) > 0.1
    assert last.loc[["frozen_as_sharp", "distilled"], "router/params_changed"].max() == 0
    kept, keys = tables.read_heatmaps(tmp_path / "arms"), table.groupby("arm").run.first()
    choices = {arm: np.asarray(kept[f"{keys[arm]}/trace/encoder/choices"]) for arm in arms}  # [moments, layers, T, k]
    agreement = {arm: (choices[arm][0, 0, :, 0] == choices["learned"][-1, 0, :, 0]).mean() for arm in arms[1:]}
    assert agreement["distilled"] > 0.6 > agreement["frozen"], agreement
    with pytest.raises(UserError, match="no run teaches the arm frozen; use arms=distilled"):
        run(override(config, {"arms": ("frozen",), "router.fit": "distilled"}), tmp_path / "untaught")
