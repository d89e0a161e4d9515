"""Models: trained networks. A model has `init` and `apply`, which also returns the decisions of its gates."""

from routed.models.decoder import decoder
from routed.models.dense import SAMPLE_MODELS
from routed.models.language_model import expert_axis
from routed.models.model import LAYER, ROUTED, ModelPart
from routed.models.t5 import t5
from routed.models.transformer_sizes import (
    DECODER,
    TRANSFORMER,
    check_decoder,
    check_t5,
    flops_of_decoder_row,
    flops_per_row,
)

_TRANSFORMER = tuple(f"transformer.{name}" for name in TRANSFORMER)
_TWIN = ("selection.k", "selection.capacity_factor", "selection.capacity_rule")

#: name -> model, for text in and text out.
ENCODER_DECODERS: dict[str, ModelPart] = {
    "moe": ModelPart(
        t5,
        routed=True,
        uses=ROUTED,
        reads=(*LAYER, *_TRANSFORMER, "experts.learning_rate", "experts.activation", "router.stop_gradient"),
        check=check_t5,
    ),
    "dense_active": ModelPart(
        t5,
        uses=("experts.name",),
        reads=(*_TRANSFORMER, *_TWIN, "experts.count", "experts.activation"),
        check=check_t5,
    ),
    "dense_total": ModelPart(
        t5,
        uses=("experts.name",),
        reads=(*_TRANSFORMER, "experts.count", "experts.activation"),
        check=check_t5,
    ),
}

_DECODER = (*_TRANSFORMER, *(f"transformer.{name}" for name in DECODER))

#: name -> model, for next-token prediction.
DECODERS: dict[str, ModelPart] = {
    name: ENCODER_DECODERS[twin]._replace(
        build=decoder, reads=(*ENCODER_DECODERS[twin].reads, *_DECODER), check=check_decoder
    )
    for name, twin in (("decoder", "moe"), ("decoder_active", "dense_active"), ("decoder_total", "dense_total"))
}

__all__ = ["SAMPLE_MODELS", "expert_axis", "flops_of_decoder_row", "flops_per_row"]
