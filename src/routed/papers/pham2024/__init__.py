"""Pham et al. (2024), CompeteSMoE: competition as a selection, the arms, and the data and the model of its theorems."""

from routed.analysis.claims import KINDS
from routed.analysis.claims.preconditions import COUNT_MODELS
from routed.analysis.plots import PLOTS
from routed.layer.selection import SELECTIONS
from routed.models import SAMPLE_MODELS
from routed.papers.pham2024 import arms
from routed.papers.pham2024.classifier import CLASSIFIER
from routed.papers.pham2024.competition import COMPETE
from routed.papers.pham2024.equal_cost_chart import EQUAL_COST_PLOT
from routed.papers.pham2024.gated_experts import GATED_EXPERTS, LIKELIHOOD
from routed.papers.pham2024.gated_gaussians import TASK as GATED_GAUSSIANS
from routed.papers.pham2024.power_charts import POWERS_PLOT
from routed.papers.pham2024.powers import Power
from routed.papers.pham2024.stable import STABLE
from routed.plan.arms import ARMS
from routed.routers import ROUTERS
from routed.tasks import TASKS
from routed.training import PROBLEMS
from routed.training.task_losses import TASK_LOSSES

KINDS[Power.kind] = Power
ROUTERS["stable"] = STABLE
SELECTIONS["compete"] = COMPETE
TASKS["gated_gaussians"] = GATED_GAUSSIANS
PROBLEMS["classifier"] = CLASSIFIER
COUNT_MODELS["eval/prior"] = ("test/loss", "nats, the frequencies of the classes")
TASK_LOSSES["likelihood"] = LIKELIHOOD
SAMPLE_MODELS["gated_experts"] = GATED_EXPERTS
ARMS.update(arms.ARMS)
PLOTS["equal_cost"] = EQUAL_COST_PLOT
PLOTS["powers"] = POWERS_PLOT
