"""Metrics at uniform, collapsed and random routing, with the arithmetic beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed.contracts import Routing
from routed.metrics import agreement, entropies, load, router

CLUSTER = jnp.array([0, 0, 1, 1])


def test_entropies_at_uniform():
    found = entropies.entropies(jnp.full((4, 8), 1 / 8), CLUSTER, 2)
    for name in ("entropy_token", "entropy_cluster", "entropy_load"):
        assert float(found[name]) == pytest.approx(np.log(8), rel=1e-5)
    assert float(found["sparsity"]) == pytest.approx(8, rel=1e-5)


def test_entropies_when_collapsed():
    found = entropies.entropies(jnp.eye(8)[jnp.zeros(4, int)], CLUSTER, 2)
    assert [float(found[n]) for n in ("entropy_token", "entropy_cluster", "entropy_load", "sparsity")] == [0, 0, 0, 1]


def test_clusters_and_experts_weigh_by_their_tokens():
    """3 tokens of a cluster go to one expert, a fourth of another to two: 3/4 x 1 + 1/4 x 2 = 1.25 experts, ln 2 / 4.

    Of 4 tokens an expert has 3 and 1 of two clusters, H = .5623, the other has 2 of one: 4/6 x .5623 = .3749.
    """
    probs = jnp.array([[1.0, 0], [1, 0], [1, 0], [0.5, 0.5]])
    computed = entropies.entropies(probs, jnp.array([0, 0, 0, 1]), 2)
    assert float(computed["sparsity"]) == pytest.approx(1.25, rel=1e-5)
    assert float(computed["entropy_cluster"]) == pytest.approx(np.log(2) / 4, rel=1e-5)
    assert float(entropies.dispatch_entropy(jnp.array([[3.0, 0], [1, 2]]))) == pytest.approx(0.3749, abs=1e-4)


def test_entropies_of_one_expert_per_cluster():
    found = entropies.entropies(jnp.eye(8)[jnp.array([3, 3, 5, 5])], CLUSTER, 2)
    assert float(found["entropy_load"]) == pytest.approx(np.log(2), rel=1e-5)
    assert float(found["sparsity"]) == 1 and float(found["entropy_cluster"]) == 0


def test_sparsity_is_the_mean_of_exponentials():
    # Cluster 0 uses 1 expert, cluster 1 uses two equally: mean exp H = (1 + 2) / 2 = 1.5, exp mean H = sqrt 2.
    found = entropies.entropies(jnp.eye(3)[jnp.array([0, 0, 1, 2])], CLUSTER, 2)
    assert float(found["sparsity"]) == pytest.approx(1.5, rel=1e-5)
    assert float(found["sparsity_exp_mean"]) == pytest.approx(2**0.5, rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 5))
def test_the_three_entropies_are_ordered_and_split_the_load(seed, sharpness):
    """H(E|X) <= H(E|C) <= H(E); the differences are the informations I(E;X|C) and I(E;C), here as divergences."""
    key = jax.random.key(seed)
    cluster = jax.random.randint(key, (40,), 0, 3)
    probs = jax.nn.softmax(sharpness * jax.random.normal(key, (40, 5)))
    found = {k: float(v) for k, v in entropies.entropies(probs, cluster, 3).items()}
    p, c = np.asarray(probs, float), np.asarray(cluster)
    mean = {k: p[c == k].mean(0) for k in set(c.tolist())}
    within = np.mean([(row * np.log(row / mean[k])).sum() for row, k in zip(p, c.tolist(), strict=True)])
    between = np.mean([(mean[k] * np.log(mean[k] / p.mean(0))).sum() for k in c.tolist()])
    assert found["entropy_cluster"] - found["entropy_token"] == pytest.approx(within, abs=1e-4)
    assert found["entropy_load"] - found["entropy_cluster"] == pytest.approx(between, abs=1e-4)


def test_dispatch_entropy():
    # Expert 0 serves clusters 0 and 1 equally (ln 2, half of the tokens), expert 1 only cluster 1: 1/2 ln 2.
    counts = jnp.array([[2.0, 0.0], [2.0, 4.0]])
    assert float(entropies.dispatch_entropy(counts)) == pytest.approx(0.5 * np.log(2), rel=1e-5)
    assert float(entropies.dispatch_entropy(jnp.eye(3))) == 0


def test_load_and_dead():
    choices = jnp.zeros((400, 1), int).at[:100].set(1)
    share = load.load(choices, 4)
    assert share.tolist() == [0.75, 0.25, 0, 0]
    found = load.load_summary(share, 400)
    assert float(found["load_max"]) == 3.0 and float(found["dead"]) == 0.5
    assert np.isnan(float(load.load_summary(share, 399)["dead"]))  # fewer than 100 tokens an expert
    assert load.load(jnp.array([[-1, 1], [-1, 2]]), 4).tolist() == [0, 0.5, 0.5, 0]  # -1 is no choice


def test_norm_ratio():
    assert float(router.norm_ratio(jnp.ones((3, 8)))) == pytest.approx(1)
    assert float(router.norm_ratio(jnp.zeros((3, 8)).at[0, 0].set(2.0))) == pytest.approx(8)  # one non-zero row: E
    # A fresh Gaussian router: E|w|^2 / (E|w|)^2 = 1 + 1/(2 D) to first order, D = 24.
    fresh = jax.random.normal(jax.random.key(0), (24, 20000))
    assert float(router.norm_ratio(fresh)) == pytest.approx(1 + 1 / 48, abs=2e-3)


def test_signal_share():
    assert float(router.signal_share(jnp.ones((10, 4)), 2)) == pytest.approx(0.2)


def test_churn():
    a, b = np.array([[0, 1], [2, 3]]), np.array([[1, 0], [2, 5]])  # order does not matter; one of four changed
    assert agreement.churn(a, b) == 0.25 and agreement.churn(a, a) == 0


def test_the_mean_cosine_is_over_pairs_of_experts():
    """Directions (1, 0), (1, 0), (0, 1) of any lengths: cosines 1, 0, 0 of three pairs; of padding all are 1."""
    token = jnp.array([[2.0, 0.0], [0.5, 0.0], [0.0, 3.0]])
    responses = jnp.stack([token, jnp.ones((3, 2))])
    assert float(agreement.mean_cosine(responses)) == pytest.approx((1 / 3 + 1) / 2, rel=1e-5)
    assert float(agreement.mean_cosine(responses, jnp.array([True, False]))) == pytest.approx(1 / 3, rel=1e-5)


def test_agreement_is_corrected_for_chance():
    rng = np.random.default_rng(0)
    counts = np.zeros((16, 16))
    np.add.at(counts, (rng.integers(0, 16, 500), rng.integers(0, 16, 500)), 1)
    assert abs(agreement.agreement(counts)["ami"]) < 0.05
    assert np.isnan([*agreement.agreement(np.zeros((16, 16))).values()]).all()  # no choice agrees with nothing
    assert agreement.agreement(np.eye(4) * 10) == {"ami": pytest.approx(1), "homogeneity": pytest.approx(1)}


def test_shuffling_a_symmetric_router_changes_nothing():
    x = jax.random.normal(jax.random.key(0), (12, 3))
    scores = lambda x: x @ jnp.ones((3, 4)) * jnp.arange(4.0)[None]  # noqa: E731 (sums features: order cannot matter)
    cluster = jnp.arange(12) % 2
    plain = entropies.entropies(jax.nn.softmax(scores(x)), cluster, 2)["sparsity"]
    draws = entropies.shuffled_sparsity(scores, x, cluster, 2, jax.random.key(1))
    assert draws.shape == (32,)
    np.testing.assert_allclose(draws, plain, rtol=1e-5)


def test_assignments_are_counted_by_the_clusters_of_their_tokens():
    """Expert by expert: tokens 0 and 1 at the first, 1 and 2 at the second; 0 and 1 are of cluster 0, 2 and 3 of 1."""
    token, expert, ones = jnp.array([0, 1, 1, 2]), jnp.array([0, 0, 1, 1]), jnp.ones(4)
    routing = Routing(jnp.zeros((4, 2)), token, expert, ones, ones > 0, jnp.array([0, 1, 0, 1]))
    label = jnp.array([0, 0, 1, 1])
    np.testing.assert_array_equal(router.dispatched(routing, label, 2), [[2, 1], [0, 1]])
    # Of a list of all pairs (ReLU gates) those count that a token chose: token 1 not at the first.
    some = routing._replace(chosen=jnp.array([True, False, True, True]))
    np.testing.assert_array_equal(router.dispatched(some, label, 2), [[1, 1], [0, 1]])


def test_information_by_hand():
    """Two languages of two tokens each. A router by language knows it: ln 2; beyond the token nothing remains."""
    rng = np.random.default_rng(0)
    token = rng.integers(0, 4, 4000)
    language_of = token // 2
    alone = np.arange(4000)  # a row of its own for each token
    found = agreement.information(language_of[:, None], language_of, alone, token, 4)
    assert found["mi_language"] == pytest.approx(np.log(2), abs=0.01)
    assert found["mi_language_given_token"] == pytest.approx(0.0, abs=1e-9)
    assert found["mi_token"] == pytest.approx(np.log(2), abs=0.01)  # of the token's two bits the expert has one
    # A token that both languages have, and a router that tells them apart all the same: ln 2 beyond the token.
    both = rng.integers(0, 2, 4000)
    found = agreement.information(both[:, None], both, alone, np.zeros(4000, int), 4)
    assert found["mi_language_given_token"] == pytest.approx(np.log(2), abs=0.01)
    # One language, which nobody can know anything of: no column of it.
    found = agreement.information(token[:, None], 0 * token, alone, token, 4)
    assert list(found) == ["mi_token"] and found["mi_token"] == pytest.approx(np.log(4), abs=0.01)
    # Independent of the language: 0 although the plug-in estimate over 64 experts is not.
    expert = rng.integers(0, 64, (400, 2))
    found = agreement.information(expert, rng.integers(0, 8, 400), alone[:400], rng.integers(0, 5, 400), 16)
    assert abs(found["mi_language"]) < 0.03 and abs(found["mi_language_given_token"]) < 0.05
    assert agreement._mutual(expert[:, 0], rng.integers(0, 8, 400), np.zeros(400, int)) > 0.3
    # Behind nine times as many pads, which choose nobody: permuted among all, ids left pads in their places, and 3 nats
    # here.
    behind = lambda a, pad: np.concatenate([np.full((len(a) * 9, *a.shape[1:]), pad, a.dtype), a])  # noqa: E731
    found = agreement.information(
        behind(expert, -1), np.zeros(4000, int), np.arange(4000), behind(rng.integers(1, 4000, 400), 0), 16
    )
    assert abs(found["mi_token"]) < 0.03


@pytest.mark.parametrize("ids", (1, 40))
def test_rows_that_are_alike_tell_nothing_of_labels_that_are_drawn_for_them(ids):
    """Rows with tastes of their own and labels drawn for rows: a null of permuted tokens found .05 nats here."""
    found = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        row = np.repeat(np.arange(120), 64)
        taste = 2 * rng.normal(size=(120, 8))
        expert = (taste[row] + rng.gumbel(size=(len(row), 8))).argsort(1)[:, -2:]
        label, token = rng.integers(0, 10, 120)[row], rng.integers(0, ids, len(row))
        found.append([*agreement.information(expert, label, row, token, 8).values()])
    assert np.abs(np.mean(found, 0)).max() < 0.01  # a standard error of .004 or so
    # And the information that is there is found: an expert of its own for every label.
    told = agreement.information(label[:, None], label, row, token, 8)
    assert told["mi_language"] == pytest.approx(agreement._mutual(label, label, 0 * label), rel=0.2)
    assert told["mi_language_given_token"] > 1
