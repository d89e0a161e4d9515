"""Crossed clusters: moments by hand, both ends of the share, the Bayes predictor, routers of either structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import SoftRouting
from routed.metrics.router import gate_of
from routed.plan.checks import validate
from routed.settings.tree import override
from routed.tasks import TASKS, worlds
from routed.training.probes import Evaluation
from routed.training.problem import Inputs
from routed.training.router_probes import CLUSTERS, GROUPINGS
from routed.training.sample_problem import build
from routed.training.samples import offline

TASK, GMM = TASKS["crossed"], TASKS["gmm"]


def settled(small, share, **changes):
    """4 relevant and 4 irrelevant clusters in 3 + 3 dimensions; 100 test samples of each of the 16 cells."""
    changes = {"data.name": "crossed", "data.irrelevant_fraction": share, "data.test_samples": 1600} | changes
    return override(small, changes)


def made(small, share, **changes):
    """The config node, a world and its test samples."""
    data = settled(small, share, **changes).data
    world = jax.jit(lambda key: worlds.draw_world(TASK, key, data, 16))(jax.random.key(3))
    return data, world, jax.jit(lambda world: worlds.test_batch(TASK, world, data))(world)


def parts(x, world):
    """What lies along the relevant and along the irrelevant half of the frame."""
    frame = np.asarray(world.fixed.frame)
    return np.split(np.asarray(x) @ frame, 2, axis=1)


def test_a_sample_by_hand(small):
    """C = 4: cell 6 is relevant 6 mod 4 = 2, irrelevant 6 div 4 = 1. c = 2, s = .36: factors 2 x .8 and 2 x .6."""
    _, world, batch = made(small, 0.36, **{"data.separation": 2.0})
    centres = np.asarray(world.fixed.centres)
    at = np.flatnonzero(np.asarray(batch.cluster) == 6)
    relevant, irrelevant = parts(batch.x - world.test.noise, world)
    np.testing.assert_allclose(relevant[at], np.tile(1.6 * centres[2], (100, 1)), atol=1e-5)
    np.testing.assert_allclose(irrelevant[at], np.tile(1.2 * centres[1], (100, 1)), atol=1e-5)
    np.testing.assert_array_equal(batch.y[at], np.tile(world.fixed.targets[2], (100, 1)))
    # The closest pair of centres is sqrt(3) apart at separation 1: of relevant clusters 1.6 sqrt(3) here.
    gaps = np.linalg.norm(centres[:, None] - centres[None], axis=-1)[~np.eye(4, dtype=bool)]
    assert gaps.min() == pytest.approx(np.sqrt(3), rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_moves_variance_from_one_structure_to_the_other(small, share):
    """Between cells: c^2 V in all, V = mean |mu - mean mu|^2; 1 - s and s lie in the halves; noise has 3 + 3 always."""
    _, world, batch = made(small, share, **{"data.separation": 1.5})
    centres = np.asarray(world.fixed.centres)
    between = 1.5**2 * ((centres - centres.mean(0)) ** 2).sum(1).mean()
    signal = np.asarray(batch.x - world.test.noise)
    spread = [((one - one.mean(0)) ** 2).sum(1).mean() for one in parts(signal, world)]
    np.testing.assert_allclose(spread, [(1 - share) * between, share * between], rtol=1e-4, atol=1e-6)
    assert ((signal - signal.mean(0)) ** 2).sum(1).mean() == pytest.approx(between, rel=1e-4)
    # 1600 samples, 6 dimensions: deviation of |noise|^2 about sqrt(2 x 6 / 1600) = .09.
    assert (np.asarray(world.test.noise) ** 2).sum(1).mean() == pytest.approx(6, abs=0.35)
    # Noise, cells and targets are the same draws at every share.
    other = made(small, 0.77, **{"data.separation": 1.5})[2]
    np.testing.assert_array_equal(batch.y, other.y)


def test_without_a_share_it_is_the_gaussian_mixture_rotated(small):
    """The relevant half is `gmm` of the same seed, with 3 spurious dimensions in the other half."""
    data, world, batch = made(small, 0.0, **{"data.separation": 1.5})
    plain = override(small, {"data.separation": 1.5, "data.spurious_dims": 3}).data
    gmm = worlds.draw_world(GMM, jax.random.key(3), plain, 16)
    np.testing.assert_allclose(world.fixed.centres, gmm.fixed.centres[:, :3], rtol=1e-6)
    np.testing.assert_array_equal(world.fixed.targets, gmm.fixed.targets)
    turned = batch.x @ world.fixed.frame
    as_gmm = batch._replace(x=turned, cluster=batch.cluster % 4)
    np.testing.assert_allclose(TASK.bayes(world, batch, data), GMM.bayes(gmm, as_gmm, plain), atol=1e-4)
    np.testing.assert_allclose(world.fixed.frame.T @ world.fixed.frame, np.eye(6), atol=1e-5)


def test_of_irrelevant_structure_alone_nothing_is_told(small):
    """At s = 1 E[y|x] is the mean target for every x; its loss is the variance, so 1 is both trivial and best."""
    data, world, batch = made(small, 1.0)
    predicted = TASK.bayes(world, batch, data)
    mean = np.asarray(world.fixed.targets).mean(0)
    np.testing.assert_allclose(predicted, np.tile(mean, (1600, 1)), atol=1e-5)
    loss = ((predicted - batch.y) ** 2).sum(-1).mean() / worlds.variance(TASK, world, data)
    assert float(loss) == pytest.approx(1, rel=1e-4)


def test_bayes_is_the_mean_over_cells_by_brute_force(small):
    """All 16 densities in all 6 dimensions, of which the closed form looks at 3."""
    data, world, batch = made(small, 0.4, **{"data.separation": 0.8})
    centres, frame, targets = map(np.asarray, world.fixed)
    cell = np.arange(16)
    halves = np.sqrt(0.6) * centres[cell % 4], np.sqrt(0.4) * centres[cell // 4]
    means = 0.8 * np.concatenate(halves, 1) @ frame.T
    weight = np.exp(-0.5 * ((np.asarray(batch.x)[:, None] - means[None]) ** 2).sum(-1))
    expected = (weight / weight.sum(1, keepdims=True)) @ targets[cell % 4]
    np.testing.assert_allclose(TASK.bayes(world, batch, data), expected, atol=2e-4)


def test_bayes_agrees_with_monte_carlo(small):
    """E[(E[y|x] - y) g(x)] = 0 for any g: here for E[y|x] itself, and no multiple of it has a lower loss."""
    data, world, batch = made(small, 0.4, **{"data.test_samples": 64_000, "data.separation": 0.8})
    best, y = np.asarray(TASK.bayes(world, batch, data)), np.asarray(batch.y)
    products = ((best - y) * best).sum(-1)
    assert abs(products.mean()) < 4 * products.std() / np.sqrt(len(y))
    losses = [((scale * best - y) ** 2).sum(-1).mean() for scale in (0.9, 1.0, 1.1)]
    assert losses[1] == min(losses)


@pytest.mark.slow
def test_columns_say_which_structure_a_router_follows(small):
    config = settled(small, 0.5)
    _, world, batch = made(small, 0.5)
    evaluation = Evaluation(
        build(config, 16), Inputs({}, config, world, ()), {}, {}, jnp.int32(0), (), batch, world=world
    )
    for of, seen in ((lambda cell: cell % 4, (1, 0)), (lambda cell: cell // 4, (0, 1))):
        scores = 100.0 * jax.nn.one_hot(of(batch.cluster), 4)
        gate = gate_of(SoftRouting(scores, jax.nn.softmax(scores)), batch.label, 16, batch, {})
        moment = evaluation._replace(gate=gate)
        found = CLUSTERS.evaluate(moment) | GROUPINGS.evaluate(moment)
        # A relevant cluster uses 1 expert where experts follow it, and all 4 equally where they follow the other.
        expected = [4 ** (1 - one) for one in seen]
        sparsity = [float(found[f"router/sparsity_by_{name}"]) for name in ("relevant", "irrelevant")]
        np.testing.assert_allclose(sparsity, expected, rtol=1e-4)
        history = {name: np.asarray(found[name])[None] for name in found if np.ndim(found[name])}
        ami = offline(config, history)
        values = [ami[f"router/ami_by_{name}"][0] for name in ("relevant", "irrelevant")]
        np.testing.assert_allclose(values, seen, atol=0.01)


def test_the_share_is_traced_and_between_0_and_1(small):
    for share in (0.0, 1.0):
        validate(settled(small, share))
    with pytest.raises(Exception, match=r"data.irrelevant_fraction=1.5: must be in \[0.0, 1.0\]"):
        validate(settled(small, 1.5))
    with pytest.raises(Exception, match=r"must be a multiple of 16"):
        validate(settled(small, 0.5, **{"data.test_samples": 1608}))
    assert TASK.settings["irrelevant_fraction"].traced
    data, world, batch = made(small, 0.25)
    traced = jax.jit(lambda s: TASK.batch(world, world.test, Node(data, s)).x)
    np.testing.assert_allclose(traced(jnp.float32(0.25)), batch.x, atol=1e-5)


class Node:
    """The config node with an array for the share."""

    def __init__(self, data, share):
        self.data, self.share = data, share

    def __getattr__(self, name):
        return getattr(self.data, name)


def test_after_the_shift_the_mixtures_have_changed_places(small):
    """At s = .5, from step 10 on, an input's two halves of the frame change places, in training and at evaluation."""
    data, world, _ = made(small, 0.5, **{"data.swap_step": 10})
    before, first, never = (
        worlds.train_batch(TASK, world, jax.random.key(0), 50, one, step)
        for one, step in ((data, 9), (data, 10), (settled(small, 0.5).data, 10))
    )
    assert not np.allclose(first.x, never.x)
    np.testing.assert_array_equal(
        before.x, worlds.train_batch(TASK, world, jax.random.key(0), 50, settled(small, 0.5).data, 9).x
    )
    np.testing.assert_array_equal(first.y, never.y)
    noise = np.asarray(never.x) - np.asarray(placed(world, never.cluster, data)) @ np.asarray(world.fixed.frame).T
    moved = np.asarray(first.x) - noise
    relevant, irrelevant = parts(placed(world, never.cluster, data) @ world.fixed.frame.T, world)
    np.testing.assert_allclose(parts(moved, world)[1], relevant, atol=1e-4)
    np.testing.assert_allclose(parts(moved, world)[0], irrelevant, atol=1e-4)
    later = TASK.at(world, 10, data)
    ideal = TASK.bayes(later, worlds.test_batch(TASK, later, data), data)
    stale = TASK.bayes(world, worlds.test_batch(TASK, later, data), data)
    y = worlds.test_batch(TASK, later, data).y
    assert float(((ideal - y) ** 2).mean()) < float(((stale - y) ** 2).mean())


def placed(world, cluster, data):
    """The centres of cells in the frame's coordinates."""
    centres = np.asarray(world.fixed.centres)
    parts = centres[np.asarray(cluster) % 4], centres[np.asarray(cluster) // 4]
    return data.separation * np.sqrt(0.5) * np.concatenate(parts, 1)
