"""Every dispatch against the dense oracle, values and gradients; then each one's own promises."""

import functools
from functools import partial
from itertools import pairwise

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed.bench.dispatch import flops_of, refuse_dense
from routed.contracts import Queues, UserError
from routed.experts import EXPERTS
from routed.experts.activations import ACTIVATIONS
from routed.experts.cnn import Cnn
from routed.experts.constant import Constant
from routed.experts.ffn import Ffn
from routed.experts.mlp import Linear, Mlp, mlp_parameters, width_for
from routed.kernels import comparisons, megablox
from routed.kernels.grouped import grouped, product
from routed.kernels.matmul import FEW, matmul
from routed.kernels.ragged import blocks, sorted_outputs
from routed.layer import dispatch
from routed.layer.dispatch import direct, ragged, slots
from routed.layer.rule import SelectionRule
from routed.layer.selection import SELECTIONS, capacity, select
from routed.papers.chowdhury2023.patch_moe import Neurons


def run_grouped(expert, params, x, routing, places=None):
    """`ragged` as TPUs and GPUs run it."""
    return sorted_outputs(expert, params, x, routing, grouped).combined(routing.weight, len(x))


SPARSE = {"gather": direct.gather, "slots": slots, "ragged": ragged, "grouped": run_grouped}


def stacked(expert, count, x, key=0):
    """`count` experts: their function and parameters."""
    keys = jax.random.split(jax.random.key(key), count)
    init = jax.jit(jax.vmap(lambda k: expert.init(k, x[:1]).get("params", {})))
    return lambda p, tokens: expert.apply({"params": p}, tokens), init(keys)


@partial(jax.jit, static_argnums=(0, 1, 2))
def value_and_grads(run, rule, function, params, x, scores, mask=None):
    """y, and the gradients of |y - 1|^2 with respect to weights, tokens and scores."""
    size = rule.group_size or len(x)
    places = Queues(size, capacity(rule, size, scores.shape[1]))

    def loss(params, x, scores):
        y = run(function, params, x, select(rule, scores, mask=mask), places)
        return ((y.astype(jnp.float32) - 1) ** 2).sum(), y

    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(params, x, scores)
    return y, grads


def same(a, b, tolerance):
    jax.tree.map(
        lambda p, q: np.testing.assert_allclose(
            np.asarray(p, np.float32), np.asarray(q, np.float32), rtol=tolerance, atol=tolerance
        ),
        a, b,
    )  # fmt: skip


CASES = {  # rule, tokens, experts
    "top-1": (SelectionRule(), 37, 5),
    "top-2 renormalised": (SelectionRule(k=2, renormalise=True), 13, 4),
    "k = E": (SelectionRule(k=3), 7, 3),
    "one token": (SelectionRule(), 1, 4),
    "more experts than tokens": (SelectionRule(k=2), 3, 9),
    "one expert": (SelectionRule(), 5, 1),
    "drops": (SelectionRule(k=2, capacity_factor=0.6), 16, 4),
    "drops by score, in groups": (SelectionRule(k=2, capacity_factor=0.6, priority="score", group_size=8), 24, 4),
    "sigmoid": (SelectionRule("sigmoid", k=2, renormalise=True), 9, 4),
    "sinkhorn": (SelectionRule("sinkhorn"), 12, 4),
    "expert choice": (SelectionRule("expert_choice", k=2, group_size=8), 16, 4),
    "patches, gates 1": (SelectionRule("patch_choice", patches=3, patch_weights="one", group_size=6), 18, 4),
    "patches, gates over the chosen": (SelectionRule("patch_choice", patches=2, group_size=6), 18, 4),
    "patches, gates over all": (SelectionRule("patch_choice", patches=5, patch_weights="all", group_size=6), 18, 4),
    "all patches": (SelectionRule("patch_choice", patches=6, group_size=6), 12, 3),
}


@functools.lru_cache  # what tests of several dispatches compare with, here and below
def dense_of_case(case, dtype):
    """Rule, experts and inputs of a case, and what is expected of it."""
    rule, tokens, experts = CASES[case]
    x = jax.random.normal(jax.random.key(0), (tokens, 6))
    scores = jax.random.normal(jax.random.key(1), (tokens, experts))
    function, params = stacked(Mlp(3, 2, 5), experts, x)
    x, params = jax.tree.map(lambda a: a.astype(dtype), (x, params))
    given = rule, function, params, x, scores
    return given, value_and_grads(direct.dense, *given)


#: In bfloat16 products round otherwise, and routing is the same: weights that are shared, places that are lost, groups.
HALF = ("top-2 renormalised", "drops", "expert choice")


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, jnp.float32) for case in CASES), *((case, jnp.bfloat16) for case in HALF)]
)
def test_every_dispatch_is_dense(name, case, dtype):
    given, expected = dense_of_case(case, dtype)
    found = value_and_grads(SPARSE[name], *given)
    assert found[0].dtype == expected[0].dtype == dtype
    same(found, expected, 1e-4 if dtype == jnp.float32 else 0.15)


@functools.lru_cache
def gated():
    """Five experts of an extreme load."""
    return stacked(Ffn(3, 5, gated=True), 5, jnp.ones((1, 4)))


@functools.lru_cache
def dense_of_load(case, rule):
    """Experts and inputs of an extreme load, and what is expected of them."""
    x = jax.random.normal(jax.random.key(0), (40, 4))
    scores = jnp.zeros((40, 5)) if case == "ties" else jnp.tile(jnp.array([[0.0, 0, 9, 0, 1]]), (40, 1))
    mask = {"padding": jnp.arange(40) % 3 > 0, "all padding": jnp.zeros(40, bool)}.get(case)
    given = rule, *gated(), x, scores, mask
    return given, value_and_grads(direct.dense, *given)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("case", ["ties", "all on one", "padding", "all padding"])
def test_extreme_loads(name, case):
    for rule in (SelectionRule(), SelectionRule(k=2, capacity_factor=1.25)):
        given, expected = dense_of_load(case, rule)
        found = value_and_grads(SPARSE[name], *given)
        same(found, expected, 1e-4)
        if (mask := given[-1]) is not None:
            assert not found[0][~mask].any()


#: Whole networks for images go through every dispatch in tests/test_networks.py.
NETWORKS = ("conv_net", "mobilenet_v2", "resnet18")
KINDS = {
    "constant": Constant(2), "linear": Linear(2), "mlp": Mlp(2, 3, 5, "cubic"), "ffn": Ffn(2, 5, "gelu"),
    "gated_ffn": Ffn(2, 5, "silu", gated=True), "cnn": Cnn(2, 3), "neurons": Neurons(2, 5, 0.5),
}  # fmt: skip


@functools.lru_cache
def dense_of_kind(kind):
    """Experts of a kind with inputs, and what is expected of them."""
    x = jax.random.normal(jax.random.key(0), (11, 3, 4) if kind == "cnn" else (11, 4))
    scores = jax.random.normal(jax.random.key(1), (11, 3))
    given = SelectionRule(k=2), *stacked(KINDS[kind], 3, x), x, scores
    return given, value_and_grads(direct.dense, *given)


@pytest.mark.parametrize("name", ["slots", "ragged", "grouped", "gather"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_expert_through_every_dispatch(name, kind):
    assert set(KINDS) | set(NETWORKS) == set(EXPERTS)
    if (name, kind) == ("grouped", "constant"):
        return  # refused by name, below
    given, expected = dense_of_kind(kind)
    same(value_and_grads(SPARSE[name], *given), expected, 2e-4)


@pytest.mark.parametrize(("experts", "is_dense"), [(12, True), (13, False)])
def test_weights_are_not_gathered_on_a_tpu_where_reading_all_is_cheaper(experts, is_dense, monkeypatch):
    """4 assignments read, write and read 12 experts' weights."""
    monkeypatch.setattr(comparisons, "platform", lambda: "tpu")
    x = jnp.ones((4, 6))
    function, params = stacked(Mlp(3, 2, 5), experts, x)
    routing = select(SelectionRule(), jax.random.normal(jax.random.key(1), (4, experts)))
    programs = [
        str(jax.make_jaxpr(lambda x, run=run: run(function, params, x, routing))(x))
        for run in (direct.gather, direct.dense)
    ]
    assert (programs[0] == programs[1]) == is_dense


@functools.lru_cache
def experts_of_seeds(seeds):
    """The function of five experts, and their parameters for each seed."""
    function, _ = stacked(Mlp(2, 2, 3), 5, jnp.ones((1, 4)))
    return function, jax.vmap(lambda k: stacked(Mlp(2, 2, 3), 5, jnp.ones((1, 4)), k)[1])(jnp.arange(seeds))


@pytest.mark.parametrize("name", ["slots", "ragged", "grouped"])
@pytest.mark.parametrize("shared", ["nothing", "tokens", "scores", "weights"])
def test_a_batch_of_seeds_equals_a_loop(name, shared):
    """Whatever the seeds share, which is where ragged_dot alone raises or goes wrong."""
    seeds, x = 3, jax.random.normal(jax.random.key(0), (3, 12, 4))
    scores = jax.random.normal(jax.random.key(1), (3, 12, 5))
    function, params = experts_of_seeds(seeds)
    arguments = {"weights": params, "tokens": x, "scores": scores}
    axes = {key: None if key == shared else 0 for key in arguments}
    arguments |= {shared: jax.tree.map(lambda a: a[0], arguments[shared])} if shared != "nothing" else {}

    def one(a):
        rule = SelectionRule(k=2, capacity_factor=0.8)  # dropped assignments belong to no expert, and to no other seed
        return value_and_grads(SPARSE[name], rule, function, a["weights"], a["tokens"], a["scores"])

    batched = jax.jit(jax.vmap(one, in_axes=(axes,)))(arguments)
    for seed in range(seeds):
        pick = lambda a, s=seed: jax.tree.map(lambda b: b[s], a)  # noqa: E731
        mine = {k: a if axes[k] is None else pick(a) for k, a in arguments.items()}
        same(pick(batched), one(mine), 1e-4)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 100))
def test_grouped_product_is_a_loop_over_experts(sizes, seed):
    rows = jax.random.normal(jax.random.key(seed), (sum(sizes), 3))
    weights = jax.random.normal(jax.random.key(seed + 1), (len(sizes), 3, 2))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    expected = jnp.einsum("ak,akn->an", rows, weights[owner])
    if sum(sizes):
        np.testing.assert_allclose(product(rows, weights, jnp.array(sizes)), expected, atol=1e-5)


def test_a_dropped_output_may_be_anything():
    """A dropped assignment whose expert gives NaN harms nobody."""
    x, scores = jnp.ones((2, 1)), jnp.array([[1.0, 0.0], [1.0, 0.0]])
    routing = select(SelectionRule(capacity_factor=1.0), scores)  # one place: token 1 is dropped
    y = direct.combine(routing, jnp.array([[2.0], [jnp.nan]]), 2)
    assert y.tolist() == [[float(routing.weight[0]) * 2], [0.0]] and bool(jnp.isfinite(y).all()) and len(x) == 2


def test_unsupported_pairs_are_refused_by_name():
    for name in ("gather", "slots", "ragged"):
        assert f"dispatch {name!r} needs a sparse selection" in dispatch.reason_against(name, "soft")
        assert all(dispatch.reason_against(name, s) is None for s in SELECTIONS if s != "soft")
    assert dispatch.reason_against("dense", "soft") is None
    x = jnp.ones((4, 2))
    with pytest.raises(TypeError, match=r"nn\.Dense layers; Constant has its own: value"):
        run_grouped(*stacked(Constant(2), 2, x), x, select(SelectionRule(), jnp.zeros((4, 2))))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("soft", 64, 1, 8, True), "dense"),
        (("top_k", 4, 2, 64, True), "gather"),
        (("top_k", 64, 2, 8, True), "ragged"),
        (("top_k", 64, 2, 8, False), "slots"),
        (("expert_choice", 64, 2, 8, True), "slots"),
        (("relu", 64, 1, 8, False), "ragged"),  # which has places for all, whatever the capacity
        (("relu", 4, 1, 8, True), "ragged"),  # 4 x 8 assignments, not 4 x 1
    ],
)
def test_auto(arguments, name):
    chosen, reason = dispatch.choose(*arguments, "cpu")
    assert chosen == name and reason


def test_gradients_of_many_blocks_are_summed_in_float32():
    """Three blocks of 8 rows give 8 x 32 = 256, 1 and 1. In bfloat16 256 + 1 is 256 again, and 258 is exact."""
    rows = jnp.zeros((24, 1), jnp.bfloat16).at[:8].set(32).at[jnp.array([8, 16])].set(1)
    params = {"scale": jnp.ones((3, 1), jnp.bfloat16)}

    def total(params):
        outputs = blocks(lambda own, x: x * own["scale"][None], params, rows, jnp.array([24, 0, 0]))
        return outputs.astype(jnp.float32).sum()

    gradient = jax.grad(total)(params)["scale"]
    assert gradient.dtype == jnp.bfloat16 and gradient.astype(jnp.float32).tolist() == [[258.0], [0.0], [0.0]]


class Factored(nn.Module):
    """x (A B), whose product of weights has as many rows as a block."""

    @nn.compact
    def __call__(self, x):
        a, b = (self.param(name, nn.initializers.lecun_normal(), (8, 8)) for name in "ab")
        return nn.relu(x @ (a @ b))


@pytest.mark.parametrize(
    ("expert", "products"), [(Mlp(8, 2, 8), 6), (Mlp(8, 3, 8), 9), (Ffn(8, 8, gated=True), 9), (Factored(), 8)]
)
def test_no_product_of_a_block_is_computed_twice(expert, products):
    """Blocks of 8 rows by weights of 8 x 8: each product has one forward and two back, and is that of its expert.

    What is no row for each row, as a product of weights, is not kept: both products of `Factored` are made again.
    """
    rows, sizes = jax.random.normal(jax.random.key(1), (24, 8)), (3, 8, 0, 13)
    function, params = stacked(expert, 4, rows)

    def by_blocks(params, rows):
        return (blocks(function, params, rows, jnp.array(sizes)) ** 2).sum()

    def by_expert(params, rows):
        outputs, ends = [], np.cumsum(sizes)
        for e, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            if size:
                outputs.append(function(jax.tree.map(lambda leaf, e=e: leaf[e], params), rows[end - size : end]))
        return (jnp.concatenate(outputs) ** 2).sum()

    compiled = jax.jit(jax.grad(by_blocks, argnums=(0, 1))).lower(params, rows).compile()
    assert compiled.as_text().count(" dot(") == products
    same(compiled(params, rows), jax.grad(by_expert, argnums=(0, 1))(params, rows), 1e-5)


def test_a_dense_program_is_refused_by_name():
    """16 rows in two of four experts: 2 x 16 x 8 x 8 FLOPs a product; the CPU's ragged_dot makes four times as many."""
    case = {"tokens": 16, "k": 1, "dim": 8, "hidden": 8, "experts": 4}
    rows, weights, sizes = jnp.ones((16, 8)), jnp.ones((4, 8, 8)), jnp.array([5, 11, 0, 0])

    def step(rows, weights):  # two layers of an expert, forward and back
        return jax.grad(lambda w: product(product(rows, w, sizes), w, sizes).sum())(weights)

    with pytest.raises(UserError, match=r"dispatch 'ragged' is dense on this platform \(cpu\): .* times the FLOPs"):
        refuse_dense("ragged", jax.jit(step).lower(rows, weights).compile(), flops_of(case))
    by_expert = jax.jit(lambda rows, weights: (rows @ weights[0]) @ weights[1]).lower(rows, weights).compile()
    refuse_dense("ragged", by_expert, flops_of(case))


@pytest.mark.parametrize("sizes", [(3, 5, 2), (0, 10, 0), (10, 0, 0), (1, 0, 9)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_of_a_tpu_are_the_products_of_each_expert(sizes, dtype):
    """Interpreted; rows, K and N are no multiples of their blocks."""
    key = jax.random.split(jax.random.key(0), 4)
    rows, other = jax.random.normal(key[0], (10, 24), dtype), jax.random.normal(key[1], (10, 40), dtype)
    weights, back = jax.random.normal(key[2], (3, 24, 40), dtype), jax.random.normal(key[3], (3, 40, 24), dtype)
    shipped = megablox._megablox()
    gmm, tgmm = partial(shipped.gmm, interpret=True), partial(shipped.tgmm, interpret=True)
    groups, close = (
        jnp.array(sizes, jnp.int32),
        {"rtol": 2e-2, "atol": 2e-2} if dtype == jnp.bfloat16 else {"rtol": 1e-5, "atol": 1e-5},
    )
    expected = jax.lax.ragged_dot(rows, weights, groups)
    made = megablox._product(gmm, rows, weights, groups, False)
    assert made.dtype == dtype
    np.testing.assert_allclose(made.astype(float), expected.astype(float), **close)
    np.testing.assert_allclose(
        megablox._product(gmm, rows, back, groups, True).astype(float),
        jax.lax.ragged_dot(rows, back.swapaxes(1, 2), groups).astype(float),
        **close,
    )
    ends = np.cumsum((0, *sizes))
    outers = [rows[a:b].astype(jnp.float32).T @ other[a:b].astype(jnp.float32) for a, b in pairwise(ends)]
    np.testing.assert_allclose(megablox._outer(tgmm, rows, other, groups).astype(float), np.stack(outers), **close)


def test_blocks_of_a_kernel_fit_on_the_chip():
    """512 rows an expert: blocks of a quarter.

    Twice (128 x 2048 + 2048 x N + 128 x N) x 2 bytes and 128 x N x 4 are 19.5 MiB at N = 2,048, 10 MiB at 1,024.
    """
    assert megablox.tiles(32768, 64, 2048, 4096, 2) == (128, 2048, 1024)
    assert megablox.tiles(10, 3, 24, 40, 4) == (128, 24, 40)
    assert megablox.tiles(65536, 8, 24, 64, 4)[0] == 512


def test_cnn_by_hand():
    """One filter (1, 2), patches (1, 0) and (0, 1): 1^3 + 2^3 = 9."""
    x = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
    params = {"Dense_0": {"kernel": jnp.array([[1.0], [2.0]])}}
    assert Cnn(1, 1).apply({"params": params}, x).tolist() == [[9.0]]
    assert float(ACTIVATIONS["cubic"](jnp.float32(-2))) == -8 and float(ACTIVATIONS["linear"](jnp.float32(-2))) == -2


def test_gated_ffn_by_hand():
    """x = 2, in 3, gate -1 with relu(-2) = 0: 0. With gate 1: 2 * 6 * out .5 = 6."""
    apply = lambda gate: Ffn(1, 1, gated=True).apply(  # noqa: E731
        {"params": {n: {"kernel": jnp.array([[w]])} for n, w in (("in", 3.0), ("gate", gate), ("out", 0.5))}},
        jnp.array([[2.0]]),
    )
    assert float(apply(-1.0)[0, 0]) == 0 and float(apply(1.0)[0, 0]) == 6


def test_mlp_parameters_and_width():
    # 3 -> 5 -> 5 -> 2 with biases: 4*5 + 6*5 + 6*2 = 62.
    assert mlp_parameters(3, 2, 3, 5) == 62
    counted = sum(a.size for a in jax.tree.leaves(Mlp(2, 3, 5).init(jax.random.key(0), jnp.ones((1, 3)))))
    assert counted == 62
    assert width_for(62, 3, 2, 3) == 5 and width_for(63, 3, 2, 3) == 5


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("rows", [1, FEW - 1, FEW])
def test_the_derivative_of_a_product_is_that_of_a_product(rows, columns):
    """Few rows, or rows with at most half of 5 columns, take another path back; mapped, as in dispatches."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (3, rows, 5)), jax.random.normal(keys[1], (3, 5, columns))
    steer = jax.random.normal(keys[2], (3, rows, columns))

    def gradients(multiply):
        return jax.grad(lambda x, w: (steer * jax.vmap(multiply)(x, w)).sum(), argnums=(0, 1))(x, w)

    for ours, plain in zip(gradients(matmul), gradients(jnp.matmul), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_the_platform_of_the_mesh_decides_and_not_that_of_the_host():
    """Traced for a TPU, experts run in grouped products; on a host without one, in blocks, one after the other.

    So do experts on a TPU that have parameters outside of `nn.Dense` layers.
    """
    tokens, dense = jnp.ones((8, 3)), {"kernel": jnp.ones((2, 3, 4))}
    routing = select(SelectionRule("top_k", k=1), jnp.ones((8, 2)), preference=jnp.ones((8, 2)))

    def traced(layer: nn.Module, params) -> str:
        expert = lambda params, x: layer.apply({"params": params}, x)  # noqa: E731
        return str(jax.make_jaxpr(lambda x: ragged(expert, params, x, routing))(tokens))

    normed = nn.Sequential([nn.Dense(4, use_bias=False), nn.LayerNorm(use_bias=False)])
    others = {"layers_0": dense, "layers_1": {"scale": jnp.ones((2, 4))}}
    tpu = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("run",), abstract_device=tpu)):
        assert "while[" not in traced(nn.Dense(4, use_bias=False), dense)
        assert "while[" in traced(normed, others)
    assert "while[" in traced(nn.Dense(4, use_bias=False), dense)
