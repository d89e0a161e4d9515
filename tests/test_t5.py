"""The T5: numbers are those of transformers, sparse layers are where they belong, and so are gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.bench.harness import Baseline
from routed.bench.t5 import LINES, SHAPES
from routed.contracts import TextBatch, UserError
from routed.layer.rule import selection_rule
from routed.models.attention import relative_buckets
from routed.models.t5 import t5
from routed.models.transformer_sizes import flops_per_row, twin_width
from routed.plan.config import base
from routed.settings.tree import override
from tests.parallel_case import loss_and_gradients, make_mesh

TINY = {
    "data.vocabulary": 20, "data.input_length": 8, "transformer.layers": 1, "transformer.dim": 8,
    "transformer.heads": 2, "transformer.head_dim": 3, "transformer.width": 12, "transformer.buckets": 8,
    "transformer.max_distance": 16, "experts.name": "gated_ffn", "experts.activation": "gelu", "experts.width": 6,
    "experts.count": 4, "selection.name": "top_k", "selection.k": 2,
}  # fmt: skip
VARIANTS = {
    "relu, tied": {"transformer.ffn": "ffn", "experts.activation": "relu", "transformer.tied": True},
    "gated gelu, untied": {},
}
#: Logits [0, :, :3] of transformers 5.23 with the weights of `made`: python -m tests.external.test_t5_transformers.
PINNED = {
    "relu, tied": [
        [-0.052235, 0.241057, -0.087528], [-0.023324, 0.362355, -0.085723], [-0.003640, 0.401304, -0.096484],
        [-0.116841, 0.066866, -0.114157], [-0.085277, 0.486985, -0.058646], [0.063007, 0.406955, -0.143602],
        [0.029234, 0.285749, -0.086317],
    ],
    "gated gelu, untied": [
        [1.670832, -1.214322, 1.161245], [0.800540, -1.708615, 1.752628], [0.618787, -1.621650, 1.670738],
        [0.476191, -1.566594, 1.723247], [0.091275, -1.225430, 1.850067], [0.291876, -1.513758, 1.674195],
        [0.633833, -1.116438, 1.224981],
    ],
}  # fmt: skip


def settings(**changes):
    return override(base(), TINY | changes)


def rows(count=4, length=8, targets=5):
    """Rows of ids, none of which is padding."""
    draw = lambda seed, n: jax.random.randint(jax.random.key(seed), (count, n), 1, 20)  # noqa: E731
    return TextBatch(draw(1, length), draw(2, targets), jnp.zeros(count, jnp.int32))


@functools.lru_cache
def ready(**changes):
    """Config, model, batch, parameters and state."""
    config = settings(**changes)
    model, batch = t5(config), rows()
    return config, model, batch, *jax.jit(model.init)(jax.random.key(0), batch)


def with_weights_of(case, **changes):
    """A case of another config with the batch, parameters and state of this one."""
    config = settings(**changes)
    return config, t5(config), *case[2:]


@functools.lru_cache
def forward_of(**changes):
    config, model, _, _, state = ready(**changes)
    return jax.jit(lambda p, b: model.apply(p, state, b, selection_rule(config.selection), config.dispatch)[0])


def logits_of(batch=None, **changes):
    _, _, usual, params, _ = ready(**changes)
    return forward_of(**changes)(params, batch or usual)


def loss_of(case, params, key=None):
    config, model, batch, _, state = case
    logits, seen, state = model.apply(params, state, batch, selection_rule(config.selection), config.dispatch, key)
    nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    return nats.mean(), (seen, state)


def grads_of(case):
    return jax.jit(jax.grad(lambda p: loss_of(case, p)[0]))(case[3])


@functools.lru_cache
def usual_grads():
    return grads_of(ready())


def pinned_case(variant):
    changes = {"transformer.layers": 2, "transformer.sparse_layers": 0} | VARIANTS[variant]
    return settings(**changes), rows(2, 10, 7)


def made(config, batch):
    """Weights by formula: the n-th leaf is sin((n + 1)^2), sin((n + 2)^2), ..., halved; norms' scales that plus 1."""
    shapes = jax.eval_shape(t5(config).init, jax.random.key(0), batch)[0]
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

    def fill(n, path, leaf):
        wave = np.sin(np.arange(n + 1, n + 1 + leaf.size) ** 2).reshape(leaf.shape) / 2
        return jnp.asarray(wave + (path[-1].key == "scale"), jnp.float32)

    return tree.unflatten([fill(n, *leaf) for n, leaf in enumerate(leaves)])


def shown(variant):
    config, batch = pinned_case(variant)
    model = t5(config)
    return jax.jit(lambda p: model.apply(p, {}, batch, selection_rule(config.selection), "dense")[0])(
        made(config, batch)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_numbers_of_transformers(variant):
    np.testing.assert_allclose(shown(variant)[0, :, :3], PINNED[variant], atol=1e-5)


#: How far each of 20 queries is behind each of 20 keys.
BEHIND = np.arange(20)[:, None] - np.arange(20)[None, :]


def test_buckets_by_hand():
    """8 buckets, furthest 16. Both ways: 4 a side, 0 and 1 alone, then 2 + 2 log(d / 2) / log 8, so 3 from d = 6 on."""
    both = relative_buckets(BEHIND[:8, :8], buckets=8, max_distance=16, bidirectional=True)
    np.testing.assert_array_equal(both[0], [0, 5, 6, 6, 6, 6, 7, 7])
    np.testing.assert_array_equal(both[7], [3, 3, 2, 2, 2, 2, 1, 0])
    # One way: 0 to 3 alone, then 4 + 4 log(d / 4) / log 4: 5 from 5.7, 6 from 8, 7 from 11.3.
    back = relative_buckets(BEHIND, buckets=8, max_distance=16, bidirectional=False)[19][::-1]
    np.testing.assert_array_equal(back, [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6] + [7] * 8)
    assert not relative_buckets(BEHIND[:3, :9], buckets=8, max_distance=16, bidirectional=False)[0].any()


def test_a_token_is_predicted_from_those_before_it():
    batch = rows()
    other = batch._replace(targets=batch.targets.at[:, 2].set(batch.targets[:, 2] % 19 + 1))
    before, after = logits_of(), logits_of(other)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (jnp.abs(before[:, 3:] - after[:, 3:]).max((0, 2)) > 1e-4).all()
    np.testing.assert_array_equal(logits_of(batch._replace(targets=batch.targets.at[:, -1].set(7))), before)


@pytest.mark.parametrize("priority", ["position", "score"])
def test_a_full_queue_tells_a_token_nothing_of_later_ones(priority):
    """One row, half the places that top-2 needs: whatever follows, the first tokens keep theirs."""
    config, model, batch, params, state = ready()
    rule = selection_rule(config.selection)._replace(capacity_factor=0.5, priority=priority)
    batch = jax.tree.map(lambda a: a[:1], batch)
    apply = jax.jit(lambda targets: model.apply(params, state, batch._replace(targets=targets), rule, "slots")[:2])
    before, seen = apply(batch.targets)
    assert not seen["decoder"].routing.kept.all()
    for last in range(1, 20):
        after, _ = apply(batch.targets.at[0, 3:].set(last))
        np.testing.assert_allclose(after[:, :4], before[:, :4], atol=1e-6)


def test_sparse_layers_end_equal_blocks():
    config = settings(**{"transformer.layers": 6, "transformer.sparse_layers": 2})
    params, _ = jax.eval_shape(t5(config).init, jax.random.key(0), rows())
    for stack in ("encoder", "decoder"):
        blocks = params["trunk"][stack]["blocks"]
        assert ["feed_norm" in blocks[f"layer_{i}"] for i in range(3)] == [True] * 3
        assert ["ffn" in blocks[f"layer_{i}"] for i in range(3)] == [True, True, False]
        assert {leaf.shape[0] for leaf in jax.tree.leaves((blocks, params["experts"][stack]))} == {2}
        assert params["router"][stack]["router"]["kernel"].shape == (2, 8, 4)
    with pytest.raises(UserError, match=r"transformer.sparse_layers=4: does not divide transformer.layers=6; use 3"):
        t5(settings(**{"transformer.layers": 6, "transformer.sparse_layers": 4}))


@pytest.mark.slow
def test_remat_has_the_same_gradients():
    two = {"transformer.layers": 2, "transformer.sparse_layers": 0}  # sparse layers: tests/test_moe.py
    plain = ready(**two)
    remat = with_weights_of(plain, **two, **{"transformer.remat": True})
    chex.assert_trees_all_close(grads_of(plain), grads_of(remat), atol=1e-6)


@pytest.mark.slow
def test_bfloat16_keeps_routers_and_gradients_in_float32():
    case = with_weights_of(ready(), **{"transformer.dtype": "bfloat16"})
    config, model, batch, params, state = case
    own = jax.eval_shape(model.init, jax.random.key(0), batch)[0]
    assert jax.tree.map(lambda a: (a.shape, a.dtype), own) == jax.tree.map(lambda a: (a.shape, a.dtype), params)
    forward = jax.jit(lambda p: model.apply(p, state, batch, selection_rule(config.selection), "ragged"))
    logits, seen, _ = forward(params)
    assert logits.dtype == jnp.float32
    assert all(s.routing.scores.dtype == jnp.float32 and s.features.dtype == jnp.bfloat16 for s in seen.values())
    exact = jnp.einsum(
        "STD,SDE->STE", seen["encoder"].features.astype(jnp.float32), params["router"]["encoder"]["router"]["kernel"]
    )
    np.testing.assert_allclose(seen["encoder"].routing.scores, exact, atol=1e-5)  # no weight was rounded
    assert {g.dtype for g in jax.tree.leaves(grads_of(case))} == {jnp.dtype("float32")}
    full = logits_of()
    assert 0 < float(jnp.sqrt(((logits - full) ** 2).mean() / (full**2).mean())) < 0.1


def test_every_parameter_has_a_gradient():
    for path, gradient in jax.tree_util.tree_leaves_with_path(usual_grads()):
        assert gradient.any(), jax.tree_util.keystr(path)


def test_a_router_that_is_frozen_changes_no_other_gradient():
    case = ready()
    router, rest = case[3]["router"], {name: case[3][name] for name in ("experts", "trunk")}
    loss = jax.jit(jax.grad(lambda rest: loss_of(case, {"router": jax.lax.stop_gradient(router)} | rest)[0]))
    expected = {name: usual_grads()[name] for name in rest}
    chex.assert_trees_all_close(loss(rest), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [False, True])
def test_stop_gradient_keeps_what_routers_learn_from_the_layers_below(stop):
    noise = {"router.noise": "learned", "router.noise_in_weights": True}
    case = with_weights_of(ready(**noise), **noise, **{"router.stop_gradient": stop})

    def of_routers(params):
        seen = loss_of(case, params, jax.random.key(1))[1][0]
        return sum(jnp.square(s.routing.scores).sum() for s in seen.values())

    grads = jax.jit(jax.grad(of_routers))(case[3])
    assert all(leaf.any() for leaf in jax.tree.leaves(grads["router"]))
    below = grads["trunk"]["encoder"]["blocks"]["layer_0"]["self"]["query"]["kernel"]
    assert bool(below.any()) is not stop
    assert not stop or not any(leaf.any() for leaf in jax.tree.leaves((grads["experts"], grads["trunk"])))


@pytest.mark.slow
def test_training_draws_noise_and_moves_the_balance_and_evaluation_does_not():
    case = ready(**{"selection.balance_rate": 0.1, "router.noise": "gaussian"})
    config, model, batch, params, state = case

    @jax.jit
    def both(key):
        rule = selection_rule(config.selection)
        return model.apply(params, state, batch, rule, "dense", key), model.apply(params, state, batch, rule, "dense")

    (first, _, moved), (calm, _, still) = both(jax.random.key(1))
    assert not jax.tree.leaves(state)[0].any() and all(leaf.any() for leaf in jax.tree.leaves(moved))
    chex.assert_trees_all_equal(still, state)
    assert (first != both(jax.random.key(2))[0][0]).any() and (first != calm).any()


@pytest.mark.slow
def test_a_router_by_token_id_sees_the_ids_of_its_stack():
    case = ready(**{"router.name": "hash_id", "router.vocabulary": 20})
    config, model, batch, params, state = case
    seen = jax.jit(lambda p: model.apply(p, state, batch, selection_rule(config.selection), "dense")[1])(params)
    for stack, ids in (("encoder", batch.inputs), ("decoder", jnp.pad(batch.targets[:, :-1], ((0, 0), (1, 0))))):
        expected = params["router"][stack]["router"]["table"][0].reshape(20, -1)[ids.reshape(-1), 0]
        np.testing.assert_array_equal(seen[stack].routing.scores[0].argmax(-1), expected.astype(int) % 4)


@pytest.mark.slow
def test_the_oracle_of_text_sends_a_row_by_its_language():
    """Language l goes to experts 2 l and 2 l + 1, of four, in both stacks; also when its scores are asked for again."""
    config, model, batch, params, state = ready(**{"router.name": "oracle", "router.experts_per_id": 2})
    batch = batch._replace(language=jnp.arange(len(batch.language)) % 3)
    outputs = jax.jit(lambda: model.apply(params, state, batch, selection_rule(config.selection), "dense"))()
    for stack, ids in (("encoder", batch.inputs), ("decoder", batch.targets)):
        site = outputs.sites[stack]
        chosen = jnp.sort(jnp.argsort(-site.routing.scores[0])[:, :2])
        first = np.repeat([(2 * index) % 4 for index in batch.language], ids.shape[1])
        np.testing.assert_array_equal(chosen, np.stack([first, first + 1], 1))
        again = model.scores(params, state, stack, site.features, batch)
        np.testing.assert_array_equal(again, site.routing.scores)
        np.testing.assert_allclose(jnp.square(site.features).mean(-1), 1, atol=1e-3)  # the router sees normed features


#: Of a size at which a width is not rounded to nothing.
WIDE = {
    "transformer.dim": 32,
    "transformer.width": 128,
    "experts.width": 128,
    "experts.count": 16,
    "transformer.heads": 4,
}


@pytest.mark.parametrize("capacity", [0.0, 1.25])
def test_twins_have_the_parameters_and_flops_of_the_sparse_model(capacity):
    of = lambda **changes: settings(**WIDE, **{"selection.capacity_factor": capacity}, **changes)  # noqa: E731

    def parameters(config):
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(t5(config).init, jax.random.key(0), rows())[0]))

    assert parameters(of(model="dense_total")) == pytest.approx(parameters(of()), rel=0.02)
    share = flops_per_row(of(model="dense_active")) / flops_per_row(of())
    assert share == pytest.approx(1, rel=0.02) if not capacity else share > 1.02  # padding is no model FLOPs
    places = 2 * (capacity or 1) * 3 * 32 * 128 + 32 * 16  # router and experts, multiplications of a token
    assert 3 * 32 * twin_width(of(model="dense_active")) == pytest.approx(places, rel=0.02)
    per_token = settings(**WIDE, **{"selection.capacity_factor": 2.0, "selection.capacity_rule": "per_token"})
    assert twin_width(override(per_token, {"model": "dense_active"})) == round((2 * 3 * 128 + 16) / 3)


def test_flops_by_hand():
    """One layer a stack, D 8, inner 6, FFN 12 without gate, 8 and 3 tokens (a sentinel, one token, the end), 20 ids."""
    config = settings(**{"transformer.sparse_layers": 0, "transformer.ffn": "ffn"})
    encoder = 8 * (4 * 8 * 6 + 2 * 8 * 12) + 2 * 8 * 8 * 6
    decoder = 3 * (6 * 8 * 6 + 2 * 8 * 12 + 8 * 20) + 8 * 2 * 8 * 6 + 2 * 3 * (3 + 8) * 6
    assert flops_per_row(config) == 6 * (encoder + decoder)


@pytest.mark.slow
def test_a_mesh_gives_the_numbers_of_one_device():
    changes = {"selection.group_size": 8, "selection.capacity_factor": 0.75}
    config, batch = settings(**changes), rows(8, 8, 8)
    expected, found = (loss_and_gradients(t5, config, batch, mesh) for mesh in (None, make_mesh(2, 4)))
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=2e-6)


def test_the_bench_reads_baselines_and_its_shapes_are_t5s():
    assert Baseline("echo 't5 s per step: 0.5 parameters: 10'", LINES).run() == {"t5": (0.5, 10)}
    with pytest.raises(UserError, match="expected lines `NAME s per step: SECONDS parameters: COUNT`"):
        Baseline("echo nothing", LINES).run()
    narrow = override(base(), SHAPES["narrow12"].changes | {"transformer.sparse_layers": 0})
    params, _ = jax.eval_shape(t5(narrow).init, jax.random.key(0), rows())
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 3_951_296  # of transformers' T5 of that shape
