"""Experts that are affine maps trained on squared errors, for probes that read their parameters."""

from __future__ import annotations

from routed.experts.expert import Affine
from routed.training.probes import Evaluation
from routed.training.sample_problem import SampleProblem
from routed.training.task_losses import squared


def is_affine(problem: SampleProblem) -> bool:
    """True for experts that are affine maps, trained on squared errors."""
    return problem.experts is not None and problem.experts.affine is not None and problem.loss.value is squared


def affine_of(evaluation: Evaluation) -> Affine | None:
    """Returns the experts as affine maps; None for samples of several tokens, whose outputs add up."""
    if evaluation.batch.cluster.ndim > 1:
        return None
    return evaluation.problem.experts.affine(evaluation.params["experts"])
