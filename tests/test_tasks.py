"""Subspaces, sequences and dictionaries: labels by hand, Bayes predictors against brute force, prefixes, errors."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal

from routed.contracts import SoftRouting, UserError
from routed.layer.rule import SelectionRule
from routed.metrics.agreement import covered
from routed.metrics.router import first_layer, gate_of, weight_columns
from routed.plan.checks import validate
from routed.plan.config import base
from routed.settings.tree import override
from routed.tasks import TASKS, worlds
from routed.training.probes import Evaluation
from routed.training.problem import Inputs
from routed.training.router_probes import CLUSTERS, GROUPINGS
from routed.training.sample_problem import build
from routed.training.sample_values import check_values
from tests.conftest import build_model

CASES = [(name, target) for name in ("subspaces", "sequence", "dictionary") for target in TASKS[name].targets]


def settled(small, name, target):
    changes = {
        "data.rank": 2,
        "data.positions": 3,
        "data.noise": 0.5,
        "data.separation": 0.6,
        "data.test_samples": 60,
        "data.target_dim": 1,
    }
    return override(small, changes | {"data.name": name, "data.target": target})


def made(small, name, target):
    """Task, its config node, a world and its test samples."""
    task, data = TASKS[name], settled(small, name, target).data
    world = drawn(task, data, 16)
    return task, data, world, jax.jit(lambda world: worlds.test_batch(task, world, data))(world)


def drawn(task, data, pool):
    """A world, compiled as a whole: operation by operation takes longer."""
    return jax.jit(lambda key: worlds.draw_world(task, key, data, pool))(jax.random.key(0))


def densities(x, means, covariances):
    """p(c|x) of equally likely Gaussians, [T, C]."""
    each = [
        np.exp(multivariate_normal(m, c, allow_singular=True).logpdf(x))
        for m, c in zip(means, covariances, strict=True)
    ]
    return np.stack(each, -1) / np.sum(each, axis=0)[:, None]


@pytest.mark.parametrize(("name", "target"), CASES)
def test_a_larger_pool_keeps_the_samples_of_a_smaller_one(small, name, target):
    task, data, few, _ = made(small, name, target)
    many = drawn(task, data, 64)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b[:16]).all(), few.train.cluster, many.train.cluster))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), (few.fixed, few.test), (many.fixed, many.test)))


@pytest.mark.parametrize("target", TASKS["subspaces"].targets)
def test_subspaces(small, target):
    task, data, world, batch = made(small, "subspaces", target)
    bases, weights = map(np.asarray, world.fixed)
    np.testing.assert_allclose(np.einsum("cdr,cds->crs", bases, bases), np.tile(np.eye(2), (4, 1, 1)), atol=1e-5)
    inside, noise = np.asarray(world.test.inside), 0.5 * np.asarray(world.test.noise)
    for t, c in enumerate(np.asarray(batch.cluster)):
        signal = bases[c] @ inside[t]
        np.testing.assert_allclose(batch.x[t], signal + noise[t], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            batch.y[t, 0], weights[c] @ (signal if target == "signal" else noise[t]), rtol=1e-3, atol=1e-5
        )
    # x | c ~ N(0, P + s^2 I) with P = B B^T, and E[signal | x, c] = P (P + s^2 I)^-1 x: linear algebra instead of the
    # closed form.
    projections = bases @ bases.transpose(0, 2, 1)
    covariances = projections + 0.25 * np.eye(3)
    x = np.asarray(batch.x)
    likely = densities(x, np.zeros((4, 3)), covariances)
    signal = np.einsum("cij,cjk,tk->tci", projections, np.linalg.inv(covariances), x)
    expected = signal if target == "signal" else x[:, None] - signal
    best = (likely * np.einsum("tci,ci->tc", expected, weights)).sum(-1)
    np.testing.assert_allclose(task.bayes(world, batch, data)[:, 0], best, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("target", TASKS["sequence"].targets)
def test_sequences(small, target):
    task, data, world, batch = made(small, "sequence", target)
    centres, weights = (np.asarray(a) for a in world.fixed)
    assert batch.x.shape == (60, 3, 3) and batch.tokens.shape == (180, 3)
    assert np.bincount(batch.label).tolist() == [45] * 4
    power = 1 if target == "linear" else 2
    products = np.einsum("bsd,bsd->bs", weights[np.asarray(batch.cluster)], np.asarray(batch.x)) ** power
    np.testing.assert_allclose(batch.y[:, 0], products.sum(1), rtol=1e-4, atol=1e-5)
    likely = densities(np.asarray(batch.tokens), 0.6 * centres, [np.eye(3)] * 4)
    each = (likely * (np.asarray(batch.tokens) @ weights.T) ** power).sum(-1)
    np.testing.assert_allclose(task.bayes(world, batch, data)[:, 0], each.reshape(60, 3).sum(1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("target", TASKS["dictionary"].targets)
def test_dictionaries(small, target):
    task, data, world, batch = made(small, "dictionary", target)
    centres, weights, atoms = (np.asarray(a) for a in world.fixed)
    assert {tuple(sorted(pair)) for pair in atoms} == {(i, j) for j in range(4) for i in range(j)}
    assert np.bincount(batch.cluster).tolist() == [10] * 6 and task.labels(data) == 6
    at = 0.6 * centres
    for t, c in enumerate(np.asarray(batch.cluster)):
        (i, j), noise = atoms[c], np.asarray(world.test.noise[t])
        first, second = at[i] + noise[0], at[j] + noise[1]
        np.testing.assert_allclose(batch.x[t], first + second, rtol=1e-4, atol=1e-5)
        y = {
            "cross": (weights[i] + weights[j]) @ (first + second),
            "atoms": weights[i] @ first + weights[j] @ second,
            "centres": weights[i] @ at[i] + weights[j] @ at[j],
        }
        np.testing.assert_allclose(batch.y[t, 0], y[target], rtol=1e-3, atol=1e-4)
    x, sums = np.asarray(batch.x), at[atoms].sum(1)
    likely = densities(x, sums, [2 * np.eye(3)] * 6)
    constant = (at[atoms] * weights[atoms]).sum((1, 2))
    # Given the pair, the rest x - sum is shared equally by the two atoms.
    each = {
        "cross": x @ weights[atoms].sum(1).T,
        "atoms": constant + np.einsum("tpd,pd->tp", x[:, None] - sums, weights[atoms].sum(1)) / 2,
        "centres": np.tile(constant, (60, 1)),
    }[target]
    best = (likely * each).sum(-1)
    np.testing.assert_allclose(task.bayes(world, batch, data)[:, 0], best, rtol=2e-3, atol=1e-4)


def test_combinations_of_many_atoms_are_judged_on_a_part_and_trained_on_all(small):
    data = override(settled(small, "dictionary", "cross"), {"data.clusters": 40, "data.test_samples": 1024}).data
    task = TASKS["dictionary"]
    world = worlds.draw_world(task, jax.random.key(0), data, 4000)
    assert math.comb(40, 2) == 780 and task.labels(data) == 512
    assert int(world.test.cluster.max()) == 511 and int(world.train.cluster.max()) > 700


@pytest.mark.slow
@pytest.mark.parametrize("arm", [{"model": "moe"}, {"model": "dense_active"}])
def test_a_sequence_is_the_sum_of_its_tokens(small, arm):
    """The model on a sequence, against the same tokens as sequences of one."""
    config = override(settled(small, "sequence", "linear"), {"data.clusters": 4} | arm)
    batch = made(small, "sequence", "linear")[-1]
    model = build_model(config)
    params, state = model.init(jax.random.key(1), batch)
    whole, _, _ = model.apply(params, state, batch, SelectionRule("soft"), "dense")
    alone = batch._replace(x=batch.x.reshape(180, 1, 3), cluster=batch.cluster.reshape(180, 1), y=jnp.zeros((180, 1)))
    tokens, _, _ = model.apply(params, state, alone, SelectionRule("soft"), "dense")
    assert whole.shape == (60, 1)
    np.testing.assert_allclose(whole, tokens.reshape(60, 3, 1).sum(1), rtol=1e-4, atol=1e-5)


def test_sparsity_with_one_atom_fixed(small):
    """4 atoms, 6 pairs, routing by pair: 3 pairs hold an atom, so 3 experts serve it, and 6 serve all."""
    _, _, world, batch = made(small, "dictionary", "cross")
    scores = 100.0 * jax.nn.one_hot(batch.cluster, 6)

    def evaluate(batch):
        gate = gate_of(SoftRouting(scores, jax.nn.softmax(scores)), batch.label, 6, batch, {})
        config = settled(small, "dictionary", "cross")
        inputs = Inputs({}, config, world, ())
        evaluation = Evaluation(build(config, 16), inputs, {}, {}, 0, (), batch, world=world, gate=gate)
        return CLUSTERS.evaluate(evaluation) | GROUPINGS.evaluate(evaluation)

    seen = jax.jit(evaluate)(batch)
    values = [
        float(seen[f"router/{n}"])
        for n in ("sparsity", "sparsity_by_atom", "experts_used", "clusters_with_specialists")
    ]
    np.testing.assert_allclose(values, [1, 3, 6, 1], rtol=1e-4)


def test_who_has_a_specialist():
    # Cluster 0: all of its tokens on expert 0, which 1 of 11 tokens does not come from (.909): covered.
    # Cluster 1: 8 of 10 on expert 1, all its own, 1 each on experts 0 and 2: .8 < .9. Cluster 2: expert 2 is 10 of 11
    # its own.
    counts = jnp.array([[10.0, 0, 0], [1, 8, 1], [0, 0, 10]])
    assert covered(counts).tolist() == [True, False, True]
    assert covered(jnp.full((3, 3), 5.0)).tolist() == [False] * 3
    # Two experts share a cluster: both are its own.
    assert covered(jnp.array([[5.0, 5, 0], [0, 0, 10]])).tolist() == [True, True]
    assert covered(jnp.array([[5.0, 0], [0, 0]])).tolist() == [True, False]  # nobody serves a cluster without tokens


def test_first_layer_of_routers():
    assert first_layer({"kernel": jnp.ones((3, 4))}).shape == (3, 4)
    assert first_layer({"features": {"Dense_0": {"kernel": jnp.ones((3, 9))}}, "kernel": jnp.ones((9, 4))}).shape == (
        3,
        9,
    )
    assert first_layer({"features": {"kernel": jnp.ones((3, 2))}, "kernel": jnp.ones((2, 4))}).shape == (3, 2)
    assert first_layer({"features": {"Conv_0": {"kernel": jnp.ones((3, 3, 1, 2))}}, "kernel": jnp.ones((2, 4))}) is None
    # Weights of 3 inputs, 1 informative: a third of the squared norm. A window of 3 of 9 inputs has no such share.
    assert weight_columns({"kernel": jnp.ones((3, 4))}, 1, 3, 1.0)["signal_share"] == pytest.approx(1 / 3)
    assert "signal_share" not in weight_columns({"kernel": jnp.ones((3, 4))}, 1, 9, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.target": "linear"}, "data.name='dictionary' has the targets cross, atoms, centres"),
        ({"data.target_dim": 2}, "set data.target_dim=1"),
        ({"data.test_samples": 64}, "must be a multiple of 6, the number of clusters"),
        ({"data.rank": 5}, "a sample has at most data.clusters=4 atoms"),
    ],
)
def test_impossible_data_are_refused_by_name(small, changes, words):
    config = settled(small, "dictionary", "cross")
    validate(config)
    with pytest.raises(UserError, match=words):
        validate(override(config, changes))


def test_a_mean_of_classes_is_not_taken_for_logits(small, monkeypatch):
    """The loss of E[y|x] = (.9, .1) read as logits is -log softmax(.9, .1)_0 = .37 nats; it is -log .9 = .11."""
    monkeypatch.setitem(TASKS, "gmm", TASKS["gmm"]._replace(targets={"constant": "class"}))
    config = override(small, {"loss": "cross_entropy"})
    with pytest.raises(UserError, match=r"predictions of a class are logits, and `bayes` of .*'gmm'.* leave bayes out"):
        validate(config)
    monkeypatch.setitem(TASKS, "gmm", TASKS["gmm"]._replace(bayes=None))
    validate(config)


#: A fault of a user's samples -> the change of a batch, and the words of the refusal.
FAULTS = {
    "dims": (lambda batch: batch._replace(x=batch.x[:, :3]), "have x [64, 3]: 3 numbers each, but `dims` says 24"),
    "outputs": (lambda batch: batch._replace(y=batch.y[:, :1]), "have y [64, 1]: must be [64, 10], as `outputs` says"),
    "labels": (
        lambda batch: batch._replace(cluster=batch.cluster + 5),
        "have clusters 5 to 8: must be 0 to 3, as `labels` says",
    ),
    "constant": (
        lambda batch: batch._replace(y=0 * batch.y),
        "have one y for all: a loss is relative to the variance of",
    ),
    "types": (lambda batch: batch._replace(cluster=batch.cluster / 2), "have clusters of type float32"),
    "nan": (
        lambda batch: batch._replace(x=batch.x.at[7, 2].set(jnp.nan)),
        "have values of x that are not finite: 1 samples, the first is 7",
    ),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_samples_of_a_users_task_are_looked_at_before_anything_is_compiled(fault, monkeypatch):
    change, refusal = FAULTS.get(fault, (lambda batch: batch, ""))
    gmm = TASKS["gmm"]
    mine = gmm._replace(
        draw=lambda *args: gmm.draw(*args), batch=lambda world, draws, data: change(gmm.batch(world, draws, data))
    )
    monkeypatch.setitem(TASKS, "mine", mine)
    config = override(base(), {"data.name": "mine", "data.clusters": 4, "data.test_samples": 64})
    if fault is None:
        check_values(config)
    else:
        with pytest.raises(UserError, match=re.escape(f"data.name='mine': its test samples {refusal}")):
            check_values(config)


def test_the_best_predictor_of_a_users_task_has_the_shape_of_its_targets(monkeypatch):
    gmm = TASKS["gmm"]
    mine = gmm._replace(draw=lambda *args: gmm.draw(*args), bayes=lambda world, batch, data: batch.y[:, :1])
    monkeypatch.setitem(TASKS, "mine", mine)
    with pytest.raises(UserError, match=r"data.name='mine': its bayes returns \[64, 1\]: must be \[64, 10\], as y is"):
        check_values(override(base(), {"data.name": "mine", "data.clusters": 4, "data.test_samples": 64}))
