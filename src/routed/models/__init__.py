"""Models: trained networks. A model has `init` and `apply`, which also returns the decisions of its gates."""

from routed.models.decoder import DECODERS
from routed.models.dense import SAMPLE_MODELS
from routed.models.language_model import expert_axis
from routed.models.t5 import ENCODER_DECODERS
from routed.models.transformer_sizes import flops_of_decoder_row, flops_per_row

__all__ = ["DECODERS", "ENCODER_DECODERS", "SAMPLE_MODELS", "expert_axis", "flops_of_decoder_row", "flops_per_row"]
