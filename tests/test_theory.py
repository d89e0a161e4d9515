"""The theorems' experiments rest on: k-means as a mixture, opposite experts, truncated Gaussians, coupons, a bias."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from sklearn.cluster import KMeans

from routed import contracts
from routed.contracts import UserError
from routed.layer.rule import SelectionRule
from routed.papers.dikkala2023 import kmeans, theorem2, two_experts, two_gaussians
from routed.plan import experiment
from routed.plan.checks import validate
from routed.plan.config import base
from routed.routers import ROUTERS, clusters
from routed.routers.router import initial_parameters
from routed.settings.tree import override
from routed.tasks import TASKS, worlds
from tests.conftest import build_model
from tests.test_run import last, train

coupon_collector = experiment.load("theory_specialists").coupon_collector
X = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
KMEANS = {"model": "kmeans", "data.target": "input", "data.target_dim": 3, "optimizer.momentum": 0.0}
TWO = {
    "model": "two_experts",
    "data.name": "two_gaussians",
    "data.clusters": 2,
    "data.noise": 0.4,
    "optimizer.momentum": 0.0,
}


def gaussians(**changes):
    return override(base(), {"data.name": "two_gaussians", "data.noise": 0.4} | changes).data


@pytest.mark.parametrize(("draws", "kinds"), [(1, 1), (3, 2), (4, 3), (6, 3), (2, 3)])
def test_coupon_collector_counts_every_sequence(draws, kinds):
    hits = sum(len(set(one)) == kinds for one in itertools.product(range(kinds), repeat=draws))
    assert coupon_collector(draws, kinds) == pytest.approx(hits / kinds**draws, rel=1e-12)


def test_coupon_collector_keeps_its_digits():
    assert coupon_collector(32, 32) == pytest.approx(
        math.factorial(32) / 32**32, rel=1e-12
    )  # 1.8e-13, of terms near 1e3


def test_what_rows_from_examples_have_become_by_hand():
    # Rows of clusters 0, 0 and 1; nobody of cluster 2 has a row, so neither its sample nor its target counts.
    scores = np.log([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75], [0.3, 0.4, 0.3]]).astype(np.float32)
    y = jnp.array([[3.0, 4.0], [0.0, 2.0], [9.0, 9.0]])
    experts = jnp.array([[3.0, 3.0], [0.0, 0.0], [0.0, 1.0]])
    rows, examples = jnp.array([[2.0, 0], [0, 3.0], [1.0, 1.0]]), jnp.array([[1.0, 0], [0, 1.0], [1.0, 0]])
    found = theorem2.columns(
        jnp.array(scores), jnp.arange(3), y, experts, rows, examples, jnp.array([0, 0, 1]), labels=3
    )
    # Both samples that count give others' rows 1/4: log 4 = 1.386, over 2 dimensions.
    assert float(found["theory/exponent"]) == pytest.approx(math.log(4) / 2, rel=1e-5)
    # Nearest to (3, 4), of norm 5: at 1, so .2. To (0, 2): at 1 of 2.
    assert float(found["theory/expert_error"]) == pytest.approx(0.5)
    assert float(found["theory/row_cosine"]) == pytest.approx((1 + 1 + 0.5**0.5) / 3)
    assert float(found["theory/row_growth"]) == pytest.approx((2 + 3 + 2**0.5) / 3)


@pytest.mark.slow
def test_rows_are_followed_where_they_came_from_examples_only(small, tmp_path):
    config = override(small, {"arms": ("frozen_data", "learned"), "experts.name": "constant", "seeds": 1})
    table = train(config, ({},), tmp_path)
    columns = [*theorem2.COLUMNS]
    assert table[table.arm == "learned"][columns].isna().all().all()
    rows = table[table.arm == "frozen_data"]
    assert rows[["theory/row_cosine", "theory/row_growth"]].to_numpy() == pytest.approx(1)
    assert np.isfinite(last(table, "frozen_data", "theory/expert_error")).all()


def test_kmeans_steps_are_scikit_learns():
    """One iteration of Lloyd's algorithm from the same centres, and descent on its inertia written out in numpy."""
    centres = X[:5]
    fitted = KMeans(5, init=centres, n_init=1, max_iter=1).fit(X)
    np.testing.assert_allclose(
        clusters.lloyd_step(jnp.array(centres), jnp.array(X)), fitted.cluster_centers_, rtol=1e-4
    )
    ours, theirs = jnp.array(centres), centres.astype(float)
    for _ in range(5):
        ours = kmeans.inertia_step(ours, jnp.array(X), 0.7)
        nearest = ((X[:, None] - theirs[None]) ** 2).sum(-1).argmin(1)
        # d/du_j of mean_i |x_i - u_j(i)|^2 is -2/n sum over its samples of (x - u_j).
        slope = np.stack([-2 / len(X) * (X[nearest == j] - theirs[j]).sum(0) for j in range(5)])
        theirs = theirs - 0.7 * slope
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_training_the_mixture_takes_the_steps_of_kmeans(small, tmp_path):
    """Lemma 1 through the engine: the model's own gradient, at every evaluation, where the centres have moved."""
    config = override(small, KMEANS | {"arms": ("learned",), "seeds": 2, "experts.learning_rate": 0.5})
    table = train(config, ({},), tmp_path)
    assert table["theory/gradient_step"].max() < 1e-5 and table["theory/lloyd_step"].max() < 1e-5
    assert (last(table, "learned", "train/loss") < table[table.step == 0]["test/loss"].to_numpy()).all()


def test_a_centre_without_samples_stays():
    centres = jnp.array([[0.0], [1.0], [99.0]])
    moved = clusters.lloyd_step(centres, jnp.array([[-1.0], [0.0], [3.0]]))
    np.testing.assert_allclose(moved, [[-0.5], [3.0], [99.0]])


@pytest.mark.parametrize(("dim", "sigma"), [(2, 0.4), (5, 1.0), (5, 0.1)])
def test_truncated_gaussians_and_their_quadrature_agree(dim, sigma):
    data = gaussians(**{"data.dim": dim, "data.noise": sigma, "data.clusters": 2})
    once = two_gaussians.fixed(jax.random.split(jax.random.key(1)), data)
    draws = two_gaussians.draw(once, None, jax.random.key(0), 40000, data)
    length = np.linalg.norm(draws.noise, axis=1)
    assert length.max() <= data.radius * (1 + 1e-6)
    # E|g|^2 / d from the radial density r^(d-1) exp(-r^2 / 2 sigma^2), by scipy.
    top, bottom = (
        integrate.quad(lambda r, p=p: r ** (dim - 1 + p) * np.exp(-((r / sigma) ** 2) / 2), 0, data.radius)[0]
        for p in (2, 0)
    )
    points, weights = two_gaussians.plane(data)
    assert weights @ points[:, 0] ** 2 == pytest.approx(top / bottom / dim, rel=1e-4)
    assert (length**2).mean() == pytest.approx(top / bottom, rel=0.02)
    assert abs(weights @ points).max() < 1e-12 and weights.sum() == pytest.approx(1)


def test_two_gaussians_are_opposite_and_never_cross():
    data = gaussians(**{"data.clusters": 2, "data.dim": 3})
    world = worlds.draw_world(TASKS["two_gaussians"], jax.random.key(1), data, 8)
    test = worlds.test_batch(TASKS["two_gaussians"], world, data)
    (z, v), side = world.fixed, np.where(test.cluster == 0, 1.0, -1.0)
    assert np.linalg.norm(z) == pytest.approx(1, rel=1e-5)
    assert (np.sign(test.x @ z) == side).all()
    np.testing.assert_allclose(test.y, side[:, None] * np.asarray(v)[None], rtol=1e-6)
    np.testing.assert_allclose(two_gaussians.bayes(world, test, data), test.y, rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0.05, 0.95), st.floats(0.1, 1)), min_size=2, max_size=6))
def test_margin_is_the_lemmas_difference_over_its_scale(points):
    y, weights = (np.array(column) for column in zip(*points, strict=True))
    if np.ptp(y) < 0.1:
        return
    weights /= weights.sum()
    f = (1 - y**2) / 2
    difference = weights @ y**2 * (weights @ f) - weights @ y * (weights @ (y * f))
    scale = (weights @ y**2 - (weights @ y) ** 2) * (weights @ f)
    ours = two_experts.margin(*(jnp.array(a, jnp.float32) for a in (weights, y, 1 - y, f)))
    assert ours == pytest.approx(difference / scale, rel=1e-3) and ours > 0


def test_margin_is_negative_where_the_lemma_does_not_apply():
    # f(y) = y^2 has f(y) / y rising. y = 1/4, 3/4: E y^2 = 5/16, E y = 1/2, E y^3 = 7/32: 25/256 - 7/64 = -3/256, over
    # Var E f = 5/256.
    y = jnp.array([0.25, 0.75])
    assert two_experts.margin(jnp.array([0.5, 0.5]), y, 1 - y, y**2) == pytest.approx(-3 / 5, rel=1e-5)


@pytest.mark.parametrize("alpha", [1e-3, 0.3, 3.0, 30.0])
def test_claims_in_float32_have_the_sign_of_float64(alpha):
    noise, weights = two_gaussians.plane(gaussians(**{"data.dim": 6, "data.noise": 0.1}))  # at 30, 1 - q is 1e-13
    x1 = 1 + noise[:, 0]
    q, slope = np.tanh(alpha * x1 / 2), 0.5 / np.cosh(alpha * x1 / 2) ** 2
    rest = 2 / (1 + np.exp(alpha * x1))
    # E[q^2] E[q'] - E[q' q] E[q] with q = 1 - rest, so that nothing cancels near 1: Var E q' + E q Cov(rest, q').
    spread = weights @ (rest - weights @ rest) ** 2
    exact = 1 + (weights @ q) * (weights @ ((rest - weights @ rest) * slope)) / (spread * (weights @ slope))
    first, second = two_experts.claims_1_and_2(jnp.array(alpha * x1, jnp.float32), jnp.array(weights, jnp.float32))
    assert first == pytest.approx(1, rel=1e-5)  # every sample is on the side of z
    assert second == pytest.approx(exact, rel=2e-3) and exact > 0
    if alpha in two_experts.ALPHAS:
        assert two_experts.claim_3(alpha, jnp.array(x1, jnp.float32), jnp.array(weights, jnp.float32)) > 1e-3


@pytest.mark.slow
def test_two_experts_find_the_direction(small, tmp_path):
    """Theorem 4 in small: |w| grows along +-z, u goes to the target of that side, the margins stay above 0."""
    few = {"data.fresh": True, "batch_size": 64, "steps": 1000, "eval_every": 500, "router.learning_rate": 0.5}
    config = override(small, TWO | few | {"experts.learning_rate": 0.5, "arms": ("learned",), "seeds": 3})
    table = train(config, ({},), tmp_path)
    assert (last(table, "learned", "theory/cosine") > 0.999).all()
    assert (last(table, "learned", "theory/norm") > 1).all() and (
        last(table, "learned", "theory/target_error") < 0.2
    ).all()
    np.testing.assert_allclose(table[table.step == 0]["theory/norm"], 0.01, rtol=1e-4)
    assert (table[[c for c in table if c.startswith(("theory/claim", "theory/lemma"))]] > 0).all(axis=None)


def test_two_experts_by_hand():
    """w = (2 ln 2, 0), x = (1, 5): p = sigmoid(2 ln 2) = 4/5, so f = (2 p - 1) u = .6 u."""
    model = build_model(override(base(), TWO | {"data.dim": 2}))
    params = {"router": {"w": jnp.array([2 * math.log(2), 0.0])}, "experts": {"u": jnp.array([10.0, -5.0])}}
    batch = contracts.Batch(jnp.array([[1.0, 5.0]]), jnp.zeros((1, 2)), jnp.zeros(1, int))
    np.testing.assert_allclose(model.apply(params, {}, batch, SelectionRule(), "").prediction, [[6.0, -3.0]], rtol=1e-5)


@pytest.mark.parametrize("name", ["linear", "mlp", "conv"])
def test_a_bias_starts_at_nothing_and_adds_to_every_score(name):
    node = override(base(), {"router.bias": True, "router.width": 4}).router
    plain, biased = ROUTERS[name].make(base().router, 3), ROUTERS[name].make(node, 3)
    params = biased.init(jax.random.key(0), jnp.array(X))["params"]
    np.testing.assert_array_equal(params["bias"], np.zeros(3))
    shift = jnp.array([1.0, -2.0, 0.5])
    scores = biased.apply({"params": params}, jnp.array(X))
    moved = biased.apply({"params": params | {"bias": shift}}, jnp.array(X))
    np.testing.assert_allclose(moved - scores, np.broadcast_to(shift, moved.shape), rtol=1e-4, atol=1e-5)
    assert "bias" not in plain.init(jax.random.key(0), jnp.array(X))["params"]
    # What a comparison does to initial weights leaves the bias alone.
    filled = override(base(), {"router.init_from_data": True}).router
    found = initial_parameters(ROUTERS[name], biased, params, jnp.array(X[:3]), filled)
    np.testing.assert_array_equal(found["bias"], np.zeros(3))


@pytest.mark.slow
def test_a_bias_trains_and_freezes(small, tmp_path):
    config = override(small, {"router.bias": True, "data.spurious_dims": 2, "seeds": 1, "experts.name": "constant"})
    table = train(config, ({},), tmp_path)
    assert (last(table, "learned", "router/params_changed") == 1).all() and (
        last(table, "frozen", "router/params_changed") == 0
    ).all()
    share, ratio = (last(table, "learned", f"router/{name}") for name in ("signal_share", "spurious_ratio"))
    np.testing.assert_allclose(share, 1 / (1 + ratio**2), rtol=1e-4)  # shares of the squared norm


@pytest.mark.slow
def test_rows_hit_every_cluster_where_each_has_a_row(small, tmp_path):
    """Well apart, frozen rows from every cluster cover every cluster.

    Not the converse: a row that no sample of its cluster chooses may serve a cluster without a row.
    """
    few = {"arms": ("frozen_data",), "seeds": 12, "experts.count": 6, "experts.name": "constant"}
    table = train(override(small, few | {"data.separation": 50.0, "data.dim": 8}), ({},), tmp_path)
    hit, covered = (
        last(table, "frozen_data", f"router/{name}")
        for name in ("init_clusters_covered", "all_clusters_with_specialists")
    )
    assert (hit <= covered).all() and 0 < hit.mean() < 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "kmeans"}, "does not fit model='kmeans'; use input"),
        ({"model": "kmeans", "data.target": "train"}, "data.target='train': does not fit model='kmeans'; use input"),
        ({"model": "two_experts"}, "needs opposite Gaussians, which .* use data.name=two_gaussians"),
        (TWO | {"data.dim": 1}, "data.dim=1: two Gaussians need at least 2"),
    ],
)
def test_models_of_a_theorem_need_its_data(small, changes, words):
    with pytest.raises(UserError, match=words):
        validate(override(small, changes))
