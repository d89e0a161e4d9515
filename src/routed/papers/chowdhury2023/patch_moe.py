"""Patch-level mixtures with experts of neurons, and a network on all patches (Chowdhury et al. 2023, Section 3)."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.experts import EXPERTS
from routed.experts.activations import ACTIVATIONS
from routed.experts.expert import Expert
from routed.kernels.matmul import dense_layer
from routed.layer.selection import SELECTIONS
from routed.models.dense import on_rows
from routed.models.model import INITIAL, LAYER, ROUTED, Model, ModelPart, Outputs
from routed.models.single_layer import single_layer
from routed.settings.setting import Setting, at_least, one_of, refuse
from routed.settings.tree import node_of
from routed.tasks import TASKS

#: The module of the output weights.
READOUT = "readout"


class Neurons(nn.Module):
    """f_o(x) = sum_r a_ro s(<w_r, x>), without biases; w ~ N(0, std^2), a ~ N(0, 1) (Chowdhury et al. 2023, Section 3,
    s = ReLU).

    With `top_responses` = l the tokens of a sample are one input [B, n, D] with one output [B, O]: each neuron gives
    the mean of its l largest responses.
    """

    outputs: int
    width: int
    std: float
    activation: str = "relu"
    top_responses: int = 0

    @nn.compact
    def __call__(self, x: Float[Array, "T *n D"]) -> Float[Array, "T O"]:
        hidden = dense_layer(self.width, use_bias=False, kernel_init=nn.initializers.normal(self.std), name="hidden")
        readout = dense_layer(self.outputs, use_bias=False, kernel_init=nn.initializers.normal(1.0), name=READOUT)
        responses = ACTIVATIONS[self.activation](hidden(x))
        # A mask, as choosing by index costs more than the product; equal responses of ReLU are 0.
        if self.top_responses:
            least = jax.lax.stop_gradient(jnp.sort(responses, axis=1)[:, -self.top_responses])
            responses = jnp.where(responses >= least[:, None], responses, 0.0).sum(1) / self.top_responses
        return readout(responses)


NEURONS = Expert(
    lambda node, outputs: Neurons(
        outputs, node.width, node.init_std or 1 / math.sqrt(node.count * node.width), node.activation
    ),
    tokens=("rows",),
    settings={
        "init_std": Setting(0.0, "of the hidden weights; 0: 1 / sqrt(neurons of all experts) (theory)", at_least(0))
    },
    reads=("count", "width", "activation"),
    readout=READOUT,
)


#: Settings of both models.
READOUTS: dict[str, Setting] = {
    "experts.readout": Setting(
        "normal",
        "fixed output weights of neurons: normal, N(0, 1) (paper), or signs, 1 and -1 by turns from expert to expert "
        "(released)",
        one_of(("normal", "signs")),
    )
}
#: Settings of the mixture.
POOLING: dict[str, Setting] = {
    "experts.pooling": Setting(
        "chosen",
        "outputs are divided by the patches an expert takes (paper), or by all of a sample (released)",
        one_of(("chosen", "all")),
    )
}

#: Settings of the network on all patches.
LARGEST: dict[str, Setting] = {
    "experts.top_responses": Setting(
        0,
        "each neuron gives the mean of so many of its largest responses to the patches of a sample; 0: of all",
        at_least(0),
    )
}


def patch_moe(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds f(x) = sum_s sum_{j in J_s(x)} G_js / l sum_r a_rs ReLU(<w_rs, x_j>): each expert s takes l patches J_s.

    The layer is that of `moe`. The output weights a are never trained and form the group `fixed`.
    """
    layer, experts_config = single_layer(config, mesh), config.experts
    readout = EXPERTS[experts_config.name].readout
    chosen = experts_config.pooling == "chosen"

    def init(key, batch):
        params, state = layer.init(key, batch)
        signs = _signs(experts_config.count, experts_config.width) if experts_config.readout == "signs" else None
        return _fixed(params, readout, signs), state

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        outputs = layer.apply(_joined(params), state, batch, rule, dispatch, key, step)
        return outputs._replace(prediction=outputs.prediction / (rule.patches if chosen else batch.cluster.shape[1]))

    def responses(params, site, features):
        return layer.responses(_joined(params), site, features)

    return Model(init, apply, layer.scores, responses)


def patch_cnn(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds f(x) = 1/n sum_j sum_r a_r ReLU(<w_r, x_j>): one network on all n patches.

    The network has as many neurons as the mixture's experts together. It equals a `patch_moe` with the same weights
    whose experts take all patches with gates of 1. With `experts.top_responses` = l, the mean of a neuron is over its l
    largest responses: each neuron picks its patches without a router.
    """
    experts_config = node_of(config).experts
    outputs, count, width = TASKS[config.data.name].outputs(config.data), experts_config.count, experts_config.width
    experts_config.count, experts_config.width = 1, count * width
    part = EXPERTS[experts_config.name]
    expert = part.make(experts_config, outputs)
    net = on_rows(expert)

    def init(key, batch):
        params, state = net.init(key, batch)
        signs = _signs(count, width).reshape(1, -1, 1) if experts_config.readout == "signs" else None
        return _fixed(params, part.readout, signs), state

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        if experts_config.top_responses:
            patches = batch.x.reshape(*batch.cluster.shape, -1)
            tree = {"params": _joined(params)["experts"]}
            return Outputs(expert.clone(top_responses=experts_config.top_responses).apply(tree, patches), {}, state)
        outputs = net.apply(_joined(params), state, batch, rule, dispatch, key, step)
        return outputs._replace(prediction=outputs.prediction / batch.cluster.shape[1])

    return Model(init, apply)


def check_moe(config: ConfigDict) -> None:
    """Refuses tasks whose samples have one token, unfit experts, and selections that do not choose among patches."""
    _check(config)
    check_selections(config)


def check_cnn(config: ConfigDict) -> None:
    """Refuses tasks whose samples have one token, unfit experts, and a mean over more responses than patches."""
    _check(config)
    if config.experts.top_responses > (most := TASKS[config.data.name].positions(config.data)):
        refuse(
            "experts.top_responses",
            config.experts.top_responses,
            f"is more than the {most} patches of a sample; lower it",
        )


def _check(config: ConfigDict) -> None:
    """Refuses tasks whose samples have one token, and experts without fixed output weights."""
    if TASKS[config.data.name].positions(config.data) < 2:
        refuse(
            "model",
            config.model,
            f"needs samples of several patches, those of data.name={config.data.name!r} have one token",
        )
    if not EXPERTS[config.experts.name].readout:
        fits = [name for name, part in EXPERTS.items() if part.readout]
        reason = f"model={config.model!r} has fixed output weights; use {' or '.join(map(repr, fits))}"
        refuse("experts.name", config.experts.name, reason)


def check_selections(config: ConfigDict) -> None:
    """Refuses selections whose experts do not choose among the patches of a sample."""
    for key, name in (("selection.name", config.selection.name), ("selection.eval.name", config.selection.eval.name)):
        if not SELECTIONS[name].within_samples:
            fits = [selection for selection, part in SELECTIONS.items() if part.within_samples]
            reason = f"experts of model={config.model!r} take patches of a sample; use {' or '.join(map(repr, fits))}"
            refuse(key, name, reason)


def _signs(count: int, width: int) -> Float[Array, "E H 1"]:
    """Returns output weights: 1 for the neurons of experts 0, 2, ..., and -1 for the neurons of experts 1, 3, ..."""
    return jnp.broadcast_to((1.0 - 2.0 * (jnp.arange(count) % 2))[:, None, None], (count, width, 1))


def _fixed(params: dict[str, Any], readout: str, weights: Float[Array, "E H 1"] | None) -> dict[str, Any]:
    """Moves the output weights, the module `readout`, to the group `fixed`, with the values `weights` if given."""
    experts = dict(params["experts"])
    readout_params = experts.pop(readout)
    if weights is not None:
        readout_params = jax.tree.map(
            lambda a: jnp.broadcast_to(weights.reshape(*a.shape[:-1], 1), a.shape), readout_params
        )
    return params | {"experts": experts, "fixed": {readout: readout_params}}


def _joined(params: dict[str, Any]) -> dict[str, Any]:
    """Moves the group `fixed` back to the experts' parameters of the layer.

    The output weights get no gradient, so no statistic of gradients counts these weights.
    """
    trained = {name: group for name, group in params.items() if name != "fixed"}
    return trained | {"experts": params["experts"] | jax.lax.stop_gradient(params["fixed"])}


#: Experts that choose patches, and one network on all patches.
PATCH_MOE = ModelPart(
    patch_moe,
    routed=True,
    uses=ROUTED,
    reads=(*LAYER, *INITIAL, "experts.learning_rate"),
    settings=READOUTS | POOLING,
    check=check_moe,
)
PATCH_CNN = ModelPart(
    patch_cnn,
    uses=("experts.name",),
    reads=("experts.count", "experts.learning_rate"),
    settings=READOUTS | LARGEST,
    check=check_cnn,
)
