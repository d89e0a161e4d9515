"""Key Techniques 1 and 3 of Chen et al. (2022), an ensemble's sum over patches, and loads within groups, by hand."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import Batch
from routed.layer.rule import selection_rule
from routed.papers.chen2022 import PLAIN_RATE
from routed.papers.chen2022.lone_experts import group_gap, group_share
from routed.plan import experiment
from routed.plan.arms import changes_of
from routed.settings.tree import override
from tests.conftest import build_model

MODULE = experiment.load(str(pathlib.Path(__file__).parent.parent / "experiments" / "cluster_cnn.py"))


def tiny(arm):
    """The config of an arm of the figure with 4 experts of 2 filters and patches of 9 numbers."""
    config = override(MODULE.get_config("techniques,smoke"), {"experts.count": 4, "experts.width": 2, "data.dim": 9})
    return override(config, changes_of(arm, config))


def batch_of(count):
    """Samples of 4 random patches, with signs in turn."""
    x = jax.random.normal(jax.random.key(0), (count, 4, 9))
    return Batch(x, jnp.where(jnp.arange(count)[:, None] % 2, 1.0, -1.0), jnp.arange(count) % 4)


def test_loads_within_groups():
    """Experts 0 and 1 favour cluster 0, 2 favours 1, 3 and 4 favour 2; each cluster has 10 samples."""
    groups = np.array([0, 0, 1, 2, 2])
    counts = np.array([[7, 1, 2, 0, 0], [0, 0, 10, 0, 0], [0, 4, 1, 0, 5]])
    # To their groups go 8, 10 and 5 of 30. Gaps: .7 - .1 = .6, then a single expert, then .5 - 0.
    assert group_share(groups, counts) == pytest.approx(23 / 30)
    assert group_gap(groups, counts) == pytest.approx((0.6 + 0.5) / 2)
    assert group_gap(np.array([0, 1, 2]), np.eye(3)) == 0  # no group has two experts
    assert group_share(np.array([1, 1, 1]), np.eye(3)) == pytest.approx(1 / 3)  # groups 0 and 2 are empty
    assert group_gap(groups, np.zeros((3, 5))) == 0


def test_an_ensemble_of_signs_is_a_sum_over_patches():
    """Its mean output; margins of the four points of Theorem 4.1 add up to 0, so it errs on one of them."""
    config = tiny("ensemble")
    model, batch = build_model(config), batch_of(6)
    params, state = model.init(jax.random.key(1), batch)
    params = jax.tree.map(lambda weights: 1e3 * weights, params)  # outputs of order 10, so any curvature shows
    # f_e = sum_j sum_p <w_ej, x_p>^3
    own = (np.einsum("tpd,edj->etpj", batch.x, params["experts"]["Dense_0"]["kernel"]) ** 3).sum((2, 3))
    trained = model.apply(params, state, batch, None, "dense", jax.random.key(2)).prediction
    np.testing.assert_allclose(trained[:, 0], own.ravel(), rtol=1e-3, atol=1e-3 * abs(own).max())
    looked = model.apply(params, state, batch, None, "dense").prediction
    np.testing.assert_allclose(looked[:, 0], own.mean(0), rtol=1e-3, atol=1e-3 * abs(own).max())
    v, w, c, d, xi = np.random.default_rng(0).normal(size=(5, 9))
    four = [(v, c, -w, xi), (-v, c, w, xi), (w, d, -v, xi), (-w, d, v, xi)]
    signs = jnp.array([[1.0], [-1], [1], [-1]])
    points = Batch(jnp.array(four), signs, jnp.zeros(4, int))
    margins = np.asarray(signs * model.apply(params, state, points, None, "dense").prediction)
    assert abs(margins.sum()) < 1e-3 * abs(margins).max() and margins.min() < 0


def test_arms_leave_out_noise_and_normalisation():
    noisy, noiseless, plain, neither = map(
        tiny, ("learned", "learned_noiseless", "learned_plain", "learned_plain_noiseless")
    )
    assert [config.router.noise for config in (noisy, noiseless, plain, neither)] == ["uniform", "none"] * 2
    assert [config.optimizer.normalise for config in (noisy, noiseless)] == ["expert"] * 2
    assert [config.optimizer.normalise for config in (plain, neither)] == ["none"] * 2
    ratios = [config.experts.learning_rate / noisy.experts.learning_rate for config in (noiseless, plain, neither)]
    assert ratios == pytest.approx([1, PLAIN_RATE, PLAIN_RATE])
    # The router's rows are 0: without noise expert 0 gets every sample, with it each of 4 experts some 100 of 400.
    batch, loads = batch_of(400), []
    for config in (noiseless, noisy):
        model, rule = build_model(config), selection_rule(config.selection)
        params, state = model.init(jax.random.key(1), batch)
        params |= {"router": jax.tree.map(jnp.zeros_like, params["router"])}
        outputs = model.apply(params, state, batch, rule, config.dispatch, jax.random.key(2))
        loads.append(np.bincount(np.asarray(outputs.sites["layer"].routing.expert).ravel(), minlength=4))
    assert loads[0].tolist() == [400, 0, 0, 0] and abs(loads[1] - 100).max() < 40  # 4 deviations of 8.7 are 35


@pytest.mark.parametrize(("count", "rate"), [(4, 0.0025), (8, 0.01), (32, 0.16)])
def test_the_rate_of_the_router_grows_with_the_square_of_the_experts(count, rate):
    """.01 (M / 8)^2."""
    points = MODULE.sized(MODULE.get_config("sizes"))
    rates = {point["router.learning_rate"] for point in points if point["experts.count"] == count}
    assert [*rates] == pytest.approx([rate])
