"""Dense twins of the single layer: the same net without a router, of one expert's size or of the whole layer's."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed.experts import EXPERTS
from routed.experts.mlp import Mlp, mlp_parameters, width_for
from routed.layer.dispatch import alone
from routed.models.model import Model, Outputs
from routed.models.single_layer import per_sample
from routed.settings.tree import node_of
from routed.tasks import TASKS


def dense_active(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """An MLP with the parameters, so the FLOPs per token, of the router plus one expert: what a token uses at evaluation."""
    del mesh
    return _deeper(config, experts=1)


def dense_total(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """An MLP with the parameters of the router plus all experts."""
    del mesh
    return _deeper(config, config.experts.count)


def dense_expert(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """One expert alone, no deeper."""
    del mesh
    part = EXPERTS[config.experts.name]
    net = part.make(node_of(config).experts, TASKS[config.data.name].outputs(config.data))
    return on_rows(net) if "rows" in part.tokens else _on_tokens(net)


def _deeper(config: ConfigDict, experts: int) -> Model:
    """One layer deeper than an expert (Dikkala et al. 2023, Fig. 3a), with the router's share counted."""
    task, own = TASKS[config.data.name], config.experts
    inputs, outputs, depth = task.dims(config.data), task.outputs(config.data), own.depth
    budget = inputs * own.count + mlp_parameters(inputs, outputs, depth, own.width) * experts
    return on_rows(Mlp(outputs, depth + 1, width_for(budget, inputs, outputs, depth + 1), own.activation))


def on_rows(net: nn.Module) -> Model:
    """The net on flat tokens, with what stands beside them."""

    def rows(batch):
        flat = batch.tokens.reshape(len(batch.tokens), -1)
        return flat if batch.side is None else jnp.concatenate([batch.side, flat], -1)

    def init(key, batch):
        return {"router": {}, "experts": net.init(key, rows(batch)[:1])["params"]}, {}

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        del rule, dispatch, key, step
        return Outputs(per_sample(net.apply({"params": params["experts"]}, rows(batch)), batch), {}, state)

    return Model(init, apply)


def _on_tokens(net: nn.Module) -> Model:
    """The net on tokens in their own shape."""

    def init(key, batch):
        return {"router": {}, "experts": net.init(key, batch.tokens[:1])["params"]}, {}

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        del rule, dispatch, key, step
        outputs = alone(lambda own, tokens: net.apply({"params": own}, tokens), params["experts"], batch.tokens)
        return Outputs(per_sample(outputs, batch), {}, state)

    return Model(init, apply)
