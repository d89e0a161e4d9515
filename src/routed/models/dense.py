"""Dense twins of the single layer: networks without a router, of the size of one expert or of the whole layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed.experts import EXPERTS
from routed.experts.mlp import Mlp, mlp_parameters, width_for
from routed.kernels.ragged import alone
from routed.models.model import INITIAL, LAYER, ROUTED, Model, ModelPart, Outputs
from routed.models.single_layer import per_sample, single_layer
from routed.settings.tree import node_of
from routed.tasks import TASKS


def dense_active(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds an MLP with the parameters, hence the FLOPs per token, of the router plus one expert."""
    return _deeper(config, experts=1)


def dense_total(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds an MLP with the parameters of the router plus all experts."""
    return _deeper(config, config.experts.count)


def dense_expert(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds a model of one expert, with the expert's depth."""
    part = EXPERTS[config.experts.name]
    net = part.make(node_of(config).experts, TASKS[config.data.name].outputs(config.data))
    if "rows" in part.tokens:
        return on_rows(net)

    def run(weights, tokens):
        return alone(lambda weights, block: net.apply({"params": weights}, block), weights, tokens)

    return _applied(net, lambda batch: batch.tokens, run)


def _deeper(config: ConfigDict, experts: int) -> Model:
    """Builds an MLP that is one layer deeper than an expert (Dikkala et al. 2023, Fig. 3a).

    The MLP has the parameters of the router and of `experts` experts.
    """
    task, experts_config = TASKS[config.data.name], config.experts
    inputs, outputs, depth = task.dims(config.data), task.outputs(config.data), experts_config.depth
    budget = inputs * experts_config.count + mlp_parameters(inputs, outputs, depth, experts_config.width) * experts
    return on_rows(Mlp(outputs, depth + 1, width_for(budget, inputs, outputs, depth + 1), experts_config.activation))


def on_rows(net: nn.Module) -> Model:
    """Builds a model that applies the net to flat tokens, joined with the side inputs of the batch."""

    def rows(batch):
        flat = batch.tokens.reshape(len(batch.tokens), -1)
        return flat if batch.side is None else jnp.concatenate([batch.side, flat], -1)

    return _applied(net, rows, lambda weights, x: net.apply({"params": weights}, x))


def _applied(net: nn.Module, inputs: Callable[[Any], Any], run: Callable[[Any, Any], Any]) -> Model:
    """Builds a model without a router that runs a net on `inputs(batch)`."""

    def init(key, batch):
        return {"router": {}, "experts": net.init(key, inputs(batch)[:1])["params"]}, {}

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        return Outputs(per_sample(run(params["experts"], inputs(batch)), batch), {}, state)

    return Model(init, apply)


_DENSE = ("experts.count", "experts.depth", "experts.width", "experts.activation", "experts.learning_rate")

#: name -> model, for tasks of samples.
SAMPLE_MODELS: dict[str, ModelPart] = {
    "moe": ModelPart(single_layer, routed=True, uses=ROUTED, reads=(*LAYER, *INITIAL, "experts.learning_rate")),
    "dense_active": ModelPart(dense_active, reads=_DENSE),
    "dense_total": ModelPart(dense_total, reads=_DENSE),
    "dense_expert": ModelPart(dense_expert, uses=("experts.name",), reads=("experts.learning_rate",)),
}
