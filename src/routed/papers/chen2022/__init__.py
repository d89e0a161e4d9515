"""Chen et al. (2022), Towards Understanding the Mixture-of-Experts Layer in Deep Learning: tasks, models and arms."""

from routed.models import SAMPLE_MODELS
from routed.papers.chen2022.augmented import AUGMENTED, ROTATED
from routed.papers.chen2022.ensemble import ENSEMBLE
from routed.papers.chen2022.patches import TASK as PATCHES
from routed.papers.chen2022.sentences import TASK as SENTENCES
from routed.plan.arms import ARMS, Arm
from routed.tasks import TASKS

TASKS["patches"] = PATCHES
TASKS["rotated"] = ROTATED
TASKS["augmented"] = AUGMENTED
TASKS["sentences"] = SENTENCES
SAMPLE_MODELS["ensemble"] = ENSEMBLE
# All experts of the mixture compute every sample; their probabilities are averaged at evaluation.
ARMS["ensemble"] = Arm({"model": "ensemble"}, "ensemble of all experts", "#EE3377")
