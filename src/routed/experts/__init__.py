"""Experts: ONE expert each, on tokens; the layer maps them. The dense twins are the same modules, wider or deeper."""

from ml_collections import ConfigDict

from routed.experts.activations import ACTIVATIONS
from routed.experts.cnn import Cnn
from routed.experts.constant import Constant
from routed.experts.expert import Affine, Expert
from routed.experts.ffn import Ffn
from routed.experts.mlp import Linear, Mlp
from routed.settings.setting import LAYERS, RATE, Setting, at_least, one_of, refuse


def _check_cnn(config: ConfigDict) -> None:
    if config.experts.init == "stacked":
        refuse("experts.init", "stacked", "of experts.name=mlp only; use lecun or uniform")


#: name -> ONE expert. Experts of images compute on what stands beside an image and on the router's features of it:
#: rows.
EXPERTS: dict[str, Expert] = {
    "constant": Expert(
        lambda node, outputs: Constant(outputs), tokens=(), affine=lambda params: Affine(None, params["value"][:, 0])
    ),
    "linear": Expert(
        lambda node, outputs: Linear(outputs),
        tokens=("rows", "images", "hidden"),
        affine=lambda params: Affine(params["Dense_0"]["kernel"], params["Dense_0"]["bias"]),
    ),
    "mlp": Expert(
        lambda node, outputs: Mlp(outputs, node.depth, node.width, node.activation, node.init),
        tokens=("rows", "images", "hidden"),
        reads=("depth", "width", "activation", "init"),
    ),
    "cnn": Expert(
        lambda node, outputs: Cnn(outputs, node.width, node.activation, node.bias, node.init, node.init_scale),
        tokens=("patches",),
        settings={
            "bias": Setting(False, "a bias for each filter"),
            "init_scale": Setting(1.0, "times that", at_least(0)),
        },
        reads=("width", "activation", "init"),
        check=_check_cnn,
    ),
    "ffn": Expert(
        lambda node, outputs: Ffn(outputs, node.width, node.activation),
        tokens=("rows", "images", "hidden"),
        reads=("width", "activation"),
    ),
    "gated_ffn": Expert(
        lambda node, outputs: Ffn(outputs, node.width, node.activation, gated=True),
        tokens=("rows", "images", "hidden"),
        reads=("width", "activation"),
    ),
}

#: Settings of the node `experts` that several experts, or the models around them, read.
SHARED: dict[str, Setting] = {
    "count": Setting(64, "experts", at_least(1)),
    "depth": Setting(3, "weight layers of an mlp", LAYERS),
    "init": Setting(
        "lecun",
        "lecun: N(0, 1 / dim), biases 0; uniform: on +- 1 / sqrt(dim), biases too; stacked (mlp): on +- 1 / sqrt(dim"
        " outputs), biases 0",
        one_of(("lecun", "uniform", "stacked")),
        omit_default_from_identity=True,
    ),
    "width": Setting(
        96,
        "hidden units; of a cnn: filters for each output; of a network on images: of its first convolution",
        at_least(1),
    ),
    "activation": Setting("relu", "between the layers", one_of(ACTIVATIONS)),
    "learning_rate": Setting(0.01, "of the experts' parameters", RATE, traced=True),
}

__all__ = ["ACTIVATIONS", "EXPERTS", "SHARED", "Cnn", "Constant", "Expert", "Ffn", "Linear", "Mlp"]
