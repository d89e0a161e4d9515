"""One layer on samples: the MoE of the synthetic experiments, and its dense twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed import selection
from routed.dispatch import DISPATCHES
from routed.experts import EXPERTS, Mlp, mlp_parameters, width_for
from routed.moe import MoE
from routed.routers import ROUTERS
from routed.words import Batch


class Model(NamedTuple):
    """Pure functions.

    init(key, batch) -> params {router, experts}; apply(params, batch, rule, dispatch) -> (outputs [T, O], routing or
    None), where `rule` is the config node of a selection and `dispatch` a name; scores(params, batch) -> [T, E], of models with a router.
    """

    init: Callable[[Any, Batch], Any]
    apply: Callable[[Any, Batch, ConfigDict, str], tuple[Any, Any]]
    scores: Callable[[Any, Batch], Any] | None


def outputs(config: ConfigDict) -> int:
    """Outputs per sample."""
    return config.data.target_dim if config.data.target == "constant" else 1


def _moe(config: ConfigDict) -> Model:
    count = config.experts.count

    def layer(rule, dispatch) -> MoE:
        return MoE(
            router=ROUTERS[config.router.name](count),
            expert=EXPERTS[config.experts.name](config.experts, outputs(config)),
            num_experts=count,
            select=selection.build(rule),
            dispatch=DISPATCHES[dispatch],
        )

    def init(key, batch):
        params = layer(config.selection, config.dispatch).init(key, batch.x, cluster=batch.cluster)["params"]
        return {"router": params.get("router", {}), "experts": params["experts"]}

    def apply(params, batch, rule, dispatch):
        return layer(rule, dispatch).apply({"params": params}, batch.x, cluster=batch.cluster)

    def scores(params, batch):
        router = ROUTERS[config.router.name](count)
        return router.apply({"params": params["router"]}, batch.x, cluster=batch.cluster)

    return Model(init, apply, scores)


def _dense(config: ConfigDict) -> Model:
    """An MLP one layer deeper than an expert (Dikkala et al. 2023, Fig. 3a), with the router's share counted.

    dense_active: parameters (so FLOPs per token) of the router plus one expert, what one token uses at evaluation;
    dense_total: parameters of the router plus all experts.
    """
    inputs = config.data.dim + config.data.spurious_dims
    experts = 1 if config.model == "dense_active" else config.experts.count
    one = mlp_parameters(inputs, outputs(config), config.experts.depth, config.experts.width)
    budget = inputs * config.experts.count + experts * one
    depth = config.experts.depth + 1
    mlp = Mlp(outputs(config), depth, width_for(budget, inputs, outputs(config), depth))

    def init(key, batch):
        return {"router": {}, "experts": mlp.init(key, batch.x[:1])["params"]}

    def apply(params, batch, rule, dispatch):
        del rule, dispatch
        return mlp.apply({"params": params["experts"]}, batch.x), None

    return Model(init, apply, scores=None)


MODELS = {"moe": _moe, "dense_active": _dense, "dense_total": _dense}


def build(config: ConfigDict) -> Model:
    """The model that the config describes."""
    return MODELS[config.model](config)
