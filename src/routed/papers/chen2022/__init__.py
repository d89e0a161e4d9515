"""Chen et al. (2022), Towards Understanding the Mixture-of-Experts Layer in Deep Learning: tasks, models and arms."""

from routed.analysis.plots import PLOTS
from routed.experts import EXPERTS
from routed.layer.selection import SELECTIONS
from routed.models import SAMPLE_MODELS
from routed.papers.chen2022.augmented import AUGMENTED, ROTATED
from routed.papers.chen2022.cluster_charts import DISPATCH_PLOT, SERIES_PLOT
from routed.papers.chen2022.lone_experts import ENSEMBLE, GROUP_HIT, LONE_EXPERTS
from routed.papers.chen2022.networks import CONV_NET, MOBILENET_V2, RESNET18
from routed.papers.chen2022.patch_charts import EMBEDDING_PLOT, EXAMPLES_PLOT, LATENT_PLOT, PRODUCTS_PLOT
from routed.papers.chen2022.patches import TASK as PATCHES
from routed.papers.chen2022.released import RAW, SOFTMAX_CROSS_ENTROPY
from routed.papers.chen2022.sentences import TASK as SENTENCES
from routed.plan.arms import ARMS, Arm
from routed.tasks import TASKS
from routed.training.probes import PROBES
from routed.training.task_losses import TASK_LOSSES

#: Factor of the experts' rate for gradients that are not normalised (docs/decisions/chen2022.md).
PLAIN_RATE = 50.0
NOISELESS = {"router.noise": "none"}
PLAIN = {
    "optimizer.normalise": "none",
    "experts.learning_rate": lambda config: PLAIN_RATE * config.experts.learning_rate,
}

TASKS["patches"] = PATCHES
TASKS["rotated"] = ROTATED
TASKS["augmented"] = AUGMENTED
TASKS["sentences"] = SENTENCES
EXPERTS["conv_net"] = CONV_NET
EXPERTS["mobilenet_v2"] = MOBILENET_V2
EXPERTS["resnet18"] = RESNET18
SELECTIONS["raw"] = RAW
TASK_LOSSES["softmax_cross_entropy"] = SOFTMAX_CROSS_ENTROPY
PROBES["lone_experts"] = LONE_EXPERTS
PROBES["group_hit"] = GROUP_HIT
SAMPLE_MODELS["ensemble"] = ENSEMBLE
# All experts of the mixture compute every sample; their probabilities are averaged at evaluation.
ARMS["ensemble"] = Arm({"model": "ensemble"}, "ensemble of all experts", "#EE3377")
# Algorithm 1 without Key Technique 1, without Key Technique 3, and without both. Plain gradients have a rate of their
# own: those of the cubic experts are small at first, and no step would be taken at the rate of normalised ones.
ARMS["learned_noiseless"] = Arm(NOISELESS, "learned, no noise", "#56B4E9")
ARMS["learned_plain"] = Arm(PLAIN, "learned, plain gradients", "#009E73")
ARMS["learned_plain_noiseless"] = Arm(NOISELESS | PLAIN, "learned, neither", "#E69F00")
PLOTS["series"] = SERIES_PLOT
PLOTS["dispatch"] = DISPATCH_PLOT
PLOTS["latent"] = LATENT_PLOT
PLOTS["examples"] = EXAMPLES_PLOT
PLOTS["products"] = PRODUCTS_PLOT
PLOTS["embedding"] = EMBEDDING_PLOT
