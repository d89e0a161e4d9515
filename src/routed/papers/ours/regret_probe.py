"""Probe of the parts of a squared error (`regret.py`): partition, estimation and gate of affine experts."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from routed.papers.ours import regret
from routed.training.affine import affine_of, is_affine
from routed.training.probes import Block, Evaluation, Probe
from routed.training.sample_problem import SampleProblem


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


REGRET = Probe(
    SampleProblem,
    columns=regret.COLUMNS,
    applies=lambda problem: problem.tokens_choose and is_affine(problem),
    in_block=_features,
    evaluate=_evaluate,
)
