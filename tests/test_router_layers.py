"""Sparse layers of a language model with routers of their own: their parameters, what trains, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.layer.auxiliary import auxiliary
from routed.layer.model_losses import load
from routed.layer.rule import selection_rule
from routed.models.decoder import decoder
from routed.models.t5 import t5
from routed.plan.checks import validate
from routed.plan.config import base, canonical, problem_of, traced
from routed.plan.runs import decisive, plan_runs
from routed.settings.tree import node_of, override
from routed.training import program
from routed.training.objective import training_loss
from tests.parallel_case import loss_and_gradients, make_mesh
from tests.test_decoder import TINY, rows

HASH = "first=1 router.name=hash_id"


def settings(*layers, **changes):
    text = {
        "router.experts_per_id": 2,
        "optimizer.weight_decay": 0.1,
        "steps": 2,
        "eval_every": 1,
        "arms": ("learned",),
    }
    return override(base(), TINY | text | {"router.layers": layers} | changes)


@functools.lru_cache
def ready(build, *layers, **changes):
    config = canonical(settings(*layers, **dict(changes)))
    model = build(config)
    return config, model, *jax.jit(model.init)(jax.random.key(0), rows())


def sites_of(config, model, params, state):
    """Routing and features of all sparse layers."""
    rule = selection_rule(config.selection)
    return jax.jit(lambda params, state: model.apply(params, state, rows(), rule, "dense").sites)(params, state)


@pytest.mark.parametrize("build", [decoder, t5])
def test_each_layer_routes_as_the_router_that_it_names(build):
    """The first layer as where all layers hash; the second by a learned kernel, on what the first made of it."""
    text = {} if build is decoder else {"model": "moe"}
    mixed, hashed = (ready(build, *layers, **text) for layers in ((HASH,), ("first=2 router.name=hash_id",)))
    sites = sites_of(*mixed)
    scores = jax.jit(mixed[1].scores, static_argnums=2)
    for stack, (routing, features) in sites.items():
        kinds, table = mixed[2]["router"][stack]["router"], hashed[2]["router"][stack]["router"]["table"]
        np.testing.assert_array_equal(kinds["routers_0"]["table"], table)
        ids = {"encoder": rows().inputs, "decoder": rows().inputs}[stack]
        if build is t5 and stack == "decoder":
            ids = jnp.pad(rows().targets[:, :-1], ((0, 0), (1, 0)))
        chosen = np.sort(np.asarray(routing.expert[0]).reshape(-1, 2))
        np.testing.assert_array_equal(chosen, np.sort(np.asarray(table[0])[np.asarray(ids).reshape(-1)].astype(int)))
        learned = np.asarray(features[1] @ kinds["routers_1"]["kernel"][1])
        np.testing.assert_allclose(routing.scores[1], learned, rtol=1e-4, atol=1e-5)
        again = scores(mixed[2], mixed[3], stack, features, rows())
        np.testing.assert_allclose(again, routing.scores, rtol=1e-4, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, mixed[2]["trunk"], hashed[2]["trunk"])


def trained(config):
    """The state of a run after two steps, and its history."""
    read = canonical(config)
    trainer = program.make_program(read, problem_of(read).build(read, 0, None))
    shared = {"validation": rows(), "test": rows(), "references": {}, "table": {}}
    shared["table"] |= {"decoder": {"routers_0": jnp.zeros((30, 2))}} if HASH in config.router.layers else {}

    @jax.jit
    def run(feed):
        world, state = program.start(trainer, 0, values, shared)
        first = state["params"]
        state = program.advance(trainer, 2, 0, values, world, state, feed, shared)
        return first, program.record(trainer, 0, values, world, state, shared)

    values = {key: jnp.asarray(value) for key, value in traced(read).items()}
    return run(jax.tree.map(lambda a: jnp.stack([a, a]), rows()))


@pytest.mark.slow
def test_only_layers_that_are_not_frozen_train_and_tables_do_not_decay(tmp_path):
    first, state = trained(settings(HASH, "last=1 router.frozen=true", **{"data.cache": str(tmp_path)}))
    jax.tree.map(np.testing.assert_array_equal, first["router"], state["params"]["router"])
    assert float(state["history"]["router/frozen_changed"].max()) == 0
    first, state = trained(settings("last=1 router.frozen=true", **{"data.cache": str(tmp_path)}))
    kernels = [params["router"]["decoder"]["router"]["kernel"] for params in (first, state["params"])]
    assert (kernels[0][0] != kernels[1][0]).any() and (kernels[0][1] == kernels[1][1]).all()
    assert float(state["history"]["router/frozen_changed"].max()) == 0
    assert float(state["history"]["router/params_changed"].max()) == 1


def test_a_layer_may_have_fewer_experts_and_another_weight():
    routing = sites_of(*ready(decoder, "last=1 selection.k=1 selection.renormalise=false"))["decoder"].routing
    probs = np.asarray(jax.nn.softmax(routing.scores[1]))
    np.testing.assert_array_equal(routing.chosen[0], True)
    np.testing.assert_array_equal(routing.chosen[1].reshape(-1, 2), [[True, False]] * 32)
    np.testing.assert_allclose(routing.weight[1].reshape(-1, 2)[:, 0], probs.max(1), rtol=1e-5)
    np.testing.assert_allclose(routing.weight[0].reshape(-1, 2).sum(1), 1, rtol=1e-5)


@pytest.mark.slow
def test_a_mesh_gives_the_numbers_of_one_device():
    changes = {"selection.group_size": 8, "batch_size": 8}
    config = canonical(settings(HASH, "last=1 selection.k=1 selection.renormalise=false", **changes))
    expected, shared = (loss_and_gradients(decoder, config, rows(8), mesh) for mesh in (None, make_mesh(2, 2)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), shared, expected)


def test_layers_are_part_of_the_identity_and_one_shared_value_is_not():
    plain, same, mixed = (decisive(canonical(settings(*layers))) for layers in ((), (), (HASH,)))
    assert plain == same and "router.layers" not in plain and HASH in mixed
    assert "router.vocabulary" in flat(settings(HASH)) and "router.vocabulary" not in flat(settings())
    assert {run.config.router.layers for run in plan_runs(settings(), ({}, {"router.layers": (HASH,)}))} == {
        (),
        (HASH,),
    }


def flat(config):
    return dir(node_of(canonical(config)).router) and {
        f"router.{name}" for name in vars(node_of(canonical(config)).router)
    }


def test_a_layer_has_the_loss_of_its_own_router_alone():
    """The stable router computes a loss in both layers; it is minimised in those that route by it."""
    batch, minimised = rows(), []
    for text in ("first=1 router.name=stable", "first=2 router.name=stable"):
        config = canonical(settings(text, **{"router.teach_steps": 1}))
        problem = problem_of(config).build(config, 0, None)
        params, state = jax.jit(problem.model.init)(jax.random.key(0), batch)
        still = jnp.zeros(2, bool)
        step = functools.partial(training_loss, problem, config, batch, jax.random.key(1), 0, still=still)
        total, (task, _, moved, *_) = jax.jit(step)(params, state, {})
        (by_layer,) = jax.tree.leaves(moved["objective"])
        minimised.append((float(total - task), by_layer))
    (first, losses), (both, _) = minimised
    assert first == pytest.approx(float(losses[0]), rel=1e-3) and both == pytest.approx(float(losses.sum()), rel=1e-3)


def test_layers_of_fewer_experts_have_the_load_loss_of_their_own_k():
    (routing, _) = sites_of(*ready(decoder, "last=1 selection.k=1", **{"losses.load": 0.1}))["decoder"]
    for layer, k in enumerate((2, 1)):
        of_layer = jax.tree.map(lambda a, layer=layer: a[layer], routing)
        loss, scores = auxiliary(of_layer, {"load": 1.0})[1]["load"], of_layer.scores
        assert float(loss) == pytest.approx(float(load(scores, scores, 1.0, k)), rel=1e-5)


def test_a_layer_of_more_experts_than_an_evaluation_gives_is_refused():
    with pytest.raises(UserError, match=r"set selection.k and selection.eval.k to the most of all layers"):
        validate(settings("first=1 selection.k=2", **{"selection.eval.k": 1}))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "first=3 router.name=hash_id",
            "first=3, and a stack has transformer.sparse_layers=2; use a number from 0 to 2",
        ),
        ("layers=0+2 router.frozen=true", "use numbers from 0 to 1"),
        ("router.frozen=true", "expected first=N, last=N or layers=I\\+J"),
        ("first=1 router.learning_rate=1", "router.learning_rate cannot be that of single layers"),
        ("first=1 router.name=conv", "router.name='conv': routes rows or patches or images"),
        ("first=1 router.name=oracl", "router.name='oracl': must be one of"),
        ("first=1 selection.k=3", "set selection.k and selection.eval.k to the most of all layers"),
        (
            "first=1 selection.name=relu",
            "selection.name=relu is that of all layers or of none; use one of top_k, sigmoid",
        ),
    ],
)
def test_impossible_layers_are_refused_with_the_way_that_works(text, told):
    with pytest.raises(UserError, match=told):
        validate(settings(text))
