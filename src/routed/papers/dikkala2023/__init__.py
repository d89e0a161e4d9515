"""Dikkala et al. (2023), On the Benefits of Learning to Route in Mixture-of-Experts Models: tasks and models."""

from routed.analysis.plots import PLOTS
from routed.models import SAMPLE_MODELS
from routed.papers.dikkala2023.dictionary import TASK as DICTIONARY
from routed.papers.dikkala2023.kmeans import KMEANS
from routed.papers.dikkala2023.language_chart import LANGUAGES_PLOT
from routed.papers.dikkala2023.sequence import TASK as SEQUENCE
from routed.papers.dikkala2023.specialist_chart import SUCCESS_PLOT
from routed.papers.dikkala2023.subspaces import TASK as SUBSPACES
from routed.papers.dikkala2023.theorem2 import THEOREM2
from routed.papers.dikkala2023.two_experts import TWO_EXPERTS
from routed.papers.dikkala2023.two_gaussians import TASK as TWO_GAUSSIANS
from routed.tasks import TASKS
from routed.training.probes import PROBES

TASKS["subspaces"] = SUBSPACES
TASKS["sequence"] = SEQUENCE
TASKS["dictionary"] = DICTIONARY
TASKS["two_gaussians"] = TWO_GAUSSIANS
PROBES["theorem2"] = THEOREM2
SAMPLE_MODELS["kmeans"] = KMEANS
SAMPLE_MODELS["two_experts"] = TWO_EXPERTS
PLOTS["languages"] = LANGUAGES_PLOT
PLOTS["success"] = SUCCESS_PLOT
