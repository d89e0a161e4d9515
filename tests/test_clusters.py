"""Experts' places without labels: k-means against hand-made clusters and scikit-learn, and the arms that use it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans

from routed.plan.arms import ARMS
from routed.plan.config import base, canonical, problem_of, traced
from routed.plan.runs import left_out, plan_runs
from routed.routers import ROUTERS
from routed.routers.clusters import balanced, closeness, kmeans, lloyd_step, nearest, seeds
from routed.settings.tree import override
from routed.training import program
from tests.test_controls import stepped
from tests.test_run import last, train

CORNERS = np.array([[10.0, 10.0], [10.0, -10.0], [-10.0, 10.0], [-10.0, -10.0]])


def around(centres, each, seed=0):
    """`each` samples at a standard deviation of 1 from each centre, shuffled."""
    random = np.random.default_rng(seed)
    x = np.repeat(centres, each, 0) + random.normal(size=(each * len(centres), centres.shape[1]))
    return jnp.array(random.permutation(x), jnp.float32)


FIT = jax.jit(kmeans, static_argnums=3)


def inertia(centres, x):
    return float(((np.asarray(x)[:, None] - np.asarray(centres)[None]) ** 2).sum(-1).min(1).mean())


def test_distance_by_hand():
    """Token (3, 4), places (1, 0) and (2, 2): 3 - 1/2 and 14 - 4; the halves of 20 and 5 less far, but for 25 / 2."""
    node = override(base(), {"router.score": "distance"}).router
    router, x = ROUTERS["linear"].make(node, 2), jnp.array([[3.0, 4.0]])
    places = jnp.array([[1.0, 2.0], [0.0, 2.0]])
    assert router.apply({"params": {"kernel": places}}, x).tolist() == [[2.5, 10.0]]
    half = -0.5 * ((x[:, None] - places.T[None]) ** 2).sum(-1)
    np.testing.assert_allclose(half, [[-10.0, -2.5]])
    np.testing.assert_allclose(closeness(places.T, x) - half, [[12.5, 12.5]])
    assert nearest(places.T, x).tolist() == [1]


@pytest.mark.parametrize("name", ["linear", "mlp", "conv", "cnn"])
def test_any_features_have_distances(name):
    """Scores by distance differ from products by half the squared length of each place, the same for all tokens."""
    small = {"router.width": 5, "router.window": 2}
    product, distance = (
        ROUTERS[name].make(override(base(), small | {"router.score": measure}).router, 3)
        for measure in ("product", "distance")
    )
    x = jax.random.normal(jax.random.key(0), (6, 4))
    variables = product.init(jax.random.key(1), x)
    lengths = (variables["params"]["kernel"] ** 2).sum(0)
    apart = product.apply(variables, x) - distance.apply(variables, x)
    np.testing.assert_allclose(apart, np.broadcast_to(lengths / 2, (6, 3)), atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_kmeans_finds_four_obvious_clusters(offset):
    """Centres within .5 of the corners (a mean of 50 is off by .14), each once, also far from the origin."""
    x = around(CORNERS + offset, 50)
    for seed in range(5):
        found = FIT(jax.random.key(seed), x, jnp.ones(200), 4)
        gaps = np.linalg.norm(np.asarray(found)[:, None] - (CORNERS + offset)[None], axis=-1)
        assert sorted(gaps.argmin(1)) == [0, 1, 2, 3] and gaps.min(1).max() < 0.5


def test_kmeans_is_as_good_as_scikit_learns():
    """64 overlapping clusters in 24 dimensions: no algorithm finds the best; mean inertia of 4 seeds within 2 %."""
    x = around(np.random.default_rng(1).normal(size=(64, 24)) * 1.5, 32)
    fit = jax.jit(jax.vmap(kmeans, in_axes=(0, None, None, None)), static_argnums=3)
    ours = [inertia(one, x) for one in fit(jax.random.split(jax.random.key(0), 4), x, jnp.ones(len(x)), 64)]
    theirs = [inertia(KMeans(64, n_init=1, random_state=i).fit(np.asarray(x)).cluster_centers_, x) for i in range(4)]
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.02)


def test_of_several_starts_the_closest_centres_stay():
    """The start with the least distances wins, of 4 starts by hand on twelve overlapping clusters."""
    x, key = around(np.random.default_rng(1).normal(size=(12, 3)), 20), jax.random.key(3)
    alone = [FIT(start, x, jnp.ones(len(x)), 12) for start in jax.random.split(key, 4)]
    best = min(alone, key=lambda centres: inertia(centres, x))
    assert len({round(inertia(centres, x), 5) for centres in alone}) == 4  # no two starts end at the same place
    np.testing.assert_allclose(kmeans(key, x, jnp.ones(len(x)), 12, 4), best, rtol=1e-5)


def test_seeds_are_samples_far_apart_and_kmeans_ends_at_means_of_its_samples():
    x = around(CORNERS, 50)
    for seed in range(5):
        found = np.asarray(jax.jit(seeds, static_argnums=3)(jax.random.key(seed), x, jnp.ones(200), 4))
        assert all((np.asarray(x) == one).all(1).any() for one in found)
        assert {*np.asarray(nearest(jnp.array(CORNERS, jnp.float32), jnp.array(found))).tolist()} == {0, 1, 2, 3}
    ended = FIT(jax.random.key(0), x, jnp.ones(200), 4)
    np.testing.assert_allclose(lloyd_step(ended, x), ended, atol=1e-4)


def test_what_has_no_weight_takes_no_part():
    """Also not by how many there are: a pool that is larger than the training set gives the same clusters."""
    x, far = around(CORNERS, 50), jnp.full((300, 2), 1e3)
    alone = FIT(jax.random.key(0), x, jnp.ones(200), 4)
    weight = jnp.concatenate([jnp.ones(200), jnp.zeros(300)])
    np.testing.assert_allclose(FIT(jax.random.key(0), jnp.concatenate([x, far]), weight, 4), alone, atol=1e-4)


def test_fewer_samples_than_clusters():
    """Three samples and five centres: every sample has one, and the others are samples too."""
    x = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 5.0]])
    found = np.asarray(FIT(jax.random.key(0), x, jnp.array([1.0, 1.0, 1.0]), 5))
    assert {tuple(map(float, one)) for one in found.round(4) + 0.0} == {(0, 0), (1, 0), (0, 5)}


def start(config):
    """The world and the run at step 0."""
    config = canonical(config)
    problem = problem_of(config).build(config, 80, None)  # a pool larger than the training set, by no whole factor
    one = program.make_program(config, problem)
    values = {key: jnp.asarray(value) for key, value in traced(config).items()}
    return jax.jit(lambda: program.start(one, 0, values))()


@pytest.mark.slow
def test_places_are_the_means_of_clusters_of_the_training_samples_or_samples(small):
    """At separation 50: the mean of each cluster's samples in the first 32 of 80; or the first four samples."""
    config = override(small, {"data.separation": 50.0})
    world, run = start(override(config, dict(ARMS["frozen_kmeans"].changes)))
    cluster, x = world.train.cluster[:32], (world.fixed.centres[world.train.cluster] * 50 + world.train.noise)[:32]
    means = np.stack([x[cluster == c].mean(0) for c in range(4)])
    places = np.asarray(run["params"]["router"]["kernel"]).T
    order = ((places[:, None] - means[None]) ** 2).sum(-1).argmin(1)
    assert sorted(order) == [0, 1, 2, 3]
    np.testing.assert_allclose(places, means[order], rtol=1e-4)
    examples = start(override(config, dict(ARMS["frozen_nearest"].changes)))[1]["params"]["router"]["kernel"]
    np.testing.assert_array_equal(examples.T, x[:4])


def moved(config, arm):
    """The router before and after 10 steps of an arm."""
    before, after, _ = stepped(override(config, dict(ARMS[arm].changes)), 10)
    return before["params"]["router"]["kernel"], after["params"]["router"]["kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["frozen_kmeans", "frozen_nearest"])
def test_frozen_places_stay_bit_for_bit(small, arm):
    """Also where their weights decay, as a router without gradient would stay even if it were not frozen."""
    np.testing.assert_array_equal(*moved(override(small, {"optimizer.weight_decay": 0.1}), arm))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["learned_top1", "learned_top1_balanced", "learned_top2", "learned_distance"])
def test_a_learned_router_gets_a_gradient(small, arm):
    before, after = moved(small, arm)
    assert (before != after).any(0).all()  # of every expert: all probabilities move with one


def test_learned_top1_and_top2_are_evaluated_as_they_are_trained():
    for arm, k, sums_to_1 in (("learned_top1", 1, False), ("learned_top2", 2, True)):
        selection = override(base(), dict(ARMS[arm].changes)).selection
        for rule in (selection, selection.eval):
            assert (rule.name, rule.k, rule.renormalise) == ("top_k", k, sums_to_1)


@pytest.mark.slow
def test_arms_of_places_find_obvious_clusters(small, tmp_path):
    """Well apart, k-means sends each cluster to an expert of its own, so its adjusted mutual information is 1."""
    arms = ("frozen_kmeans", "learned_top2_balanced")
    config = override(small, {"data.separation": 50.0, "arms": arms, "experts.name": "constant"})
    table = train(config, ({},), tmp_path)
    assert set(table.arm) == set(arms) and set(table.status) == {"ok"}
    assert (last(table, "frozen_kmeans", "router/ami") == 1).all()
    assert (last(table, "learned_top2_balanced", "train/experts_per_token") == 2).all()


@pytest.mark.slow
def test_clusters_are_of_data_that_are_never_seen_again_too(small):
    """Fresh: of a pool of data.samples samples of the same world, as examples are."""
    fresh = override(small, {"data.fresh": True, "data.separation": 50.0, **ARMS["frozen_kmeans"].changes})
    still = override(fresh, {"data.fresh": False})
    places, same = (start(config)[1]["params"]["router"]["kernel"] for config in (fresh, still))
    np.testing.assert_array_equal(places, same)


def test_a_router_without_places_has_no_such_arms(small):
    config = override(
        small, {"router.name": "cosine", "arms": ("learned", "frozen", "frozen_kmeans", "learned_distance")}
    )
    assert set(left_out(config, ())) == {"frozen_kmeans", "learned_distance"}
    assert {run.arm for run in plan_runs(config, ())} == {"learned", "frozen"}
    # Where nothing is filled from data, what it would be filled with tells no runs apart.
    rows = override(small, {"router.init_rows": "clusters"})
    assert canonical(rows).router.init_rows == "examples"


def test_balanced_clusters_have_equal_size_and_are_read_from_centres_and_offsets():
    """Three clusters with 60, 30 and 10 % of the samples: plain k-means takes them as they are."""
    random = np.random.default_rng(0)
    centres = np.repeat([[0.0, 0], [6, 0], [0, 6]], [600, 300, 100], 0)
    x, weight = jnp.array(centres + random.normal(size=centres.shape), jnp.float32), jnp.ones(1000)
    plain = kmeans(jax.random.key(0), x, weight, 3, 4)
    assert np.bincount(nearest(plain, x)).max() > 550
    centres, offsets = balanced(plain, x, weight)
    chosen = np.asarray(closeness(centres, x) + offsets[None]).argmax(1)
    np.testing.assert_allclose(np.bincount(chosen) / 1000, 1 / 3, atol=0.01)
    members = np.stack([np.asarray(x)[chosen == e].mean(0) for e in range(3)])
    np.testing.assert_allclose(centres, members, atol=0.3)
