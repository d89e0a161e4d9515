"""The Gaussian mixture: separation, prefixes, and the closed-form predictors against brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.settings.tree import node_of, override
from routed.tasks import worlds
from routed.tasks.gmm import TASK as gmm


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
    draw = lambda n: worlds.train_batch(gmm, world, jax.random.key(3), 500, node_of(small, {"data.samples": n}).data)  # noqa: E731
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
