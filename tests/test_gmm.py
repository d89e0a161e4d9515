"""The Gaussian mixture: separation, prefixes, and the closed-form predictors against brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.experts.mlp import mlp_parameters
from routed.plan import experiment
from routed.plan.checks import validate
from routed.settings.tree import node_of, override
from routed.tasks import worlds
from routed.tasks.gmm import TASK as gmm
from routed.tasks.gmm import frequencies


@pytest.mark.parametrize("separation", [0.5, 2.0])
def test_separation_is_the_closest_pair_over_sqrt_d(small, separation):
    world = worlds.draw_world(gmm, jax.random.key(0), small.data, 8)
    centres = np.asarray(world.fixed.centres) * separation
    pairs = [np.linalg.norm(a - b) for i, a in enumerate(centres) for b in centres[:i]]
    assert min(pairs) / np.sqrt(small.data.dim) == pytest.approx(separation, rel=1e-5)


def test_a_larger_pool_keeps_the_samples_of_a_smaller_one(small):
    few, many = (worlds.draw_world(gmm, jax.random.key(1), small.data, n) for n in (16, 64))
    np.testing.assert_array_equal(few.train.noise, many.train.noise[:16])
    np.testing.assert_array_equal(few.train.cluster, many.train.cluster[:16])
    np.testing.assert_array_equal(few.test.noise, many.test.noise)


def test_batches_stay_below_the_traced_sample_count(small):
    world = worlds.draw_world(gmm, jax.random.key(2), small.data, 64)

    def draw(n):
        return worlds.train_batch(gmm, world, jax.random.key(3), 500, node_of(small, {"data.samples": n}).data)

    batch = jax.jit(draw)(jnp.int32(5))
    rows = {tuple(x) for x in np.asarray(batch.x).round(4)}
    allowed = {
        tuple(x) for x in np.asarray(world.fixed.centres[world.train.cluster[:5]] + world.train.noise[:5]).round(4)
    }
    assert rows == allowed


def test_test_samples_take_every_cluster_equally_often(small):
    world = worlds.draw_world(gmm, jax.random.key(2), small.data, 8)
    batch = worlds.test_batch(gmm, world, small.data)
    assert np.bincount(batch.cluster).tolist() == [100] * 4


def test_fresh_batches_differ_and_spurious_dimensions_have_no_centre(small):
    config = override(small, {"data.spurious_dims": 2, "data.fresh": True})
    world = worlds.draw_world(gmm, jax.random.key(2), config.data, 8)
    a, b = (worlds.train_batch(gmm, world, jax.random.key(i), 16, config.data) for i in (0, 1))
    assert not np.allclose(a.x, b.x)
    assert a.x.shape == (16, 5) and not np.asarray(world.fixed.centres[:, 3:]).any()


@pytest.mark.parametrize("target", ["constant", "linear"])
def test_bayes_predictor_beats_its_neighbours_and_matches_brute_force(small, target):
    config = override(small, {"data.target": target, "data.spurious_dims": 1, "data.separation": 0.7})
    world = worlds.draw_world(gmm, jax.random.key(4), config.data, 8)
    batch = worlds.test_batch(gmm, world, config.data)
    centres = np.asarray(world.fixed.centres) * np.float32(0.7)
    expected = []
    for x in np.asarray(batch.x):
        weight = np.exp(-0.5 * ((x - centres) ** 2).sum(-1))
        weight /= weight.sum()
        if target == "constant":
            expected.append(weight @ np.asarray(world.fixed.targets))
        else:
            values = [np.dot(w, (x - m)[:3]) for w, m in zip(np.asarray(world.fixed.targets), centres, strict=True)]
            expected.append([np.dot(weight, values)])
    ours = gmm.bayes(world, batch, config.data)
    np.testing.assert_allclose(ours, np.array(expected), atol=2e-4)
    best = ((ours - batch.y) ** 2).mean()
    assert best < ((0.8 * ours - batch.y) ** 2).mean()  # E[y|x] minimises squared error


@pytest.mark.parametrize("target", ["constant", "linear"])
def test_variance_is_the_loss_of_the_mean(small, target):
    config = override(small, {"data.target": target, "data.test_samples": 40000})
    world = worlds.draw_world(gmm, jax.random.key(5), config.data, 8)
    y = np.asarray(worlds.test_batch(gmm, world, config.data).y)
    trivial = ((y - y.mean(0)) ** 2).sum(-1).mean()
    assert float(gmm.variance(world, config.data)) == pytest.approx(trivial, rel=0.03)


def test_unequal_clusters_by_hand(small):
    """1 + 1/2 + 1/3 + 1/4 = 25/12: shares 12/25, 6/25, 4/25, 3/25 of training samples; test samples stay equal."""
    config = override(small, {"data.imbalance": 1.0})
    np.testing.assert_allclose(frequencies(config.data), np.array([12, 6, 4, 3]) / 25, rtol=1e-6)
    world = worlds.draw_world(gmm, jax.random.key(5), config.data, 20000)
    np.testing.assert_allclose(np.bincount(world.train.cluster) / 20000, np.array([12, 6, 4, 3]) / 25, atol=0.02)
    assert np.bincount(world.test.cluster).tolist() == [100] * 4


def test_label_noise_is_in_training_samples_only(small):
    config = override(small, {"data.label_noise": 2.0})
    clean, noisy = (worlds.draw_world(gmm, jax.random.key(6), one.data, 5000) for one in (small, config))
    np.testing.assert_array_equal(clean.train.noise, noisy.train.noise)  # inputs are the same
    batch = gmm.batch(noisy, noisy.train, config.data)
    errors = np.asarray(batch.y - noisy.fixed.targets[batch.cluster])
    assert errors.std() == pytest.approx(2.0, rel=0.03) and abs(errors.mean()) < 0.05
    inputs = np.asarray(noisy.train.noise)
    assert abs(np.corrcoef(errors[:, 0], inputs[:, 0])[0, 1]) < 0.05
    test = worlds.test_batch(gmm, noisy, config.data)
    np.testing.assert_array_equal(test.y, noisy.fixed.targets[test.cluster])


def test_groups_share_places_and_targets(small):
    """40 clusters in 4 groups: .1 of a target's variance is inside, .9 between; of places 1 and 9. Means keep .1."""
    sizes = {"data.clusters": 40, "data.groups": 4, "data.target_dim": 3000, "data.dim": 3000}
    centres, targets = worlds.draw_world(gmm, jax.random.key(7), override(small, sizes).data, 8).fixed
    squared = ((centres[:, None] - centres[None]) ** 2).sum(-1) + np.where(np.eye(40), np.inf, 0)
    assert float(squared.min()) == pytest.approx(3000, rel=1e-3)  # separation 1, as without groups
    for values, inside, between in ((targets, 0.1, 0.9), (centres, 1.0, 9.0)):
        by_group = np.asarray(values).reshape(10, 4, 3000)
        within, among = by_group.var(0, ddof=1).mean(), by_group.mean(0).var(0, ddof=1).mean()
        assert among / within == pytest.approx(between / inside + 0.1, rel=0.05)
        assert values is centres or within == pytest.approx(inside, rel=0.03)


@pytest.mark.parametrize("target", ["constant", "linear", "input"])
def test_an_offset_moves_inputs_and_nothing_else(small, target):
    plain, moved = (override(small, {"data.target": target, "data.offset": offset}).data for offset in (0.0, 2.0))
    world = worlds.draw_world(gmm, jax.random.key(4), plain, 8)
    before, after = (worlds.test_batch(gmm, world, data) for data in (plain, moved))
    np.testing.assert_allclose(after.x, before.x + 2, atol=1e-5)
    further = 2 if target == "input" else 0
    np.testing.assert_allclose(after.y, before.y + further, atol=1e-5)
    np.testing.assert_allclose(gmm.bayes(world, after, moved), gmm.bayes(world, before, plain) + further, atol=1e-4)


def test_more_groups_than_clusters_are_refused(small):
    with pytest.raises(UserError, match=r"data.groups=5: must be at most data.clusters=4"):
        validate(override(small, {"data.groups": 5}))


def test_the_ends_of_remark_1_are_under_and_over_parameterised():
    """1,024 samples of 10 outputs: 10,240 numbers.

    Width 2: an expert has 24 * 2 + 2 + 2 * 2 + 2 + 2 * 10 + 10 = 86 weights, the mixture 64 * 86 + 64 * 24 = 7,040.
    Width 96: 2,400 + 9,312 + 970 = 12,682; the dense net of one expert has the router's 1,536 beside it: 14,218.
    """
    module, config = experiment.configure("gmm_router:width", [])
    narrow, *_, wide = (point["experts.width"] for point in experiment.figure_of(module, config).sweep(config))
    of_one, router = [mlp_parameters(24, 10, config.experts.depth, width) for width in (narrow, wide)], 64 * 24
    assert of_one == [86, 12682]
    assert 64 * of_one[0] + router < 10 * config.data.samples < of_one[1] + router
