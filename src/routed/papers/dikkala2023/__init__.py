"""Dikkala et al. (2023), On the Benefits of Learning to Route in Mixture-of-Experts Models: tasks and models."""

from routed.models import SAMPLE_MODELS
from routed.papers.dikkala2023.dictionary import TASK as DICTIONARY
from routed.papers.dikkala2023.kmeans import KMEANS
from routed.papers.dikkala2023.sequence import TASK as SEQUENCE
from routed.papers.dikkala2023.subspaces import TASK as SUBSPACES
from routed.papers.dikkala2023.two_experts import TWO_EXPERTS
from routed.papers.dikkala2023.two_gaussians import TASK as TWO_GAUSSIANS
from routed.tasks import TASKS

TASKS["subspaces"] = SUBSPACES
TASKS["sequence"] = SEQUENCE
TASKS["dictionary"] = DICTIONARY
TASKS["two_gaussians"] = TWO_GAUSSIANS
SAMPLE_MODELS["kmeans"] = KMEANS
SAMPLE_MODELS["two_experts"] = TWO_EXPERTS
