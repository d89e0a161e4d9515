"""The one training program, the problems that it trains, and their optimisers."""

from routed.training.classifier import CLASSIFIER
from routed.training.decoder import DECODER
from routed.training.encoder_decoder import ENCODER_DECODER
from routed.training.problem import ProblemPart
from routed.training.samples import SAMPLES

#: name -> problem; the model says which is its own, among those for the data.
PROBLEMS: dict[str, ProblemPart] = {
    "samples": SAMPLES,
    "encoder_decoder": ENCODER_DECODER,
    "decoder": DECODER,
    "classifier": CLASSIFIER,
}

__all__ = ["PROBLEMS", "ProblemPart"]
