"""The table of probes: groups of columns, each with the condition under which an evaluation computes them.

A probe has up to three stages. `in_block` runs in the program on one block of the evaluated rows, `evaluate` runs in
the program once all blocks have passed, and `offline` runs on the host when a run has ended. `routed.training` fills
the table; a paper or a user's file adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from routed.contracts import AT_LEAST_0, SHARE, Column, Routing, SoftRouting, UserError
from routed.layer.auxiliary import AUXILIARY
from routed.layer.rule import SelectionRule
from routed.metrics.router import METRICS, MetricInputs
from routed.models.model import Outputs
from routed.training.phases import mean_so_far_of
from routed.training.problem import Inputs, Problem

#: Arrays of one evaluation, or the histories of a finished run, by name.
Values = dict[str, Any]


class Block(NamedTuple):
    """A block of the evaluated rows, its rule, the outputs, and the key of their noise (None: no noise)."""

    batch: Any
    rule: SelectionRule
    outputs: Outputs
    key: PRNGKeyArray | None = None


class Evaluation(NamedTuple):
    """One evaluation of a run, as probes see it."""

    problem: Any
    inputs: Inputs
    params: dict[str, Any]
    state: dict[str, Any]
    step: Int[Array, ""]
    #: The result of `Problem.remember` at the evaluation before.
    memory: Any
    #: The evaluated rows: all test samples, or the validation rows of a text.
    batch: Any
    #: Of samples: the world of this step, and the divisor of losses.
    world: Any = None
    unit: Any = 1.0
    #: Of samples, whose blocks fit into memory together: the predictions, and the routing of a model with a router.
    prediction: Any = None
    routing: Routing | SoftRouting | None = None
    #: Of samples whose tokens choose experts: the router on all test tokens.
    gate: MetricInputs = None  # type: ignore[assignment]
    #: Results of the probe's own `in_block`: of samples joined to [samples, ...], of text stacked to [blocks, ...].
    blocks: Any = None


class Probe(NamedTuple):
    """A group of columns, computed for problems of a class for which `applies` holds.

    `evaluate` may return arrays too, which `offline(problem, history)` turns into columns; in `history` each name has
    a leading axis of evaluations.
    """

    problem: type[Problem] = Problem
    columns: Mapping[str, Column] = {}
    applies: Callable[[Any], bool] = lambda problem: True
    in_block: Callable[[Evaluation, Block], Any] | None = None
    evaluate: Callable[[Evaluation], Values] = lambda evaluation: {}
    offline: Callable[[Any, Values], dict[str, np.ndarray]] = lambda problem, history: {}


#: Columns that the training program adds to those of any problem.
PROGRAM = Probe(
    columns={
        "train/steps": Column(
            "steps until the run stopped", "Steps after which the run stopped by itself, or all steps.", AT_LEAST_0
        ),
        "train/stopped": Column(
            "share of runs that stopped", "Share of runs that a rule of the config ended before the last step.", SHARE
        ),
        "train/rate_scale": Column(
            "multiplier of all rates", "Factor on all learning rates that tuning chose, or 1.", AT_LEAST_0, log=True
        ),
        "train/router_rate": Column(
            "rate of the router",
            "The router's learning rate that tuning chose from a grid of two dimensions; all rates are multiplied once"
            " more.",
            AT_LEAST_0,
            log=True,
        ),
    }
    | {
        f"train/coefficient_{name}": Column(
            f"coefficient losses.{name}",
            f"What losses.{name} has become where losses.{loss.steered_by} steers it.",
            AT_LEAST_0,
            log=True,
        )
        for name, loss in AUXILIARY.items()
        if loss.adapted is not None
    }
)

#: name -> probe, in the order of computation.
PROBES: dict[str, Probe] = {"program": PROGRAM}


def experts_probe(
    problem: type[Problem], count: Callable[[Any], Any], definition: str, applies: Callable[[Any], bool]
) -> Probe:
    """Returns the probe of the mean number of experts that computed for a training token so far."""

    def evaluate(evaluation: Evaluation) -> Values:
        experts = mean_so_far_of(count, evaluation.problem.config, evaluation.inputs.config, evaluation.step)
        return {"train/experts_per_token": jnp.asarray(experts, jnp.float32)}

    column = Column("experts computed per training token", definition, AT_LEAST_0, log=True)
    return Probe(problem, {"train/experts_per_token": column}, applies, evaluate=evaluate)


def probes_of(problem: Problem) -> dict[str, Probe]:
    """Returns the probes that apply to a problem."""
    return {
        name: probe for name, probe in PROBES.items() if isinstance(problem, probe.problem) and probe.applies(problem)
    }


def look(evaluation: Evaluation, block: Block) -> Values:
    """Returns the results of every probe's `in_block`, by the name of the probe."""
    probes = probes_of(evaluation.problem).items()
    return {name: probe.in_block(evaluation, block) for name, probe in probes if probe.in_block is not None}


def measure(evaluation: Evaluation, blocks: Values) -> dict[str, Array]:
    """Returns the metrics of every probe that applies; `blocks` are the results of `look`."""
    metrics: dict[str, Array] = {}
    for name, probe in probes_of(evaluation.problem).items():
        metrics |= probe.evaluate(evaluation._replace(blocks=blocks.get(name)))
    return metrics


def finish(problem: Problem, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the columns that probes make of a finished run's history."""
    columns: dict[str, np.ndarray] = {}
    for probe in probes_of(problem).values():
        columns |= probe.offline(problem, history)
    return columns


def columns_of(problem: type[Problem]) -> dict[str, Column]:
    """Returns the columns of all probes for a class of problems, and those of the table METRICS."""
    columns: dict[str, Column] = {}
    for probe in PROBES.values():
        if issubclass(problem, probe.problem):
            columns |= probe.columns
    if taken := [name for name in own_columns() if name in columns]:
        raise UserError(
            f"METRICS[{taken[0]!r}]: routed has a column of this name, which it would replace; choose another"
        )
    return columns | own_columns()


def own_columns() -> dict[str, Column]:
    """Returns the columns of users' files: those of the table METRICS, and the values of auxiliary losses."""
    losses = {
        f"train/loss_{name}": Column(
            f"auxiliary loss {name}",
            f"{loss.doc}; mean over training steps since the last evaluation, without its coefficient.",
        )
        for name, loss in AUXILIARY.items()
        if not loss.value.__module__.startswith("routed.")
    }
    if bare := [name for name in METRICS if "/" not in name]:
        raise UserError(f"METRICS[{bare[0]!r}]: a metric's name has a group before a slash: 'router/{bare[0]}'")
    return {name: metric.column for name, metric in METRICS.items()} | losses
