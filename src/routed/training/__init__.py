"""The one training program, the problems that it trains, their probes, and their optimisers."""

from routed.training import router_probes, sample_probes, samples, text_gates, text_probes
from routed.training.language import DECODER, ENCODER_DECODER
from routed.training.probes import PROBES
from routed.training.problem import ProblemPart

#: name -> problem; the model says which is its own, among those for the data.
PROBLEMS: dict[str, ProblemPart] = {"samples": samples.SAMPLES, "encoder_decoder": ENCODER_DECODER, "decoder": DECODER}

PROBES |= {
    "sample_loss": sample_probes.LOSS,
    "sample_experts": samples.EXPERTS,
    "accuracy": sample_probes.ACCURACY,
    "mixture": sample_probes.MIXTURE,
    "bayes": sample_probes.BAYES,
    "declared": sample_probes.DECLARED,
    "training_gates": sample_probes.TRAINING_GATES,
    "training_dispatch": sample_probes.TRAINING_DISPATCH,
    "initial_clusters": sample_probes.INITIAL_CLUSTERS,
    "router": router_probes.COLUMNS,
    "clusters": router_probes.CLUSTERS,
    "shuffled": router_probes.SHUFFLED,
    "groupings": router_probes.GROUPINGS,
    "weights": router_probes.WEIGHTS,
    "text_losses": text_probes.LOSSES,
    "text_experts": text_probes.EXPERTS,
    "text_flops": text_probes.FLOPS,
    "test_rows": text_probes.TEST_ROWS,
    "text_gates": text_gates.GATES,
    "metrics_on_samples": sample_probes.METRICS,
    "metrics_on_text": text_probes.METRICS,
}

__all__ = ["PROBES", "PROBLEMS", "ProblemPart"]
