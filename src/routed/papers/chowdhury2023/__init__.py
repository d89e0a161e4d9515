"""Chowdhury et al. (2023), Patch-level Routing in Mixture-of-Experts: the parts of its experiments."""

from routed.analysis.claims import KINDS
from routed.analysis.plots import PLOTS
from routed.experts import EXPERTS
from routed.layer.selection import SELECTIONS
from routed.models import SAMPLE_MODELS
from routed.papers.chowdhury2023.classes import PAIRS
from routed.papers.chowdhury2023.classes import TASK as CLASSES
from routed.papers.chowdhury2023.collages import TASK as COLLAGES
from routed.papers.chowdhury2023.decisive_patches import ALL_PATCHES_ACCURACY, DECISIVE_PATCHES, SUCCESS_SHARE
from routed.papers.chowdhury2023.generated import TASK as GENERATED
from routed.papers.chowdhury2023.patch_choice import DECISIVE, PATCH_CHOICE
from routed.papers.chowdhury2023.patch_moe import NEURONS, PATCH_CNN, PATCH_MOE
from routed.papers.chowdhury2023.sample_complexity import Exponent, SampleNeed
from routed.papers.chowdhury2023.sample_complexity_charts import RATIOS_PLOT, REACHED_PLOT
from routed.papers.chowdhury2023.scenes import TASK as SCENES
from routed.papers.chowdhury2023.separate import SCORES
from routed.papers.chowdhury2023.wide_resnet import WIDE_RESNET, WIDE_RESNET_MOE
from routed.plan.arms import ARMS, Arm
from routed.routers import ROUTERS
from routed.tasks import TASKS
from routed.training.probes import PROBES
from routed.training.task_losses import TASK_LOSSES

KINDS[SampleNeed.kind] = SampleNeed
KINDS[Exponent.kind] = Exponent
TASKS["scenes"] = SCENES
TASKS["generated"] = GENERATED
TASKS["generated_classes"] = CLASSES
TASKS["collages"] = COLLAGES
EXPERTS["neurons"] = NEURONS
ROUTERS["decisive"] = DECISIVE
SELECTIONS["patch_choice"] = PATCH_CHOICE
TASK_LOSSES["scores"] = SCORES
TASK_LOSSES["pairs"] = PAIRS
PROBES["success"] = SUCCESS_SHARE
PROBES["all_patches"] = ALL_PATCHES_ACCURACY
PROBES["decisive_patches"] = DECISIVE_PATCHES
SAMPLE_MODELS["patch_moe"] = PATCH_MOE
SAMPLE_MODELS["patch_cnn"] = PATCH_CNN
SAMPLE_MODELS["wide_resnet"] = WIDE_RESNET
SAMPLE_MODELS["wide_resnet_moe"] = WIDE_RESNET_MOE
ARMS |= {
    # First the router alone is trained, to separate the experts' summed scores by class; then the router is fixed (the
    # paper's separate training; the arm `learned` is the paper's joint training).
    "separate": Arm(
        {
            "phases": ("epochs=100 train=router loss=scores", "train=experts"),
            "selection.patch_weights": "one",
            "selection.eval.patch_weights": "one",
        },
        "router trained first, then fixed",
        "#4477AA",
    ),
    # Appendix M: an expert for each class, and rows that are trained in pairs of classes.
    "separate_pairs": Arm(
        {
            "phases": ("epochs=100 train=router loss=pairs", "train=experts"),
            "selection.patch_weights": "one",
            "selection.eval.patch_weights": "one",
        },
        "router trained first, in pairs of classes",
        "#4477AA",
    ),
    # The oracle knows the patch that decides; random patches ignore it.
    "oracle_patch": Arm({"router.frozen": True, "router.name": "decisive"}, "oracle (patch that decides)", "#000000"),
    "random_patches": Arm(
        {"router.frozen": True, "router.name": "random"}, "random patches, anew in each step", "#EE6677"
    ),
    "fixed_patches": Arm(
        {"router.frozen": True, "router.name": "random", "router.resample": False}, "random patches, fixed", "#BB5566"
    ),
    # No router: one network of all neurons on all patches.
    "cnn": Arm({"model": "patch_cnn"}, "CNN on all patches", "#777777"),
    # No router: the wide ResNet whose last convolution has as many weights as all experts.
    "wide_resnet": Arm({"model": "wide_resnet"}, "wide ResNet, no mixture", "#228833"),
}
PLOTS["reached"] = REACHED_PLOT
PLOTS["ratios"] = RATIOS_PLOT
