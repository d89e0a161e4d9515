"""Models: what is trained. Each is an `init` and an `apply` on a batch; `apply` also returns what its gates decided."""

from routed.models import (
    dense,
    ensemble,
    gated_experts,
    kmeans,
    patch_moe,
    two_experts,
    wide_resnet,
    wide_resnet_settings,
)
from routed.models.classifier import classifier
from routed.models.decoder import decoder
from routed.models.language_model import expert_axis
from routed.models.model import Model, ModelPart, Outputs, Site
from routed.models.single_layer import single_layer
from routed.models.t5 import t5
from routed.models.transformer_settings import DECODER, TRANSFORMER, check_decoder, check_t5
from routed.models.transformer_sizes import flops_of_classifier_row, flops_of_decoder_row, flops_per_row

#: What a layer with a router uses and reads, in any model.
_ROUTED = ("router.name", "router.noise", "experts.name", "selection.name", "selection.eval.name", "dispatch")
_LAYER = ("experts.count", "selection.balance_rate", "selection.no_gradient", "router.frozen", "router.learning_rate")
_INITIAL = ("router.init_scale", "router.from_data", "router.rows", "router.entropy")
_TRANSFORMER = tuple(f"transformer.{name}" for name in TRANSFORMER)
_TWIN = ("selection.k", "selection.capacity_factor", "selection.capacity_rule")

#: name -> model, for tasks of samples.
SAMPLE_MODELS: dict[str, ModelPart] = {
    "moe": ModelPart(single_layer, routed=True, uses=_ROUTED, reads=(*_LAYER, *_INITIAL, "experts.learning_rate")),
    "patch_moe": ModelPart(
        patch_moe.patch_moe,
        routed=True,
        uses=_ROUTED,
        reads=(*_LAYER, *_INITIAL, "experts.learning_rate"),
        settings=patch_moe.READOUTS | patch_moe.POOLING,
        check=patch_moe.check,
    ),
    "patch_cnn": ModelPart(
        patch_moe.patch_cnn,
        uses=("experts.name",),
        reads=("experts.count", "experts.learning_rate"),
        settings=patch_moe.READOUTS | patch_moe.LARGEST,
        check=patch_moe.check,
    ),
    "wide_resnet": ModelPart(
        wide_resnet.wide_resnet,
        targets=("class", "vector"),
        flops=lambda config: wide_resnet.flops(config, routed=False)[0],
        columns=wide_resnet_settings.COLUMNS,
        settings=wide_resnet_settings.SETTINGS,
        reads=("experts.learning_rate",),
        check=wide_resnet.check,
    ),
    "wide_resnet_moe": ModelPart(
        wide_resnet.wide_resnet_moe,
        routed=True,
        targets=("class", "vector"),
        inner=wide_resnet.positions,
        flops=lambda config: wide_resnet.flops(config, routed=True)[0],
        columns=wide_resnet_settings.COLUMNS,
        settings=wide_resnet_settings.SETTINGS | wide_resnet_settings.PATCHES,
        uses=("router.name", "selection.name", "selection.eval.name", "dispatch"),
        reads=(
            "experts.count",
            "experts.width",
            "experts.learning_rate",
            "selection.no_gradient",
            "selection.balance_rate",
            "router.frozen",
            "router.learning_rate",
            "transformer.learning_rate",
        ),
        check=wide_resnet.check_patches,
    ),
    "dense_active": ModelPart(
        dense.dense_active,
        reads=("experts.count", "experts.depth", "experts.width", "experts.activation", "experts.learning_rate"),
    ),
    "dense_total": ModelPart(
        dense.dense_total,
        reads=("experts.count", "experts.depth", "experts.width", "experts.activation", "experts.learning_rate"),
    ),
    "dense_expert": ModelPart(dense.dense_expert, uses=("experts.name",), reads=("experts.learning_rate",)),
    "ensemble": ModelPart(
        ensemble.ensemble,
        every=True,
        targets=("class",),
        uses=("experts.name",),
        reads=("experts.count", "experts.learning_rate"),
    ),
    "kmeans": ModelPart(
        kmeans.kmeans,
        targets=("input",),
        columns=kmeans.COLUMNS,
        reads=("experts.count", "experts.learning_rate"),
    ),
    "gated_experts": ModelPart(
        gated_experts.gated_experts,
        needs=("gated Gaussians",),
        targets=("density",),
        columns=gated_experts.COLUMNS,
        settings=gated_experts.SETTINGS,
        reads=("data.gate", "data.chosen", "experts.learning_rate", "router.frozen", "router.learning_rate"),
    ),
    "two_experts": ModelPart(
        two_experts.two_experts,
        needs=("opposite Gaussians",),
        columns=two_experts.COLUMNS,
        reads=("experts.learning_rate", "router.frozen", "router.learning_rate"),
    ),
}

#: name -> model, for text in and text out.
ENCODER_DECODERS: dict[str, ModelPart] = {
    "moe": ModelPart(
        t5,
        routed=True,
        uses=_ROUTED,
        reads=(*_LAYER, *_TRANSFORMER, "experts.learning_rate", "experts.activation", "router.stop_gradient"),
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

#: name -> model, for text that is continued.
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

#: name -> model, for texts with a class.
CLASSIFIERS: dict[str, ModelPart] = {
    "classifier": DECODERS["decoder"]._replace(
        build=classifier, reads=tuple(key for key in DECODERS["decoder"].reads if key != "transformer.tied")
    ),
}

__all__ = [
    "CLASSIFIERS",
    "DECODERS",
    "ENCODER_DECODERS",
    "SAMPLE_MODELS",
    "Model",
    "ModelPart",
    "Outputs",
    "Site",
    "expert_axis",
    "flops_of_classifier_row",
    "flops_of_decoder_row",
    "flops_per_row",
]
