"""One layer on samples: the MoE of the synthetic experiments, and its dense twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
from ml_collections import ConfigDict

from routed.experts import EXPERTS, Mlp, mlp_parameters, width_for
from routed.moe import MoE
from routed.routers import ROUTERS
from routed.selection import Rule, rule_of


class Model(NamedTuple):
    """Pure functions.

    init(key, batch) -> (params {router, experts}, state), where `state` moves by rules of its own, not by gradients;
    apply(params, state, batch, rule, dispatch, key) -> (outputs [T, O], routing or None, state): with a key as in training (its
    noise; the state moves), with None as in evaluation; scores(params, batch) -> [T, E], of models with a router.
    """

    init: Callable[[Any, Any], tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any, Any]]
    scores: Callable[..., Any] | None


def outputs(config: ConfigDict) -> int:
    """Outputs per sample."""
    return config.data.target_dim if config.data.target == "constant" else 1


def _moe(config: ConfigDict) -> Model:
    count = config.experts.count
    router = ROUTERS[config.router.name](config.router, count)

    def layer(rule: Rule, dispatch: str) -> MoE:
        return MoE(
            router=router,
            expert=EXPERTS[config.experts.name](config.experts, outputs(config)),
            num_experts=count,
            rule=rule,
            dispatch=dispatch,
            noise=config.router.noise,
            noise_scale=config.router.noise_scale,
            noise_in_weights=config.router.noise_in_weights,
            balance_rate=config.selection.balance_rate,
        )

    def init(key, batch):
        moe = layer(rule_of(config.selection), config.dispatch)
        state = dict(nn.meta.unbox(moe.init(key, batch.x, cluster=batch.cluster)))
        params = state.pop("params")
        own = params.get("router", {}) | ({"noise": params["noise"]} if "noise" in params else {})
        return {"router": own, "experts": params["experts"]}, state

    def apply(params, state, batch, rule, dispatch, key=None):
        own = dict(params["router"])
        variables = {"params": {"noise": own.pop("noise", {}), "router": own, "experts": params["experts"]}, **state}
        moving = {"rngs": {"noise": key}, "mutable": list(state)} if key is not None else {"mutable": []}
        (y, routing), moved = layer(rule, dispatch).apply(variables, batch.x, cluster=batch.cluster, **moving)
        return y, routing, moved or state

    def scores(params, batch):
        own = {name: value for name, value in params["router"].items() if name != "noise"}
        return router.apply({"params": own}, batch.x, cluster=batch.cluster)

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
        return {"router": {}, "experts": mlp.init(key, batch.x[:1])["params"]}, {}

    def apply(params, state, batch, rule, dispatch, key=None):
        del rule, dispatch, key
        return mlp.apply({"params": params["experts"]}, batch.x), None, state

    return Model(init, apply, scores=None)


MODELS = {"moe": _moe, "dense_active": _dense, "dense_total": _dense}


def build(config: ConfigDict) -> Model:
    """The model that the config describes."""
    return MODELS[config.model](config)
