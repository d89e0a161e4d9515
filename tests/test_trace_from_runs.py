"""Traces of own runs: what was kept of their choices, and the columns that results.parquet has of the same."""

import jax.numpy as jnp
import numpy as np
import pytest

from routed.engine import execution
from routed.metrics import load
from routed.plan.config import base, problem_of
from routed.plan.runs import plan_runs
from routed.settings.tree import override
from routed.trace import analysis, from_runs
from routed.training import samples, text_gates
from tests.language_case import TINY

pytestmark = pytest.mark.slow  # draws a corpus

RNG = np.random.default_rng(0)
EVALUATIONS, EXPERTS, K = 3, 4, 2


def history_of(sizes):
    """A history whose routers follow the row of text: arrays of choices by name, and a loss."""
    choices = {}
    for name, tokens in sizes.items():
        first = RNG.integers(0, EXPERTS, (EVALUATIONS, 1, tokens))
        choices[name] = np.stack([first, (first + 1 + RNG.integers(0, EXPERTS - 1, first.shape)) % EXPERTS], -1)
    return choices | {
        "train/loss": np.zeros(EVALUATIONS),
        "eval/loss": np.zeros(EVALUATIONS),
        "test/loss": np.zeros(EVALUATIONS),
    }


def value(found, number, of="value"):
    (one,) = found.table[found.table.number == number][of]
    return one


def test_a_language_model_has_traces_of_its_stacks_with_the_numbers_of_its_columns(tmp_path, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "text"
    config = override(base(), TINY | {"data.cache": str(cache), "trace.every": 2})
    (run,) = plan_runs(config, ({},))
    problem = problem_of(run.config).build(run.config, 0, None)
    known = text_gates.tokens_of(problem.kind, run.config)
    history = history_of({f"{stack}/choices": len(tokens.row) for stack, tokens in known.items()})
    for stack, tokens in known.items():  # the last ones know the language
        history[f"{stack}/choices"][-1, 0, :, 0] = tokens.language
        history[f"{stack}/choices"][-1, 0, :, 1] = 2 + RNG.integers(0, 2, len(tokens.row))
        history[f"{stack}/stale"] = history[f"{stack}/choices"]
    execution.write_finished(tmp_path, problem_of(run.config), [run], [history], [])
    traces = from_runs.write(tmp_path, [run])
    assert [trace.folder.relative_to(tmp_path / "traces").parts[1:] for trace in traces] == [
        (stack, f"step_{step:06d}") for stack in ("decoder", "encoder") for step in (0, 4)
    ]
    by_language = {f"language/{metric}": np.zeros((EVALUATIONS, 2)) for metric in ("loss", "accuracy")}
    columns = problem_of(run.config).offline(run.config, history | by_language)
    for stack, pair in (("decoder", traces[:2]), ("encoder", traces[2:])):
        found, last = analysis.analyse(pair), history[f"{stack}/choices"][-1, 0]
        assert found.trace.layers == (f"{stack}_0",) and found.trace.labels == ("language",)
        expected = load.load_summary(load.load(jnp.asarray(last), EXPERTS), len(last))
        assert value(found, "load_max") == pytest.approx(float(expected["load_max"]), rel=1e-5)
        assert found.churn.value.item() == pytest.approx(columns[f"router/churn_to_final/{stack}_0"][0], rel=1e-6)
        for number, column in (("mi.language", "mi_language"), ("given.language", "mi_language_given_token")):
            beyond = value(found, number) - value(found, number, "chance")
            assert beyond == pytest.approx(columns[f"router/{column}/{stack}_0"][-1], abs=0.05) and beyond > 0.02
    assert from_runs.write(tmp_path, [run]) == traces  # read, and not written again


def test_a_run_on_samples_has_traces_with_its_clusters(tmp_path, small):
    config = override(small, {"trace.every": 1})
    runs = plan_runs(config, ({},))
    run = next(run for run in runs if run.seed == config.seed and not run.tuning)
    label = samples.traced(run.config)["choices"]["labels"]["cluster"]
    assert len(label) == 400 and set(label.tolist()) == set(range(4))
    history = history_of({"choices": 400})
    history["choices"] = history["choices"][:, 0]
    history["choices"][-1, :, 0] = label
    history["choices"][-1, :, 1] = (label + 1) % EXPERTS
    execution.write_finished(tmp_path, problem_of(run.config), [run], [history], [])
    traces = from_runs.write(tmp_path, [run])
    assert [trace.step for trace in traces] == [0, 10, 20]
    found = analysis.analyse(traces)
    np.testing.assert_array_equal(
        found.maps["cluster"][0],
        np.bincount(label)[:, None] * (np.eye(4, dtype=int) + np.roll(np.eye(4, dtype=int), 1, 1)),
    )


def test_choices_have_the_steps_at_which_they_were_kept(tmp_path, small, caplog):
    """Every second evaluation of 0, 10 and 20 remains: 0 and 20, also where each is asked for afterwards."""
    kept, asked = (plan_runs(override(small, {"trace.every": every}), ({},))[0] for every in (2, 1))
    history = history_of({"choices": 400})
    history["choices"] = history["choices"][:, 0]
    execution.write_finished(tmp_path, problem_of(kept.config), [kept], [history], [])
    assert kept.key == asked.key
    assert [trace.step for trace in from_runs.write(tmp_path, [asked])] == [0, 20]
    assert "kept their choices with trace.every=2" in caplog.text


def test_nothing_is_kept_unless_it_is_asked_for(tmp_path, small):
    (run, *_) = plan_runs(small, ({},))
    history = history_of({"choices": 400})
    execution.write_finished(tmp_path, problem_of(run.config), [run], [history], [])
    assert from_runs.write(tmp_path, [run]) == [] and not (tmp_path / "traces").exists()
