"""Gaussian experts under a gate: densities, distances, the data, the estimate, and the power of a metric."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import integrate, stats

from routed.analysis import verdicts
from routed.analysis.claims import LEARNED, Writer
from routed.contracts import UserError
from routed.papers.pham2024 import gated
from routed.papers.pham2024.gated import NORMS, SOFTMAX, Components
from routed.papers.pham2024.gated_gaussians import TASK, TRUE, draw
from routed.papers.pham2024.powers import fitted
from routed.plan.checks import validate
from routed.plan.config import base
from routed.settings.tree import override
from routed.tasks.task import World
from tests.conftest import build_model
from tests.test_claims import table as table_of

SETTINGS = {
    "data.name": "gated_gaussians", "model": "gated_experts", "loss": "likelihood", "data.target_dim": 1,
    "data.full_batch": True, "data.samples": 60, "batch_size": 60, "data.test_samples": 30, "optimizer.name": "adam",
}  # fmt: skip


def test_weights_by_hand():
    """At x = 0 answers are 1, 1.5, -.5: norms 1.5 and 1 win, e^.5 apart: .378, .622. The gate's .5, .5, 0: 1/2 each."""
    x = jnp.zeros(1)
    np.testing.assert_allclose(jnp.exp(gated.log_weights(TRUE, NORMS, 2, x))[0], [0.377541, 0.622459, 0], atol=1e-6)
    np.testing.assert_allclose(jnp.exp(gated.log_weights(TRUE, SOFTMAX, 2, x))[0], [0.5, 0.5, 0], atol=1e-6)
    for x, chosen in ((-0.5, {1, 2}), (0.5, {0, 1}), (0.9, {0, 2})):
        weights = gated.log_weights(TRUE, NORMS, 2, jnp.array([x]))[0]
        assert set(np.flatnonzero(np.asarray(weights) > gated.NEVER / 2)) == chosen
    assert bool(
        jnp.isfinite(
            jax.grad(lambda own: gated.log_density(own, NORMS, 2, x * jnp.ones(1), jnp.zeros((1, 1))).sum())(TRUE).line
        ).all()
    )


def test_the_density_is_one():
    x = jnp.array([-0.7, 0.1, 0.9])
    for gate in gated.GATES:

        def of(y, i, gate=gate):
            return float(jnp.exp(gated.log_density(TRUE, gate, 2, x[i : i + 1], jnp.full((1, 1), y)))[0, 0])

        assert integrate.quad(of, -8, 8, args=(0,), limit=60, epsabs=1e-4)[0] == pytest.approx(1, abs=1e-3)


def test_hellinger_by_hand():
    """One expert, N(0, 1) against N(1, 1): h^2 = 1 - exp(-1/8) at every x; N(0, 1) against N(0, 4): 1 - sqrt(4/5)."""
    one = Components(np.zeros((1, 2), np.float32), np.ones(1, np.float32), np.zeros((1, 2), np.float32))
    nodes = gated.grid(4, 201, 12.0)
    moved, wide = one._replace(line=np.array([[0, 1]], np.float32)), one._replace(variance=np.array([4.0], np.float32))
    for other, squared in ((moved, 1 - np.exp(-1 / 8)), (wide, 1 - np.sqrt(4 / 5)), (one, 0.0)):
        assert float(gated.hellinger(one, other, NORMS, 1, nodes)) == pytest.approx(np.sqrt(squared), abs=1e-4)


def test_the_voronoi_loss_by_hand():
    """Estimates off by .1 in a, .2 in v, (.3, .4) in (a, b): .1, .2, .5; the worst two: .7, in any order of experts.

    Two estimates nearest to expert 1: their distances are summed, and the cell without any costs nothing.
    """
    line, variance = TRUE.line.copy(), TRUE.variance.copy()
    line[0, 0] += 0.1
    variance[1] += 0.2
    line[2] += (0.3, 0.4)
    own = TRUE._replace(line=line, variance=variance)
    for order in ([0, 1, 2], [2, 0, 1]):
        mixed = Components(*(part[order] for part in own))
        assert float(gated.voronoi(mixed, TRUE, NORMS, 2)) == pytest.approx(0.7, abs=1e-6)
    shifted = own._replace(gate=TRUE.gate + np.float32(5))  # which the softmax does not see
    assert float(gated.voronoi(shifted, TRUE, SOFTMAX, 2)) == pytest.approx(0.7, abs=1e-5)
    line[2] = line[0]
    variance[2] = variance[0]
    both = TRUE._replace(line=line, variance=variance)
    assert float(gated.voronoi(both, TRUE, NORMS, 1)) == pytest.approx(0.2, abs=1e-6)  # .1 + .1, against .2 of expert 2


def test_samples_have_the_density():
    """Kolmogorov's distance of 4,000 probability integrals from uniform: below 1.63 / sqrt(4,000) = .026 in 99 %."""
    data = override(base(), SETTINGS).data
    drawn = draw((), None, jax.random.key(0), 4000, data)
    weights = np.exp(gated.log_weights(TRUE, data.gate, data.chosen, drawn.x))
    z = (np.asarray(drawn.y)[:, None] - np.asarray(gated.answers(TRUE, drawn.x))) / np.sqrt(TRUE.variance)
    assert stats.kstest((weights * stats.norm.cdf(z)).sum(1), "uniform").statistic < 0.026
    assert np.abs(np.asarray(drawn.x)).max() <= 1 and TASK.labels(data) == 3


@pytest.mark.slow
@pytest.mark.parametrize("gate", gated.GATES)
def test_the_estimate_knows_when_it_is_one(gate):
    """At the truth nothing is away from it; its gradient on 60 samples is not 0, so that it is no maximum."""
    config = override(base(), SETTINGS | {"data.gate": gate})
    model = build_model(config)
    test = TASK.batch(World((), (), ()), draw((), None, jax.random.key(3), 30, config.data), config.data)
    params, _ = jax.jit(model.init)(jax.random.key(1), test)
    assert params["experts"]["line"].shape == (config.starts, 3, 2) and bool(params["router"]) == (gate == SOFTMAX)
    truth = {"line": TRUE.line[None], "log_variance": np.log(TRUE.variance)[None]}
    at = {"router": {"gate": TRUE.gate[None]} if gate == SOFTMAX else {}, "experts": truth}
    world = World((), draw((), None, jax.random.key(0), 60, config.data), ())
    seen = jax.jit(model.watch)(jax.tree.map(jnp.asarray, at), world, test, jax.random.key(2))
    assert seen["theory/converged"] == 0 and jnp.isnan(seen["theory/voronoi"]) and seen["theory/residual"] > 0.1
    assert float(seen["theory/gain"]) == pytest.approx(0, abs=1e-3)
    assert all(float(value) > 0 for name, value in seen.items() if "/ratio_" in name and "fall" not in name)


def power_table(power, seeds=8, noise=0.05, missing=()):
    numbers, random = np.array([100.0, 400, 1600]), np.random.default_rng(3)
    heights = 3 * numbers**power * np.exp(noise * random.normal(size=(seeds, 3)))
    heights[[*missing], 2] = np.nan
    return pd.DataFrame(heights, columns=numbers)


def test_a_power_by_hand():
    """Without noise 3 n^-.5 has the slope -.5 and log 3 at n = 1; what is missing is left out and counted."""
    found = fitted(power_table(-0.5, noise=0.0))
    assert found.slope[:3] == pytest.approx((-0.5, -0.5, -0.5)) and np.exp(found.height) == pytest.approx(3)
    found = fitted(power_table(-0.5, missing=(1, 4)))
    assert found.slope.low < -0.5 < found.slope.high and (found.used, found.left_out) == (22, 2)
    assert fitted(power_table(-0.5).iloc[:1]) is None


@pytest.mark.parametrize(("paper", "verdict"), [(-0.5, "supported"), (-0.2, "opposite"), (-0.405, "inconclusive")])
def test_what_is_said_of_a_power(paper, verdict):
    heights = power_table(-0.5)
    parts = [table_of({"learned": [*heights[n]]}).assign(**{"data.samples": int(n)}) for n in heights]
    long = pd.concat([one.assign(run=one.run + str(i)) for i, one in enumerate(parts)], ignore_index=True)
    slope = tuple((n, {"data.samples": int(n)}, {}) for n in heights)
    claim = Writer("same").power("a", "b", paper, LEARNED, slope)
    record = verdicts.judge((claim,), long, override(base(), {"seeds": len(heights)}), ["data.samples"])[0]
    assert record["verdict"] == verdict and "power -0.5" in record["text"] and "0 left out" in record["text"]


def test_a_power_without_the_runs_of_a_number_is_not_judged():
    heights = power_table(-0.5)
    parts = [table_of({"learned": [*heights[n]]}).assign(**{"data.samples": int(n)}) for n in heights]
    long = pd.concat([one.assign(run=one.run + str(i)) for i, one in enumerate(parts)], ignore_index=True)
    first = int(heights.columns[0])
    slope = tuple((n, {"data.samples": int(n)}, {}) for n in heights)
    claim = Writer("same").power("a", "b", -0.5, LEARNED, slope)
    config = override(base(), {"seeds": len(heights)})
    lost = long.assign(status=long.status.where(long["data.samples"] != first, "diverged"))
    for rows, verdict in ((lost, "not judged"), (long[long["data.samples"] != first], "not run")):
        assert verdicts.judge((claim,), rows, config, ["data.samples"])[0]["verdict"] == verdict


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"model='moe'|loss='squared'"):
        validate(override(base(), SETTINGS | {"loss": "squared"}))
    with pytest.raises(UserError, match=r"needs gated Gaussians.*use data.name=gated_gaussians"):
        validate(override(base(), {"model": "gated_experts"}))
