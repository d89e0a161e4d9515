"""The table of probes: users' metrics on text by layer, users' probes, and what applies to which problem."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import SHARE, Column, Routing, SoftRouting, TextBatch, UserError
from routed.metrics.entropies import entropy
from routed.metrics.router import METRICS, Metric
from routed.plan.code import code_of_metrics
from routed.plan.config import base, canonical, problem_of, traced
from routed.settings.tree import node_of, override
from routed.training import program
from routed.training.probes import PROBES, Probe, probes_of
from routed.training.problem import Problem
from routed.training.sample_problem import SampleProblem
from routed.training.text_probes import _joined
from routed.training.text_problem import TextProblem
from tests.conftest import SMALL
from tests.language_case import TINY
from tests.test_decoder import rows
from tests.test_decoder import settings as decoder_settings
from tests.test_language import run
from tests.test_tuning import settings as classifier_settings

CERTAINTY = Metric(lambda gate: gate.probs.max(1).mean(), Column("largest probability of a token", bounds=SHARE))


def evaluated(config, batch, change=lambda params: params):
    """The metrics of a new model, whose parameters may be changed first."""
    problem = problem_of(config).build(config, 0, None)
    shared = {"validation": batch, "test": batch, "references": {}}
    inputs = program.Inputs(program.streams(0, config), node_of(config), (), shared)
    params, state = jax.jit(lambda: problem.init(inputs))()
    params = change(params)
    memory = problem.remember(params, state)
    return jax.jit(lambda: problem.evaluate(inputs, params, state, jnp.int32(0), memory))()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("certainty", "a metric's name has a group before a slash: 'router/certainty'"),
        ("test/loss", r"METRICS\['test/loss'\]: routed has a column of this name"),
    ],
)
def test_a_metric_of_a_name_that_no_table_can_have_is_refused(monkeypatch, name, told):
    monkeypatch.setitem(METRICS, name, CERTAINTY)
    with pytest.raises(UserError, match=told):
        problem_of(base()).columns(base())


def test_tokens_of_samples_are_numbered_over_all_blocks(monkeypatch):
    """1,616 test samples pass in blocks of 404."""
    monkeypatch.setitem(METRICS, "router/last", Metric(lambda gate: gate.routing.token.max(), Column("last")))
    config = canonical(override(base(), SMALL | {"data.test_samples": 1616, "shuffles": 0}))
    problem = problem_of(config).build(config, config.data.samples, None)
    keys, node = program.streams(0, config), node_of(config, jax.tree.map(jnp.asarray, traced(config)))

    @jax.jit
    def seen():
        inputs = program.Inputs(keys, node, problem.draw_world(keys, node), ())
        params, state = problem.init(inputs)
        return problem.evaluate(inputs, params, state, 0, problem.remember(params, state))

    assert seen()["router/last"] == 1615


@pytest.mark.slow
def test_a_users_metric_is_computed_for_each_layer_of_a_decoder(monkeypatch):
    """Two layers, 8 rows of 8 tokens in two blocks of 4 rows; the first layer's scores are 0: probabilities 1/4."""
    seen = {
        "router/certainty": CERTAINTY.value,
        "router/last": lambda gate: gate.routing.token.max(),
        "mine": lambda gate: gate.label.sum(),
        "router/choices_of_last": lambda gate: (gate.routing.token == len(gate.probs) - 1).sum(),
        "router/size": lambda gate: jnp.abs(gate.params["kernel"]).sum(),
    }
    for name, value in seen.items():
        monkeypatch.setitem(METRICS, name, Metric(value, Column(name)))
    other = rows()._replace(inputs=rows().targets, language=jnp.ones(4, jnp.int32))
    two = jax.tree.map(lambda *parts: jnp.concatenate(parts), rows(), other)

    def flat(params):
        kernel = params["router"]["decoder"]["router"]["kernel"]
        return params | {"router": {"decoder": {"router": {"kernel": kernel.at[0].set(0.0)}}}}

    metrics = evaluated(decoder_settings(), two, flat)
    first, second = metrics["decoder/router/certainty"]
    assert first == pytest.approx(0.25) and 0.25 < second < 1
    assert metrics["decoder/router/last"].tolist() == [63, 63]  # of 64 tokens, numbered through the blocks
    assert metrics["decoder/router/choices_of_last"].tolist() == [2, 2]
    assert metrics["decoder/mine"].tolist() == [32, 32]  # tokens of language 1
    assert metrics["decoder/router/size"][0] == 0 < metrics["decoder/router/size"][1]


@pytest.mark.slow
def test_a_users_metric_sees_no_pads(monkeypatch):
    """Rows of 1, 3, 8 and 5 tokens behind pads: 17 tokens of 32 choose 2 experts each."""
    monkeypatch.setitem(METRICS, "router/chosen_by", Metric(lambda gate: (gate.choices >= 0).sum(), Column("choices")))
    monkeypatch.setitem(METRICS, "router/real", Metric(lambda gate: gate.real.sum(), Column("tokens")))
    lengths = jnp.array([1, 3, 8, 5])
    ids = jnp.where(jnp.arange(8)[None] >= 8 - lengths[:, None], jnp.arange(32).reshape(4, 8) % 27 + 3, 0)
    batch = TextBatch(ids, jnp.zeros((4, 1), int), jnp.zeros(4, int))
    metrics = evaluated(classifier_settings(**{"batch_size": 2}), batch)
    assert metrics["decoder/router/chosen_by"].tolist() == [34, 34]
    assert metrics["decoder/router/real"].tolist() == [17, 17]


@pytest.mark.slow
def test_a_users_metric_has_a_column_for_each_layer_of_a_t5_and_their_mean(monkeypatch, tmp_path, tmp_path_factory):
    """The entropy of a token's gate, which the package has as a column too."""
    metric = Metric(lambda gate: entropy(gate.probs).mean(), Column("entropy of a gate"))
    monkeypatch.setitem(METRICS, "mine/entropy", metric)
    cache = tmp_path_factory.getbasetemp() / "text"
    table = run(override(base(), TINY | {"data.cache": str(cache)}), tmp_path)
    for stack in ("encoder_0", "decoder_0"):
        np.testing.assert_allclose(table[f"mine/entropy/{stack}"], table[f"router/entropy_token/{stack}"], rtol=1e-5)
    both = table[["mine/entropy/encoder_0", "mine/entropy/decoder_0"]].mean(axis=1)
    np.testing.assert_allclose(table["mine/entropy"], both, rtol=1e-6)
    assert problem_of(override(base(), TINY)).columns(base())["mine/entropy"] is metric.column


def test_routings_of_blocks_are_joined_by_hand():
    """Two blocks of two tokens, one layer, one expert a token: the second block's tokens are 2 and 3."""
    scores = jnp.arange(8.0).reshape(2, 1, 2, 2)
    token = jnp.array([[[0, 1]], [[1, 0]]])
    expert, ones = jnp.array([[[0, 1]], [[1, 1]]]), jnp.ones((2, 1, 2))
    joined = _joined(Routing(scores, token, expert, ones, ones > 0, token))
    assert joined.token.tolist() == [[0, 1, 3, 2]] and joined.expert.tolist() == [[0, 1, 1, 1]]
    assert joined.scores.tolist() == [[[0, 1], [2, 3], [4, 5], [6, 7]]] and joined.rank.tolist() == [[0, 1, 1, 0]]
    assert _joined(SoftRouting(scores, scores)).weight.tolist() == joined.scores.tolist()


def own_probe(problem):
    """A probe of a user: sums over blocks, and a running maximum over evaluations."""
    return Probe(
        problem,
        columns={"mine/largest": Column("largest step so far")},
        applies=lambda problem: problem.part.routed,
        evaluate=lambda evaluation: {"mine/step": jnp.float32(evaluation.step)},
        offline=lambda problem, history: {"mine/largest": np.maximum.accumulate(history["mine/step"])},
    )


@pytest.mark.parametrize(
    ("changes", "families", "applied"),
    [
        ({}, "Problem SampleProblem", "Problem SampleProblem"),
        ({"model": "dense_total"}, "Problem SampleProblem", ""),  # without a router
        (TINY, "Problem TextProblem", "Problem TextProblem"),
    ],
)
def test_a_probe_applies_to_its_problems(monkeypatch, tmp_path_factory, changes, families, applied):
    names = {family.__name__: family for family in (Problem, SampleProblem, TextProblem)}
    for name, family in names.items():
        columns = {f"{name}/largest": Column("largest step so far")}
        monkeypatch.setitem(PROBES, name, own_probe(family)._replace(columns=columns))
    cache = tmp_path_factory.getbasetemp() / "text"
    config = override(base(), changes | {"data.cache": str(cache)})
    problem, columns = problem_of(config).build(config, 8, None), problem_of(config).columns(config)
    assert names.keys() & probes_of(problem).keys() == {*applied.split()}
    assert {name for name in names if f"{name}/largest" in columns} == {*families.split()}
    assert {f"probe {name}" for name in names} <= code_of_metrics().keys()


def test_a_users_probe_is_computed_in_the_program_and_after_it(monkeypatch, small, tmp_path):
    monkeypatch.setitem(PROBES, "mine", own_probe(Problem))
    table = run(override(small, {"arms": ("learned",), "seeds": 1}), tmp_path).sort_values("step")
    assert table["mine/largest"].tolist() == table["mine/step"].tolist() == table["step"].tolist() == [0, 10, 20]


def test_packaged_probes_are_no_code_of_a_user():
    assert code_of_metrics() == {}
