"""Pham et al. (2024), CompeteSMoE: the paper's arms, and the task and the model of its theorems."""

from routed.models import SAMPLE_MODELS
from routed.papers.pham2024 import arms
from routed.papers.pham2024.gated_experts import GATED_EXPERTS
from routed.papers.pham2024.gated_gaussians import TASK as GATED_GAUSSIANS
from routed.plan.arms import ARMS
from routed.tasks import TASKS

TASKS["gated_gaussians"] = GATED_GAUSSIANS
SAMPLE_MODELS["gated_experts"] = GATED_EXPERTS
ARMS.update(arms.ARMS)
