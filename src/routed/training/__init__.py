"""The one training program, the problems that it trains, their probes, and their optimisers."""

from routed.training import router_probes, sample_probes, text_gates, text_probes, user_metrics
from routed.training.decoder import DECODER
from routed.training.encoder_decoder import ENCODER_DECODER
from routed.training.probes import PROBES, Probe
from routed.training.problem import ProblemPart
from routed.training.program_columns import PROGRAM
from routed.training.samples import SAMPLES

#: name -> problem; the model says which is its own, among those for the data.
PROBLEMS: dict[str, ProblemPart] = {
    "samples": SAMPLES,
    "encoder_decoder": ENCODER_DECODER,
    "decoder": DECODER,
}

PROBES |= {
    "program": Probe(columns=PROGRAM),
    "sample_loss": sample_probes.LOSS,
    "sample_experts": sample_probes.EXPERTS,
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
    "metrics_on_samples": user_metrics.ON_SAMPLES,
    "metrics_on_text": user_metrics.ON_TEXT,
}

__all__ = ["PROBES", "PROBLEMS", "ProblemPart"]
