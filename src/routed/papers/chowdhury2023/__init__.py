"""Chowdhury et al. (2023), Patch-level Routing in Mixture-of-Experts: the parts of its experiments."""

from routed.analysis.claims import KINDS
from routed.analysis.plots import PLOTS
from routed.experts import EXPERTS
from routed.layer.selection import SELECTIONS
from routed.models import SAMPLE_MODELS
from routed.papers.chowdhury2023 import arms
from routed.papers.chowdhury2023.collages import TASK as COLLAGES
from routed.papers.chowdhury2023.decisive_patches import ALL_PATCHES_ACCURACY, DECISIVE_PATCHES, SUCCESS_SHARE
from routed.papers.chowdhury2023.generated import TASK as GENERATED
from routed.papers.chowdhury2023.neurons import NEURONS
from routed.papers.chowdhury2023.patch_choice import DECISIVE, PATCH_CHOICE
from routed.papers.chowdhury2023.patch_moe import PATCH_CNN, PATCH_MOE
from routed.papers.chowdhury2023.sample_complexity import Exponent, SampleNeed
from routed.papers.chowdhury2023.sample_complexity_charts import RATIOS_PLOT, REACHED_PLOT
from routed.papers.chowdhury2023.scenes import TASK as SCENES
from routed.papers.chowdhury2023.separate import SCORES
from routed.papers.chowdhury2023.wide_resnet import WIDE_RESNET, WIDE_RESNET_MOE
from routed.plan.arms import ARMS
from routed.routers import ROUTERS
from routed.tasks import TASKS
from routed.training.probes import PROBES
from routed.training.task_losses import TASK_LOSSES

KINDS[SampleNeed.kind] = SampleNeed
KINDS[Exponent.kind] = Exponent
TASKS["scenes"] = SCENES
TASKS["generated"] = GENERATED
TASKS["collages"] = COLLAGES
EXPERTS["neurons"] = NEURONS
ROUTERS["decisive"] = DECISIVE
SELECTIONS["patch_choice"] = PATCH_CHOICE
TASK_LOSSES["scores"] = SCORES
PROBES["success"] = SUCCESS_SHARE
PROBES["all_patches"] = ALL_PATCHES_ACCURACY
PROBES["decisive_patches"] = DECISIVE_PATCHES
SAMPLE_MODELS["patch_moe"] = PATCH_MOE
SAMPLE_MODELS["patch_cnn"] = PATCH_CNN
SAMPLE_MODELS["wide_resnet"] = WIDE_RESNET
SAMPLE_MODELS["wide_resnet_moe"] = WIDE_RESNET_MOE
ARMS.update(arms.ARMS)
PLOTS["reached"] = REACHED_PLOT
PLOTS["ratios"] = RATIOS_PLOT
