"""Probe of the parts of a squared error (`metrics.regret`): partition, estimation and gate of affine experts."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from routed.metrics import regret
from routed.training.probes import PROBES, Block, Evaluation, Probe
from routed.training.sample_problem import SampleProblem
from routed.training.task_losses import squared


def is_affine(problem: SampleProblem) -> bool:
    """True for experts that are affine maps, trained on squared errors."""
    return problem.experts is not None and problem.experts.affine is not None and problem.loss.value is squared


def affine_of(evaluation: Evaluation) -> regret.Affine | None:
    """Returns the experts as affine maps; None for samples of several tokens, whose outputs add up."""
    if evaluation.batch.cluster.ndim > 1:
        return None
    return evaluation.problem.experts.affine(evaluation.params["experts"])


def _features(evaluation: Evaluation, block: Block) -> Any:
    """Returns the tokens that linear experts got; None for constants."""
    experts = affine_of(evaluation)
    (site,) = block.outputs.sites.values()
    return site.features if experts is not None and experts.slope is not None else None


def _evaluate(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the columns `regret/`."""
    if (experts := affine_of(evaluation)) is None:
        return {}
    problem, inputs, gate = evaluation.problem, evaluation.inputs, evaluation.gate
    assert gate is not None
    parts = regret.parts(experts, evaluation.blocks, evaluation.batch.y, gate.choices[:, 0], evaluation.prediction)
    data = inputs.config.data
    trained_on = evaluation.step * problem.config.batch_size if data.fresh else data.samples
    return regret.columns(parts, experts, evaluation.unit, trained_on)


PROBES["regret"] = Probe(
    SampleProblem,
    columns=regret.COLUMNS,
    applies=lambda problem: problem.tokens_choose and is_affine(problem),
    in_block=_features,
    evaluate=_evaluate,
)
