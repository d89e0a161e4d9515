"""Models: trained networks. A model has `init` and `apply`, which also returns the decisions of its gates."""

from routed.models import dense
from routed.models.decoder import decoder
from routed.models.language_model import expert_axis
from routed.models.model import INITIAL, LAYER, ROUTED, Model, ModelPart, Outputs, Site
from routed.models.single_layer import single_layer
from routed.models.t5 import t5
from routed.models.transformer_settings import DECODER, TRANSFORMER, check_decoder, check_t5
from routed.models.transformer_sizes import flops_of_decoder_row, flops_per_row

_TRANSFORMER = tuple(f"transformer.{name}" for name in TRANSFORMER)
_TWIN = ("selection.k", "selection.capacity_factor", "selection.capacity_rule")

#: name -> model, for tasks of samples.
SAMPLE_MODELS: dict[str, ModelPart] = {
    "moe": ModelPart(single_layer, routed=True, uses=ROUTED, reads=(*LAYER, *INITIAL, "experts.learning_rate")),
    "dense_active": ModelPart(
        dense.dense_active,
        reads=("experts.count", "experts.depth", "experts.width", "experts.activation", "experts.learning_rate"),
    ),
    "dense_total": ModelPart(
        dense.dense_total,
        reads=("experts.count", "experts.depth", "experts.width", "experts.activation", "experts.learning_rate"),
    ),
    "dense_expert": ModelPart(dense.dense_expert, uses=("experts.name",), reads=("experts.learning_rate",)),
}

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
    "decoder": ENCODER_DECODERS["moe"]._replace(
        build=decoder, reads=(*ENCODER_DECODERS["moe"].reads, *_DECODER), check=check_decoder
    ),
    "decoder_active": ENCODER_DECODERS["dense_active"]._replace(
        build=decoder, reads=(*ENCODER_DECODERS["dense_active"].reads, *_DECODER), check=check_decoder
    ),
    "decoder_total": ENCODER_DECODERS["dense_total"]._replace(
        build=decoder, reads=(*ENCODER_DECODERS["dense_total"].reads, *_DECODER), check=check_decoder
    ),
}

__all__ = [
    "DECODERS",
    "ENCODER_DECODERS",
    "SAMPLE_MODELS",
    "Model",
    "ModelPart",
    "Outputs",
    "Site",
    "expert_axis",
    "flops_of_decoder_row",
    "flops_per_row",
]
