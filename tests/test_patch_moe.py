"""Patch-level mixtures (Chowdhury et al. 2023): a plain oracle for each dispatch, the CNN, columns, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from routed.contracts import Batch, Routing, SoftRouting, UserError
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import gate_rows
from routed.papers.chowdhury2023 import decisive_patches
from routed.papers.chowdhury2023.patch_choice import DecisiveRouter
from routed.plan.checks import validate
from routed.plan.config import canonical
from routed.routers import RandomRouter
from routed.settings.tree import override
from routed.training.samples import cost, experts_per_token
from tests.conftest import build_model
from tests.test_run import train

#: Four patches of five numbers a sample; three experts of two neurons take two patches each.
PATCHES = {
    "data.name": "generated", "data.target": "sign", "data.target_dim": 1, "data.dim": 7, "data.pattern_sets": 4,
    "data.positions": 4, "data.samples": 24, "data.test_samples": 12, "batch_size": 6, "loss": "logistic",
    "model": "patch_moe", "experts.name": "neurons", "experts.count": 3, "experts.width": 2,
    "selection.name": "patch_choice", "selection.patches": 2, "selection.eval.name": "patch_choice",
    "selection.eval.patches": 2, "optimizer.momentum": 0.0, "router.init_scale": 3.0, "mesh.run": 1, "seeds": 1,
    "steps": 2, "eval_every": 1,
}  # fmt: skip


@pytest.fixture
def config(small):
    return override(small, PATCHES)


def made(config, samples=5):
    """The model of a config, its parameters at the start, and random samples of it."""
    model = build_model(canonical(config))
    x = jax.random.normal(jax.random.key(0), (samples, 4, 7))
    y = jnp.where(jnp.arange(samples)[:, None] % 2 == 0, 1.0, -1.0)
    batch = Batch(x, y, jnp.zeros((samples, 4), int))
    params, state = jax.jit(model.init)(jax.random.key(1), batch)
    return model, params, state, batch


def by_hand(params, x, y, each, gate, over):
    """f, and the gradients of sum log(1 + exp(-y f)): sums over samples, experts and their `each` patches.

    With v = 1 / (1 + exp(y f)): dL/dw_r = -y v a_r / l sum_j G_j x_j [<w_r, x_j> >= 0] (their (13)). A softmax gate
    over the patches M has df/dg_j = G_j (h_j - sum_i G_i h_i) / l, h the outputs where patches are chosen and else 0.
    """
    hidden, readout = (
        np.asarray(params[g][n]["kernel"], float) for g, n in (("experts", "hidden"), ("fixed", "readout"))
    )
    router = np.asarray(params["router"]["kernel"], float)
    f, of_hidden, of_router = [], np.zeros_like(hidden), np.zeros_like(router)
    for sample, label in zip(np.asarray(x, float), np.asarray(y)[:, 0], strict=True):
        total, slopes, scores_slopes = 0.0, np.zeros_like(hidden), np.zeros_like(router)
        for s in range(len(hidden)):
            scores = sample @ router[:, s]
            taken = np.argsort(-scores)[:each]
            within = {"chosen": taken, "all": range(len(sample))}.get(gate, [])
            gates = {
                j: {"one": 1.0, "even": 1 / each}[gate]
                if gate in ("one", "even")
                else np.exp(scores[j]) / np.exp(scores[within]).sum()
                for j in taken
            }
            h = {j: np.maximum(sample[j] @ hidden[s], 0) @ readout[s, :, 0] for j in taken}
            mean = sum(gates[j] * h[j] for j in taken)
            total += mean / over
            for j in taken:
                slopes[s] += gates[j] / over * np.outer(sample[j], (sample[j] @ hidden[s] >= 0) * readout[s, :, 0])
            for j in within:
                share = np.exp(scores[j]) / np.exp(scores[within]).sum()
                scores_slopes[:, s] += share * (h.get(j, 0.0) - mean) / over * sample[j]
        f.append(total)
        v = expit(-label * total)
        of_hidden += -label * v * slopes
        of_router += -label * v * scores_slopes
    return np.array(f)[:, None], of_hidden, of_router


@pytest.mark.parametrize("gate", ["one", "even", "chosen", "all"])
@pytest.mark.parametrize("dispatch", ["dense", "gather", "slots", "ragged"])
def test_a_mixture_is_a_loop_over_samples_experts_and_patches(config, dispatch, gate):
    pooling = "all" if dispatch == "slots" else "chosen"
    changes = {
        "selection.patch_weights": gate,
        "dispatch": dispatch,
        "experts.pooling": pooling,
        "selection.no_gradient": True,
    }
    config = override(config, changes)
    model, params, state, batch = made(config)
    rule = selection_rule(config.selection)

    @jax.jit
    def run(params):
        def loss(params):
            outputs = model.apply(params, state, batch, rule, dispatch)
            return jax.nn.softplus(-batch.y * outputs.prediction).sum(), outputs

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, outputs), grads = run(params)
    expected = by_hand(params, batch.x, batch.y, 2, gate, 4 if pooling == "all" else 2)
    found = outputs.prediction, grads["experts"]["hidden"]["kernel"], grads["router"]["kernel"]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not jnp.any(grads["fixed"]["readout"]["kernel"])
    # Only what is chosen is computed: 5 samples, 3 experts, 2 patches.
    routing = outputs.sites["layer"].routing
    assert len(routing.token) == 5 * 3 * 2 and (abs(expected[2]).max() > 1e-3) == (gate in ("chosen", "all"))


@pytest.mark.parametrize("readout", ["normal", "signs"])
def test_the_cnn_is_the_mixture_whose_experts_take_all_patches(config, readout):
    changes = {
        "experts.readout": readout,
        "selection.patches": 4,
        "selection.patch_weights": "one",
        "selection.no_gradient": True,
    }
    mixture = override(config, changes | {"selection.eval.patches": 4})
    model, params, state, batch = made(mixture)
    cnn, own, _, _ = made(override(mixture, {"model": "patch_cnn"}))
    # As many neurons as all experts have, next to each other; 1 / sqrt(6) is the deviation of their weights.
    assert own["experts"]["hidden"]["kernel"].shape == (7, 6) and own["fixed"]["readout"]["kernel"].shape == (6, 1)
    hidden, out = params["experts"]["hidden"]["kernel"], params["fixed"]["readout"]["kernel"]
    same = {
        "experts": {"hidden": {"kernel": jnp.concatenate(list(hidden), 1)}},
        "fixed": {"readout": {"kernel": out.reshape(6, 1)}},
    }
    f = model.apply(params, state, batch, selection_rule(mixture.selection), "dense").prediction
    np.testing.assert_allclose(
        cnn.apply(own | same, {}, batch, SelectionRule(), "dense").prediction, f, rtol=1e-4, atol=1e-6
    )
    if readout == "signs":
        assert out[:, :, 0].tolist() == [[1, 1], [-1, -1], [1, 1]]
        assert own["fixed"]["readout"]["kernel"][:, 0].tolist() == [1, 1, -1, -1, 1, 1]
    else:
        assert abs(out).max() > 0 and len(np.unique(out)) == 6


def test_weights_start_as_the_paper_has_them(config):
    """200 x 50 neurons: N(0, 1 / 10,000), N(0, 1) output weights; the released deviation .1 where it is asked for."""
    many = override(config, {"experts.count": 50, "experts.width": 200})
    for changes, std in (({}, 0.01), ({"experts.init_std": 0.1}, 0.1)):
        params = made(override(many, changes))[1]
        hidden, readout = params["experts"]["hidden"]["kernel"], params["fixed"]["readout"]["kernel"]
        assert float(hidden.std()) == pytest.approx(std, rel=0.02) and float(readout.std()) == pytest.approx(
            1, rel=0.04
        )


def test_columns_by_hand():
    """Two experts take two of three patches of four samples; class 0 is decided at 0, 1, class 1 at 2, 2."""
    cluster = jnp.array([[0, 3, 2], [2, 0, 2], [3, 2, 1], [2, 3, 1]])
    taken = [[[0, 1], [1, 2]], [[2, 1], [1, 0]], [[2, 0], [0, 1]], [[0, 2], [1, 0]]]
    token = (jnp.array(taken) + 3 * jnp.arange(4)[:, None, None]).reshape(-1)
    expert = jnp.tile(jnp.array([0, 0, 1, 1]), 4)
    routing = Routing(jnp.zeros((12, 2)), token, expert, jnp.ones(16), jnp.ones(16, bool), jnp.tile(jnp.arange(2), 8))
    params = {"experts": jnp.ones(20), "fixed": jnp.ones(2), "router": jnp.ones(10)}
    found = {name: float(value) for name, value in decisive_patches.columns(routing, True, cluster, 2, params).items()}
    # Class 0: expert 0 takes it in both samples, first in one; expert 1 in the second, first. Class 1: expert 0 in
    # both, first in one.
    assert found == pytest.approx(
        {
            "patches/hit": 1.0,
            "patches/hit_any": 1.0,
            "patches/router_alone": 0.5,  # equal scores say -1, of half of the samples rightly
            "patches/largest_first": 0.5,
            "patches/largest_second": 0.5,
            "patches/computed": 4.0,
            "patches/flops": 2 * (4 * 11 + 3 * 10),
        }
    )
    # The second expert alone: class 0 in one of two samples, class 1 in none.
    alone = routing._replace(
        scores=jnp.zeros((12, 1)), token=token.reshape(4, 2, 2)[:, 1].reshape(-1), expert=jnp.zeros(8, int)
    )
    found = decisive_patches.columns(alone, True, cluster, 2, params)
    names = ("hit", "hit_any", "largest_first", "largest_second", "computed")
    assert [float(found[f"patches/{name}"]) for name in names] == [0.25, 0.25, 0.5, 0, 2]
    # One network on all patches; every expert on all; a token's own two experts.
    for one, pairs in ((None, 3), (SoftRouting(jnp.zeros((12, 2)), jnp.zeros((12, 2))), 6), (routing, 4)):
        found = decisive_patches.columns(one, False, cluster, 2, params)
        weights = 22 if one is None else 11
        assert list(found) == ["patches/computed", "patches/flops"]
        assert [*map(float, found.values())] == [pairs, 2 * (pairs * weights + 30)]


def test_neurons_that_pick_their_patches(config):
    """Responses of a neuron to four patches: 3, 1, 0, 2 after ReLU; the mean of the largest two is 2.5."""
    cnn = override(config, {"model": "patch_cnn", "experts.top_responses": 2, "experts.count": 1, "experts.width": 1})
    model, params, _, batch = made(cnn, samples=1)
    params["experts"]["hidden"]["kernel"] = jnp.eye(7)[:, :1]
    params["fixed"]["readout"]["kernel"] = jnp.array([[-2.0]])
    batch = batch._replace(x=batch.x.at[0, :, 0].set(jnp.array([3.0, 1, -5, 2])))

    def f(params):
        return model.apply(params, {}, batch, SelectionRule(), "dense").prediction[0, 0]

    assert float(f(params)) == -5.0
    slope = jax.grad(f)(params)["experts"]["hidden"]["kernel"][:, 0]
    np.testing.assert_allclose(slope, -(batch.x[0, 0] + batch.x[0, 3]), rtol=1e-6)


def test_routers_that_know_or_ignore_the_patch(config):
    """The decisive one scores labels 0 and 1 alike for both experts; a random one repeats itself unless anew."""
    cluster, x = jnp.array([3, 1, 0, 2]), jax.random.normal(jax.random.key(0), (4, 7))
    assert DecisiveRouter(2).apply({}, x, cluster=cluster).tolist() == [[0, 0], [1e4, 1e4], [1e4, 1e4], [0, 0]]
    for anew in (True, False):
        draws = [RandomRouter(2, anew).apply({}, x, rngs={"noise": jax.random.key(i)}) for i in (0, 1)]
        assert bool((draws[0] == draws[1]).all()) != anew


@pytest.mark.slow
def test_gates_of_experts_over_patches_are_made_as_sharp_as_asked(config, tmp_path):
    """Rows by hand: two samples of two patches, two experts. Then an entropy over patches for a frozen router."""
    scores = jnp.array([[1.0, 10], [2, 20], [3, 30], [4, 40]])
    assert gate_rows(SelectionRule("patch_choice"), scores, 2).tolist() == [[1, 2], [10, 20], [3, 4], [30, 40]]
    assert gate_rows(SelectionRule("soft"), scores, 2) is scores
    rows = train(override(config, {"router.initial_entropy": 1.2, "arms": ("frozen",)}), ({},), tmp_path)
    assert rows["router/entropy_token_train"].tolist() == pytest.approx([1.2] * 3, abs=1e-3)


@pytest.mark.slow
def test_a_mixture_trains(config, tmp_path):
    """Two steps: its columns, readouts that stay, and no column of tokens that choose their experts."""
    rows = train(override(config, {"arms": ("learned", "frozen"), "dispatch": "slots"}), ({},), tmp_path / "moe")
    assert set(rows.status) == {"ok"} and (rows["patches/computed"] == 6).all()
    # 6 pairs of a patch and an expert of 7 x 2 + 2 weights; a router of 3 x 7 on 4 patches.
    assert (rows["patches/flops"] == 2 * (6 * 16 + 4 * 21)).all()
    assert rows["patches/hit"].between(0, 1).all() and "router/ami" not in rows
    moved = rows[rows.step == 2].set_index("arm")["router/params_changed"]
    assert moved["learned"] == 1 and moved["frozen"] == 0
    cnn = train(override(config, {"model": "patch_cnn", "arms": ("learned",)}), ({},), tmp_path / "cnn")
    assert (cnn["patches/computed"] == 4).all() and (cnn["patches/flops"] == 2 * 4 * 6 * 8).all()


def test_the_cost_of_a_step_is_that_of_the_chosen_patches(config):
    """A patch has 3 x 2 / 4 experts on average; 24 tokens of a batch, each 1.5 of 3 experts' 14 weights, a router."""
    config = canonical(config)
    assert experts_per_token(config) == 1.5
    assert cost(config).flops == 6 * 24 * (21 + 1.5 * 14)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selection.patches": 5},
         "selection.patches=5: is more than the patches of a sample of data.name='generated', which has 4"),
        ({"selection.eval.patches": 5}, "selection.eval.patches=5: is more than the patches"),
        ({"selection.patch_weights": "one"},
         "selection.patch_weights='one': gives the router no gradient; set router.frozen=true"),
        ({"selection.patch_weights": "two"}, "selection.patch_weights='two': must be one of one, even, chosen, all"),
        ({"router.initial_entropy": 1.4}, r"router.initial_entropy=1.4: must be below ln\(patches of a sample\)=1.386"),
        ({"router.initial_entropy": 0.5, "selection.patch_weights": "even", "router.frozen": True},
         "selection.patch_weights='even' is as sharp for any scores"),
        ({"selection.patch_weights": "even"},
         "selection.patch_weights='even': gives the router no gradient; set router.frozen=true"),
        ({"model": "patch_cnn", "experts.top_responses": 5},
         "experts.top_responses=5: is more than the 4 patches of a sample"),
        ({"selection.name": "expert_choice"},
         "selection.name='expert_choice': experts of model='patch_moe' take patches of a sample; use 'patch_choice'"),
        ({"selection.eval.name": "top_k"}, "selection.eval.name='top_k': experts of model='patch_moe'"),
        ({"selection.eval.name": "expert_choice"},
         "would route a test sample by its neighbours; must be one of .*patch_choice"),
        ({"experts.name": "linear"},
         "experts.name='linear': model='patch_moe' has fixed output weights; use 'neurons'"),
        ({"data.positions": 1},
         "model='patch_moe': needs samples of several patches, those of data.name='generated' have one"),
    ],
)  # fmt: skip
def test_impossible_mixtures_are_refused_by_name(config, changes, words):
    validate(config)
    with pytest.raises(UserError, match=words):
        validate(override(config, changes))
