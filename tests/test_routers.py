"""Routers and their noise: scores, initial weights, and what reaches the experts."""

import itertools
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed.contracts import Batch, TextBatch, UserError
from routed.layer.rule import selection_rule
from routed.models.single_layer import single_layer
from routed.models.t5 import t5
from routed.plan.config import base, canonical
from routed.routers import ROUTERS, Router
from routed.routers.features import Flat, Windows
from routed.routers.fixed import HashBigramRouter, HashIdRouter, HashRouter, OracleRouter, RandomRouter, balanced_table
from routed.routers.noise import NOISES, ScoreNoise, jitter
from routed.routers.product import CosineRouter, OnlineKMeansRouter, ProductRouter, SelfRouter
from routed.routers.router import initial_parameters
from routed.routers.scores import sharpness_for, sharpness_of
from routed.settings.tree import node_of, override
from routed.suite import subject as suite
from routed.training.optimiser import optimiser, update

CONTEXT = {"cluster": jnp.arange(6) % 4, "token_id": jnp.array([0, 5, 5, 2, 7, 0])}
CONTEXT["previous_id"] = jnp.array([0, 0, 5, 5, 2, 7])
#: A small T5.
TEXT = {
    "model": "t5", "data.name": "mc4", "router.name": "linear", "selection.name": "top_k", "experts.count": 4,
    "transformer.dim": 16, "transformer.width": 32, "transformer.layers": 2, "data.vocabulary": 20,
}  # fmt: skip
X = jnp.round(8 * jax.random.normal(jax.random.key(0), (6, 4))) / 8  # sums are exact, in whatever order


def node(**changes):
    small = {"router.width": 5, "router.window": 2, "router.dim": 3, "router.vocabulary": 8}
    return override(base(), small | changes).router


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router(name):
    """Shape, finite float32 scores of bf16 tokens, permuting tokens permutes scores, seeds under vmap equal a loop."""
    router = ROUTERS[name].make(node(), 4)
    keys = jax.random.split(jax.random.key(1), 2)
    init, apply = jax.jit(router.init), jax.jit(router.apply)
    one = lambda key: apply(init(key, X, **CONTEXT), X, **CONTEXT)  # noqa: E731
    scores = one(keys[0])
    assert scores.shape == (6, 4) and bool(jnp.isfinite(scores).all())
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(keys), jnp.stack([one(k) for k in keys]), atol=1e-5)
    variables = init(keys[0], X, **CONTEXT)
    assert jax.eval_shape(router.apply, variables, X.astype(jnp.bfloat16), **CONTEXT).dtype == jnp.float32
    order = jnp.array([3, 1, 0, 5, 4, 2])
    moved = apply(variables, X[order], **{k: v[order] for k, v in CONTEXT.items()})
    np.testing.assert_allclose(moved, scores[order], atol=1e-5)


@pytest.mark.parametrize("name", ROUTERS)
def test_only_routers_with_weights_have_a_gradient(name):
    router = ROUTERS[name].make(node(), 4)
    state = dict(jax.jit(router.init)(jax.random.key(1), X, **CONTEXT))
    params = state.pop("params", {})
    loss = lambda p: (jax.nn.softmax(router.apply({"params": p, **state}, X, **CONTEXT))[:, 0] ** 2).sum()  # noqa: E731
    moves = any(bool(g.any()) for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))
    assert moves is (ROUTERS[name].learns and name != "self")  # whose scores are the token's own numbers


@pytest.mark.parametrize("needs", [(), ("cluster",), ("cluster", "token_id")])
def test_a_router_is_told_the_step_and_what_it_needs(monkeypatch, needs):
    """In training, at an evaluation and when scores are computed again: labels reach only those that name them."""
    heard = set[str]()

    class Listener(ProductRouter):
        def __call__(self, x, **context):
            heard.update(context)
            return super().__call__(x)

    def make(own, experts):
        return Listener(experts, Flat())

    monkeypatch.setitem(ROUTERS, "linear", ROUTERS["linear"]._replace(make=make, needs=needs))
    key, ids = jax.random.key(0), jnp.ones((4, 8), jnp.int32)
    samples = Batch(jnp.zeros((4, 16)), jnp.zeros((4, 10)), jnp.zeros(4, jnp.int32))
    for model, batch, config in (
        (single_layer, samples, override(base(), {"router.name": "linear"})),
        (t5, TextBatch(ids, ids, jnp.zeros(4, jnp.int32)), override(base(), TEXT)),
    ):
        heard.clear()
        made = model(config)
        params, state = jax.eval_shape(made.init, key, batch)
        rule = selection_rule(config.selection)

        def run(params, state, made=made, batch=batch, rule=rule):
            outputs = made.apply(params, state, batch, rule, "dense", key)
            ((name, site), *_) = outputs.sites.items()
            rows = site.features.reshape(-1, *site.features.shape[-2:])  # with an axis of layers
            return made.scores(params, state, name, rows, batch)

        jax.eval_shape(run, params, state)
        assert heard == {"step", "steps", *needs} - ({"token_id"} if batch is samples else set())


@pytest.mark.parametrize("name", ["linear", "mlp", "conv", "cosine"])
def test_eight_experts_are_a_prefix_of_sixteen(name):
    few, many = (ROUTERS[name].make(node(), n).init(jax.random.key(3), X)["params"] for n in (8, 16))
    np.testing.assert_array_equal(few["kernel"], many["kernel"][:, :8])


def test_linear_is_x_times_w_without_bias():
    kernel = jnp.array([[1.0, 2.0], [0.0, -1.0]])
    scores = ProductRouter(2, Flat()).apply({"params": {"kernel": kernel}}, jnp.array([[3.0, 4.0]]))
    assert scores.tolist() == [[3.0, 2.0]]  # 3*1+4*0, 3*2-4*1


def test_mlp_of_depth_1_is_linear():
    variables = ROUTERS["linear"].make(node(), 4).init(jax.random.key(0), X)
    shallow = ROUTERS["mlp"].make(node(**{"router.depth": 1}), 4)
    np.testing.assert_array_equal(shallow.apply(variables, X), X @ variables["params"]["kernel"])
    assert "hidden" not in str(jax.tree.map(jnp.shape, shallow.init(jax.random.key(0), X)))


def test_windows_sum_positions():
    """Patches [T, P, D]: h = sum_p <theta, x_p> (Chen et al.). Images: windows apart, against a convolution."""
    patches = jnp.array([[[1.0, 2.0], [3.0, 4.0]]])
    assert Windows(1).apply({}, patches).tolist() == [[4.0, 6.0]]
    assert Windows(2).apply({}, jnp.array([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[4.0, 6.0]]  # 1+3, 2+4
    image, kernel = (
        jax.random.normal(jax.random.key(0), (3, 8, 8, 2)),
        jax.random.normal(jax.random.key(1), (4, 4, 2, 5)),
    )
    convolved = jax.lax.conv_general_dilated(
        image, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ).sum((1, 2))
    np.testing.assert_allclose(Windows(4).apply({}, image) @ kernel.reshape(32, 5), convolved, atol=1e-4)
    with pytest.raises(ValueError, match=r"router.window=3 does not divide"):
        Windows(3).apply({}, image)


def test_cosine_ignores_norms_and_divides_by_its_temperature():
    """Token (3, 4), embeddings (1, 0) and (0, 2): cosines .6 and .8, over temperature 1/2: 1.2 and 1.6."""
    kernel, double = jnp.array([[1.0, 0.0], [0.0, 2.0]]), {"log_scale": jnp.log(2.0)}
    router = CosineRouter(2, Flat())
    x = jnp.array([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]])
    scores = router.apply({"params": {"kernel": kernel} | double}, x)
    np.testing.assert_allclose(scores, [[1.2, 1.6], [1.2, 1.6], [0, 0]], rtol=1e-6)
    fresh = router.init(jax.random.key(0), x)["params"]["log_scale"]
    assert float(jnp.exp(-fresh)) == pytest.approx(0.07)


def test_oracle_sends_cluster_c_to_expert_c_mod_e():
    scores = OracleRouter(3).apply({}, jnp.zeros((4, 2)), cluster=jnp.array([0, 1, 2, 5]))
    assert scores.argmax(-1).tolist() == [0, 1, 2, 2]
    np.testing.assert_array_equal(jax.nn.softmax(scores).max(-1), 1.0)


def test_an_oracle_of_the_second_digit_knows_the_other_label():
    """In base 3: 1 = 01, 5 = 12, 7 = 21, 10 = 101, whose second digit from the end is 0 once the third wraps round."""
    scores = OracleRouter(3, digit=1).apply({}, jnp.zeros((4, 2)), cluster=jnp.array([1, 5, 7, 10]))
    assert scores.argmax(1).tolist() == [0, 1, 2, 0]


def test_an_oracle_with_two_choices_shares_the_experts_out_in_pairs():
    scores = OracleRouter(6, 2).apply({}, jnp.zeros((4, 2)), cluster=jnp.array([0, 1, 2, 3]))
    assert [np.flatnonzero(row).tolist() for row in np.asarray(scores)] == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_hash_depends_on_signs_only():
    variables = {"params": {"planes": jnp.eye(2)}}  # bits are the signs of the two inputs
    x = jnp.array([[1.0, 1.0], [9.0, 0.1], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    buckets = HashRouter(4).apply(variables, x).argmax(-1)
    assert buckets.tolist() == [3, 3, 1, 2, 0]  # 1*first + 2*second


def test_hash_of_token_ids_is_balanced_and_ignores_the_input():
    router, ids = HashIdRouter(4, vocabulary=10), jnp.arange(10)
    variables = router.init(jax.random.key(0), jnp.zeros((10, 2)), token_id=ids)
    expert = router.apply(variables, jnp.zeros((10, 2)), token_id=ids).argmax(1)
    assert sorted(np.bincount(expert)) == [2, 2, 3, 3]
    again = router.apply(variables, jnp.ones((10, 2)), token_id=ids[::-1]).argmax(1)
    assert again.tolist() == expert[::-1].tolist()


@pytest.mark.parametrize("decay", ["optimizer.weight_decay", "optimizer.l2"])
def test_a_table_does_not_decay(decay):
    """Entry 5, so expert 4, would be 5 - .1 x .1 x 5 = 4.95 after a step; alone it becomes 4 - .1 x .1 x 4 = 3.96."""
    rates = {"router.learning_rate": 0.1, "experts.learning_rate": 0.1}
    config = override(base(), {"router.name": "hash_id", decay: 0.1} | rates)
    params = {"router": {"table": jnp.array([[5.0]])}, "experts": {"value": jnp.array([4.0])}}
    transform = optimiser(node_of(config), params, router_decays=ROUTERS["hash_id"].learns)
    moved, _ = update(transform, params, jax.tree.map(jnp.zeros_like, params), transform.init(params), False)
    assert moved["router"]["table"].tolist() == [[5.0]]
    assert float(moved["experts"]["value"][0]) == pytest.approx(3.96)
    scores = HashIdRouter(8, vocabulary=1).apply({"params": moved["router"]}, X[:1], token_id=jnp.array([0]))
    assert scores.argmax(1).tolist() == [5]


def test_the_experts_of_a_token_id_are_any_and_share_out_the_ids():
    """64 ids, 8 experts, 3 each: each expert is the first, the second and the third of 8 ids; all 28 pairs can meet."""
    router, ids = HashIdRouter(8, vocabulary=64, choices=3), jnp.arange(64)
    table = np.asarray(router.init(jax.random.key(0), jnp.zeros((64, 2)), token_id=ids)["params"]["table"]).astype(int)
    assert all(len(set(row)) == 3 for row in table)
    for column in table.T:
        assert np.bincount(column).tolist() == [8] * 8
    met = {pair for row in table for pair in itertools.combinations(sorted(row), 2)}
    assert len(met) > 24  # of neighbours only, as once: 16


def test_a_balanced_table_shares_out_occurrences():
    """Ids by count 5, 4, 3, 2 to two experts, one each: 5 | 4, then 3 joins 4, then 2 joins 5: loads 7 and 7."""
    table = balanced_table(np.array([2, 5, 3, 4]), 2, 1)
    assert table[:, 0].tolist() == [0, 0, 1, 1]
    counts = np.full(27, 5)
    tables = [balanced_table(counts, 8, 2, seed) for seed in (0, 0, 1)]
    assert (tables[0] == tables[1]).all() and (tables[0] != tables[2]).any()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(4, 2), (16, 2), (16, 3), (32, 1)]), st.floats(0.3, 0.95), st.integers(0, 99))
def test_a_balanced_table_is_balanced_and_no_two_experts_belong_together(size, power, seed):
    """Zipf counts of 2,048 ids. No expert has over 1 % more than its share, unless a single id is more than that.

    2,048 random pairs of 16 experts are all 120 that there are, but for some 120 (119 / 120)^2048 = 4e-6. A table that
    takes the k experts with least load has 8 of them.
    """
    (experts, k), random = size, np.random.default_rng(seed)
    counts = random.permutation(1e5 / np.arange(1, 2049) ** power).astype(int)
    table = balanced_table(counts, experts, k, seed).astype(int)
    assert all(len(set(row)) == k for row in table)
    load = np.bincount(table.reshape(-1), weights=np.repeat(counts, k), minlength=experts)
    assert load.max() <= max(1.01 * load.mean(), counts.max())
    np.testing.assert_array_equal(table, balanced_table(counts, experts, k, seed))
    if k > 1:
        assert (table != balanced_table(counts, experts, k, seed + 1)).any()
        met = {pair for row in table for pair in itertools.combinations(sorted(row), 2)}
        assert len(met) > 0.9 * math.comb(experts, 2)


def test_the_hash_of_a_bigram_by_hand():
    """In NumPy: the experts of the highest hashes of the pair; another token before has others, and all have tokens."""
    router, random = HashBigramRouter(8, 2), np.random.default_rng(0)
    token, before = random.integers(0, 300, (2, 4000))
    context = {"token_id": jnp.array(token), "previous_id": jnp.array(before)}
    variables = router.init(jax.random.key(3), jnp.zeros((4000, 1)), **context)
    scores = router.apply(variables, jnp.zeros((4000, 1)), **context)

    def mix(a):
        a = (a ^ (a >> 16)) * np.uint32(0x85EBCA6B)
        a = (a ^ (a >> 13)) * np.uint32(0xC2B2AE35)
        return a ^ (a >> 16)

    salt = np.uint32(variables["params"]["salt"])
    pair = mix(mix(token.astype(np.uint32) + salt) + before.astype(np.uint32))
    hashes = mix(pair[:, None] + mix(np.arange(1, 9, dtype=np.uint32))[None])
    chosen = np.argsort(-(hashes >> 8).astype(int), axis=1, kind="stable")[:, :2]
    np.testing.assert_array_equal(np.sort(np.argsort(-scores, axis=1)[:, :2]), np.sort(chosen))
    assert (np.bincount(chosen.ravel(), minlength=8) / 8000 * 8 - 1).max() < 0.1
    pairs = {}
    for expert, *pair in zip(chosen[:, 0], token, before, strict=True):
        assert pairs.setdefault(tuple(pair), expert) == expert
    of_token = {t: {e for (first, _), e in pairs.items() if first == t} for t in range(300)}
    assert np.mean([len(experts) for experts in of_token.values()]) > 4  # by the token alone it would be 1


@pytest.mark.parametrize("measure", ["distance", "direction"])
def test_online_k_means_by_hand(measure):
    """Three steps in NumPy, on tokens of two places: centres start at tokens, then follow counts that decay."""
    router, decay = OnlineKMeansRouter(3, 0.5, measure), 0.5
    x = np.random.default_rng(1).normal(size=(3, 12, 4)) + np.repeat([[4.0], [-4.0]], 6, 0)
    variables = router.init(jax.random.key(0), jnp.array(x[0]))
    centres, counts = np.array(variables["centres"]["centres"]), np.zeros(3)
    for batch in x.astype(np.float32):
        scores, variables = router.apply(variables, jnp.array(batch), mutable=["centres"])
        tokens = batch if measure == "distance" else batch / np.linalg.norm(batch, axis=1)[:, None]

        def closeness(centres, tokens=tokens):
            if measure == "distance":
                return tokens @ centres.T - (centres**2).sum(1) / 2
            return tokens @ (centres / np.linalg.norm(centres, axis=1)[:, None]).T / 0.07

        np.testing.assert_allclose(scores, closeness(centres), rtol=1e-4, atol=1e-4)
        start = np.where(counts[:, None] < 0.01, tokens[[0, 4, 8]], centres)
        member = np.eye(3)[closeness(start).argmax(1)]
        before = decay * np.where(counts < 0.01, 0, counts)
        counts = before + member.sum(0)
        means = (before[:, None] * start + member.T @ tokens) / np.maximum(counts, 1e-9)[:, None]
        centres = np.where(counts[:, None] > 0, means, start)
        np.testing.assert_allclose(variables["centres"]["centres"], centres, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(variables["centres"]["counts"], counts, rtol=1e-5)
    same = router.apply(variables, jnp.array(x[0]))  # as in an evaluation: nothing moves
    assert same.shape == (12, 3) and counts.max() > 3


def test_self_routing_reads_the_token_and_refuses_too_narrow_ones():
    np.testing.assert_array_equal(SelfRouter(3).apply({}, X), X[:, :3])
    with pytest.raises(UserError, match="scores 8 experts by as many numbers of a token, which has 4"):
        SelfRouter(8).apply({}, X)


def test_random_draws_anew_only_with_its_stream():
    router = RandomRouter(4)
    draws = [router.apply({}, X, rngs={"noise": jax.random.key(k)}) for k in (0, 1)]
    assert not np.allclose(*draws)
    np.testing.assert_array_equal(router.apply({}, X[2:4]), router.apply({}, X)[2:4])  # whatever the batch


@pytest.mark.parametrize(
    ("kind", "mean", "spread"),
    [("uniform", 1.0, 2 / 12**0.5), ("gaussian", 0.0, 2.0), ("learned", 0.0, np.log(2))],  # softplus(0) = ln 2
)
def test_noise(kind, mean, spread):
    x = jnp.ones((5000, 2))
    noise = ScoreNoise(NOISES[kind].draw, 2.0, 3, NOISES[kind].learned)
    variables = noise.init({"params": jax.random.key(0), "noise": jax.random.key(1)}, x)
    drawn = noise.apply(variables, x, rngs={"noise": jax.random.key(2)})
    assert float(drawn.mean()) == pytest.approx(mean, abs=0.06)
    assert float(drawn.std()) == pytest.approx(spread, rel=0.05)
    if kind == "uniform":
        assert float(drawn.min()) >= 0 and float(drawn.max()) <= 2
    assert not noise.apply(variables, x).any()  # evaluation
    assert bool(jax.tree.leaves(variables)) is (kind == "learned")


def test_noise_that_only_chooses_cannot_be_learned():
    learned = override(base(), {"router.noise": "learned", "router.noise_in_weights": True})
    NOISES["learned"].check(learned)
    with pytest.raises(UserError, match=r"router\.noise_in_weights=False: the noise would not learn"):
        NOISES["learned"].check(override(learned, {"router.noise_in_weights": False}))


def initial(name, router, params, x, **changes):
    """The initial parameters that settings of the node `router` ask for."""
    return initial_parameters(ROUTERS[name], router, params, x, node(**{f"router.{k}": v for k, v in changes.items()}))


@pytest.mark.parametrize("name", ["linear", "mlp", "conv", "cosine"])
def test_initial_weights_are_scaled_or_examples(name):
    router, x = ROUTERS[name].make(node(), 4), jax.random.normal(jax.random.key(1), (50, 4))
    params = router.init(jax.random.key(0), x)["params"]
    chex.assert_trees_all_equal(initial(name, router, params, x[:4]), params)
    scores, halved = (router.apply({"params": initial(name, router, params, x[:4], init_scale=s)}, x) for s in (1, 0.5))
    np.testing.assert_allclose(halved, scores * 0.5, rtol=1e-5, atol=1e-7)
    assert not router.apply({"params": initial(name, router, params, x[:4], init_scale=0.0)}, x).any()
    informed = initial(name, router, params, x[:4], init_from_data=True, init_scale=0.5)
    features = router.features.clone(parent=None).apply({"params": params.get("features", {})}, x[:4])
    np.testing.assert_array_equal(informed["kernel"], features.T)
    chex.assert_trees_all_equal(informed, initial(name, router, params, x[:4], init_from_data=True, init_scale=1.0))


@pytest.mark.parametrize("name", [name for name, router in ROUTERS.items() if router.learns])
def test_the_sharpness_of_any_router_gives_the_entropy_asked_for(name):
    """1.2 nats is softer than some fresh routers, .3 sharper than any. NaN gives a NaN sharpness; 0 asks for none."""
    router, x = ROUTERS[name].make(node(), 4), jax.random.normal(jax.random.key(1), (50, 4))
    ids = {"token_id": jnp.arange(50) % 7} if "token_id" in ROUTERS[name].needs else {}
    scores = jax.jit(lambda: router.apply(router.init(jax.random.key(0), x, **ids), x, **ids))()
    for entropy in (0.3, 1.2):
        probs = jax.nn.softmax(scores * sharpness_of(scores, jnp.float32(entropy)))
        assert float(-jax.scipy.special.xlogy(probs, probs).sum(-1).mean()) == pytest.approx(entropy, abs=1e-3)
    assert sharpness_of(scores, jnp.float32(0)) == 1 and jnp.isnan(sharpness_of(scores, jnp.float32(jnp.nan)))


class Annealed(nn.Module):
    experts: int

    @nn.compact
    def __call__(self, x, *, step, steps, **context):
        assert not context
        return nn.Dense(self.experts)(x) * (1 + step / steps)


def test_a_router_knows_how_many_steps_there_will_be(monkeypatch):
    """Without asking, in a run as in a card; who asks is told so."""
    monkeypatch.setitem(ROUTERS, "annealed", Router(lambda own, experts: Annealed(experts)))
    config = override(base(), {"router.name": "annealed", "steps": 50, "experts.count": 4})
    init, apply = suite.scores_of(config, 4)
    x = jnp.ones((3, 4))
    variables, model = init(jax.random.key(0), x), single_layer(config)
    batch = Batch(x, jnp.zeros((3, config.data.target_dim)), jnp.zeros(3, int))
    params, state = {"router": variables["params"]}, {}
    last = model.scores(params, state, "layer", x[None], batch, 50)[0]
    np.testing.assert_allclose(last, 2 * apply(variables, x), rtol=1e-6)
    monkeypatch.setitem(ROUTERS, "annealed", ROUTERS["annealed"]._replace(reads=("steps",)))
    with pytest.raises(UserError, match="a call gets 'steps' in its context, without being asked"):
        canonical(config)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 1.3), st.integers(0, 1000))
def test_sharpness_reaches_any_entropy_between_zero_and_uniform(entropy, seed):
    scores = jax.random.normal(jax.random.key(seed), (30, 4))  # entropy 0 .. log 4 = 1.386
    probs = jax.nn.softmax(sharpness_for(scores, jnp.float32(entropy)) * scores)
    assert float(-jax.scipy.special.xlogy(probs, probs).sum(-1).mean()) == pytest.approx(entropy, abs=2e-3)


def test_factors_of_jitter_lie_evenly_around_1():
    """10,000 of [.7, 1.3]: mean 1, deviation .6 / sqrt 12 = .173."""
    factors = np.asarray(jitter(jax.random.key(0), jnp.ones((100, 100), jnp.bfloat16), 0.3))
    assert len(np.unique(factors)) > 4000  # bfloat16 has 130 numbers there
    assert 0.7 <= factors.min() < 0.71 and 1.29 < factors.max() <= 1.3
    assert factors.mean() == pytest.approx(1, abs=0.01) and factors.std() == pytest.approx(0.173, abs=0.005)
