"""The parts of a loss against arithmetic, least squares and simulation, and in runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from routed.analysis import plots
from routed.analysis.plots.frame import Data
from routed.engine import execution, results
from routed.engine.devices import make_mesh
from routed.experts.expert import Affine
from routed.layer.dispatch import dense
from routed.layer.rule import SelectionRule
from routed.layer.selection import select
from routed.metrics import router
from routed.papers.ours import regret
from routed.plan.config import base, problem_of
from routed.plan.runs import plan_runs
from routed.settings.tree import flatten, override
from tests import charts

#: Two clusters with targets 0 and 4; of the four samples of each, three go to the expert of its number.
TARGETS, COUNTS = jnp.array([[0.0], [4.0]]), jnp.array([[3.0, 1.0], [1.0, 3.0]])
Y, CHOICE = TARGETS[jnp.array([0, 0, 0, 0, 1, 1, 1, 1])], jnp.array([0, 0, 0, 1, 0, 1, 1, 1])
EXPERTS = Affine(None, jnp.array([[2.0], [3.0]]))

RULES = (
    SelectionRule("soft"), SelectionRule(renormalise=True), SelectionRule(), SelectionRule(k=2),
    SelectionRule(k=2, renormalise=True), SelectionRule("raw"),
    SelectionRule("sigmoid", k=2), SelectionRule(capacity_factor=0.5, renormalise=True),
)  # fmt: skip


def test_parts_by_hand():
    # Cells have means 1 and 3, and a variance of (3 * 1 + 1 * 9) / 4 = 3 each. Expert 0 is 1 off, expert 1 is right: (1
    # + 0) / 2. With weight 1/2 predictions are 1 and 1.5: errors 3 * 1 + 9 and 2.25 + 3 * 6.25, over 8: 4.125, against
    # 3.5 with weight 1.
    found = regret.parts(EXPERTS, None, Y, CHOICE, 0.5 * EXPERTS.offset[CHOICE])
    assert [float(part) for part in found[:3]] == pytest.approx([3, 0.5, 0.625])
    hard = regret.parts(EXPERTS, None, Y, CHOICE, EXPERTS.offset[CHOICE])
    assert [float(part) for part in hard[:3]] == pytest.approx([3, 0.5, 0])


def test_cells_of_samples_are_those_of_counts():
    found = regret.parts(EXPERTS, None, Y, CHOICE, EXPERTS.offset[CHOICE]).cells
    for cells in (found, regret.cells_of(COUNTS, TARGETS)):
        assert cells.size.tolist() == [4, 4] and cells.mean[:, 0].tolist() == pytest.approx([1, 3])
        assert cells.variance.tolist() == pytest.approx([3, 3])


def test_prediction_by_hand():
    # Two training samples are Poisson(1) in each cell: E[1 / n; n > 0] = (Ei(1) - .5772) / e = .48483, P(0) = .36788.
    # Variances are 3 * 4 / 3 = 4 without bias: 4 * 1.48483 + .36788 * ((1 + 1) + (9 + 1)) / 2 = 8.1466.
    cells = regret.cells_of(COUNTS, TARGETS)
    assert float(regret.predicted(cells, 2.0)) == pytest.approx(8.1466, rel=1e-4)
    assert float(regret.predicted(cells, 1e9)) == pytest.approx(4, rel=1e-5)  # all samples: the partition, without bias


def test_mean_inverse_of_a_number_of_samples():
    expected, n = np.array([1e-3, 0.5, 4, 19.9, 20.1, 60, 1000]), np.arange(1, 3000)
    summed = (scipy.stats.poisson.pmf(n[None], expected[:, None]) / n).sum(1)
    np.testing.assert_allclose(regret.mean_inverse(jnp.array(expected, jnp.float32)), summed, rtol=3e-4)


def drawn(seed, linear, count=5, clusters=3, tokens=60):
    """Random experts, inputs, targets that have clusters, and scores."""
    keys = jax.random.split(jax.random.key(seed), 6)
    slope = jax.random.normal(keys[0], (count, 4, 2)) if linear else None
    experts = Affine(slope, jax.random.normal(keys[1], (count, 2)))
    x, cluster = 2 + jax.random.normal(keys[2], (tokens, 4)), jax.random.randint(keys[3], (tokens,), 0, clusters)
    y = 3 * jax.random.normal(keys[4], (clusters, 2))[cluster]
    return experts, x, y, cluster, 2 * jax.random.normal(keys[5], (tokens, count))


def outputs_of(experts, x):
    """What every expert says of every token [E, T or 1, O]."""
    each = experts.offset[:, None]
    return each if experts.slope is None else each + jnp.einsum("td,edo->eto", x, experts.slope)


@pytest.mark.slow
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_parts_sum_to_the_loss_under_any_rule(linear, rule):
    experts, x, y, _, scores = drawn(0, linear)
    routing = select(rule, scores)
    prediction = dense(lambda own, _: own, outputs_of(experts, x), x, routing)
    found = regret.parts(experts, x if linear else None, y, router.chosen(routing)[:, 0], prediction)
    loss = float(((y - prediction) ** 2).sum(1).mean())
    assert float(sum(found[:3])) == pytest.approx(loss, rel=1e-4, abs=1e-4)
    assert float(found.partition) >= 0 and float(found.estimation) >= 0
    if rule == SelectionRule(renormalise=True):
        assert float(found.gate) == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_the_partition_at_its_ends(seed):
    """The true clusters cost constants nothing; one cell costs all of the variance."""
    experts, x, y, cluster, _ = drawn(seed, linear=False)
    variance = float(((y - y.mean(0, keepdims=True)) ** 2).sum(1).mean())
    for choice, expected in ((cluster, 0.0), (jnp.full(len(x), 4), variance)):
        found = regret.parts(experts, None, y, choice, experts.offset[choice])
        assert float(found.partition) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_linear_experts_against_least_squares():
    """Of expert 0 there are 2 samples of 5 features, of expert 1 none: what these do not say costs nothing."""
    experts, x, y, _, _ = drawn(3, linear=True)
    y += x[:, :2] ** 2
    choice = jnp.array([0, 0] + [2 + i % 3 for i in range(58)])
    prediction = outputs_of(experts, x)[choice, jnp.arange(60)]
    found = regret.parts(experts, x, y, choice, prediction)
    phi, partition, estimation = np.c_[np.asarray(x), np.ones(60)], 0.0, 0.0
    for expert in (0, 2, 3, 4):
        own = np.asarray(choice) == expert
        best = np.linalg.lstsq(phi[own], np.asarray(y)[own], rcond=None)[0]
        partition += ((np.asarray(y)[own] - phi[own] @ best) ** 2).sum() / 60
        estimation += ((np.asarray(prediction)[own] - phi[own] @ best) ** 2).sum() / 60
    assert [float(part) for part in found[:3]] == pytest.approx([partition, estimation, 0], rel=1e-4, abs=1e-5)


def test_prediction_against_simulation():
    """Means of 40 samples in 4 cells of a frozen partition of 6 clusters, 4,000 times; an empty expert is N(0, 1/2)."""
    rng = np.random.default_rng(0)
    joint, targets = rng.dirichlet(np.ones(24) / 2).reshape(6, 4), rng.normal(size=(6, 2))
    losses = []
    for _ in range(4000):
        train = rng.multinomial(40, joint.ravel()).reshape(6, 4)
        sizes = train.sum(0)
        values = np.where(
            sizes[:, None] > 0, train.T @ targets / np.maximum(sizes, 1)[:, None], rng.normal(size=(4, 2)) / 2**0.5
        )
        losses.append((joint * ((targets[:, None] - values) ** 2).sum(-1)).sum())
    many = regret.cells_of(jnp.array(joint * 1e6, jnp.float32), jnp.array(targets, jnp.float32))
    assert float(regret.predicted(many, 40.0)) == pytest.approx(np.mean(losses), rel=0.02)


def test_inverses_leave_out_what_others_tell():
    """[[4, 2], [2, 2]] has [[1/2, -1/2], [-1/2, 1]]; of a feature and its double the last is left; or none."""
    grams = jnp.array([[[4.0, 2.0], [2.0, 2.0]], [[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]]])
    expected = [[[0.5, -0.5], [-0.5, 1.0]], [[0.0, 0.0], [0.0, 0.25]], [[0.0, 0.0], [0.0, 0.0]]]
    np.testing.assert_allclose(regret._inverse(grams), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(regret._inverse(jnp.array([[[4.0]], [[0.0]]]))[:, 0, 0], [0.25, 0])


@pytest.mark.slow
def test_what_is_left_to_linear_experts_by_hand():
    """One cell, inputs -1, 0, 1 and targets 1, -2, 1: the line is flat at 0."""
    # Leverages are 1/3 + x^2 / 2: 5/6, 1/3, 5/6. Squares 1, 4, 1 over 1 - leverage: 6, 6, 6. Variance 6; spread 6 (5/6
    # + 1/3 + 5/6) = 12.
    x, y, choice = jnp.array([[-1.0], [0.0], [1.0]]), jnp.array([[1.0], [-2.0], [1.0]]), jnp.zeros(3, int)
    experts = Affine(jnp.ones((1, 1, 1)), jnp.zeros((1, 1)))
    found = regret.parts(experts, x, y, choice, x)
    assert float(found.partition) == pytest.approx(2) and float(found.estimation) == pytest.approx(2 / 3)
    assert [float(value[0]) for value in found.cells] == pytest.approx([3, 6, 12])
    # Of Poisson(m = 10): 1/n is (1 + 1/10) / 10 = .11, 1 / (n - 3) is (1 + 10 / 49) / 7 = .172012: 6 + 12/2 (.11 + 1.11
    # * .172012).
    assert float(regret.predicted_fits(found.cells, 1, 10.0)) == pytest.approx(7.80560, rel=1e-5)
    assert np.isnan(regret.predicted_fits(found.cells, 1, 3.0))  # twice its two features would be enough
    judged_by_two = regret.parts(experts, x[:2], y[:2], choice[:2], x[:2]).cells  # a line goes through both
    assert np.isnan(regret.predicted_fits(judged_by_two, 1, 10.0))


@pytest.mark.slow
def test_linear_prediction_against_simulation():
    """Least squares of 400 samples in 3 cells, of 4 inputs and a target that no line has, 300 times."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 5))

    def draw(count):
        cell, x = rng.choice(3, count, p=[0.5, 0.3, 0.2]), rng.normal(size=(count, 4))
        phi = np.c_[x, np.ones(count)]
        return cell, phi, (phi * weights[cell]).sum(1) + (0.5 + cell) * rng.normal(size=count) + 0.3 * x[:, 0] ** 2

    cell, phi, y = draw(60_000)
    losses = []
    for _ in range(300):
        mine, inputs, targets = draw(400)
        fits = [np.linalg.lstsq(inputs[mine == j], targets[mine == j], rcond=None)[0] for j in range(3)]
        losses.append(((y - (phi * np.array(fits)[cell]).sum(1)) ** 2).mean())
    experts = Affine(jnp.zeros((3, 4, 1)), jnp.zeros((3, 1)))
    told = (jnp.array(a, jnp.float32) for a in (phi[:, :4], y[:, None]))
    cells = regret.parts(experts, *told, jnp.array(cell), jnp.zeros((60_000, 1))).cells
    assert float(regret.predicted_fits(cells, 4, 400.0)) == pytest.approx(np.mean(losses), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "arms"),
    [("constant", ("learned", "learned_top1", "dense_expert")), ("linear", ("learned",)), ("mlp", ("learned",))],
)
def test_columns_of_a_run(small, experts, arms, tmp_path):
    """Two steps of a soft router and of one with weights: parts sum to the loss, where they mean something."""
    changes = {"experts.name": experts, "experts.depth": 1, "steps": 2, "eval_every": 1, "seeds": 1, "shuffles": 2}
    config = override(small, changes | {"arms": arms})
    runs = plan_runs(config, ())
    table = execution.execute(runs, results.open_workdir(tmp_path, "x.py", config, ()), tmp_path, make_mesh(config))
    if experts == "mlp":
        assert not [name for name in table if name.startswith("regret/")]
        return
    predicted = table[table.arm != "dense_expert"]["regret/predicted"]
    assert predicted.notna().all() if experts == "constant" else predicted.isna().all()  # 32 samples: too few for lines
    rows = table[table.arm != "dense_expert"]
    parts = rows[["regret/partition", "regret/estimation", "regret/gate"]]
    np.testing.assert_allclose(parts.sum(axis=1), rows["test/loss"], rtol=1e-3)
    assert table["regret/partition"].isna().sum() == len(table) - len(rows)
    np.testing.assert_allclose(rows[rows.arm == "learned"]["regret/gate"], 0, atol=1e-5)
    assert (rows[rows.arm == "learned_top1"]["regret/gate"].abs() > 1e-3).all()


def test_bars_are_the_parts_and_long_ones_are_cut():
    """Learned .1 = .06 + .03 + .01; frozen 2 ends at the axis, with its number."""
    columns = ["regret/partition", "regret/estimation", "regret/gate", "regret/predicted", "test/loss"]
    rows = [
        {"run": f"{arm}{n}{seed}", "data.samples": n, "arm": arm, "seed": seed, "step": 10,
         "status": "ok"} | dict(zip(columns, values, strict=True))
        for arm, values in {"learned": (0.06, 0.03, 0.01, 0.07, 0.1), "frozen": (1, 1, 0, 1.1, 2)}.items()
        for n in (64, 256) for seed in range(3)
    ]  # fmt: skip
    rows.append(rows[0] | {"run": "dense", "arm": "dense_total"} | dict.fromkeys(columns[:4], np.nan))
    table = pd.DataFrame(rows)
    data = Data(table, ["data.samples"], flatten(base()), {}, problem_of(base()).columns(base()))
    figure = plots.draw({"kind": "parts", "name": "parts", "x": "data.samples"}, data)
    assert [panel.title for panel in figure.panels] == ["training samples = 64", "training samples = 256"]
    first = figure.panels[0]
    assert charts.labels(first.y) == ["learned router", "frozen at initialisation"]
    bars = [*charts.rows(first, kind="bars")[:2], *charts.rows(first, kind="outlines")]
    assert [(bar["start"], bar["end"]) for bar in bars] == [
        (0, 0.06),
        (0.06, pytest.approx(0.09)),
        (pytest.approx(0.09), 0.1),
    ]
    assert charts.texts(first) == ["0.100", "2.00 = 1.00 + 1.00"] and first.x.domain[1] < 0.5
    few = table.drop(columns="regret/gate")
    assert plots.draw({"kind": "parts", "name": "parts"}, Data(few, [], flatten(base()), {}, data.axes)) is None
