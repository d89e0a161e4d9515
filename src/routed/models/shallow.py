"""One layer on samples: the MoE of the synthetic experiments, and its dense twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.data import TASKS
from routed.dispatch import alone
from routed.experts import EXPERTS, Mlp, mlp_parameters, width_for
from routed.moe import MoE
from routed.routers import ROUTERS, Flat
from routed.selection import Rule, rule_of
from routed.words import Batch


class Model(NamedTuple):
    """Pure functions.

    init(key, batch) -> (params {router, experts}, state), where `state` moves by rules of its own, not by gradients;
    apply(params, state, batch, rule, dispatch, key) -> (outputs [B, O], routing or None, state): with a key there is noise, and the
    state that is returned has moved, as in training; scores(params, tokens, label) -> [T, E], of models with a router;
    watch(params, world, test, key) -> columns of its own, seen at an evaluation.
    """

    init: Callable[[Any, Any], tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any, Any]]
    scores: Callable[..., Any] | None
    watch: Callable[..., dict[str, Array]] = lambda params, world, test, key: {}


def _moe(config: ConfigDict) -> Model:
    task, count = TASKS[config.data.name], config.experts.count
    router = ROUTERS[config.router.name](config.router, count)
    stem = getattr(router, "features", None) if task.side(config.data) else None
    head = router if stem is None else router.clone(features=Flat())

    def layer(rule: Rule, dispatch: str) -> MoE:
        return MoE(
            router=head,
            expert=EXPERTS[config.experts.name](config.experts, task.outputs(config.data)),
            num_experts=count,
            rule=rule,
            dispatch=dispatch,
            noise=config.router.noise,
            noise_scale=config.router.noise_scale,
            noise_in_weights=config.router.noise_in_weights,
            balance_rate=config.selection.balance_rate,
        )

    def inputs(own, batch):
        """What the experts compute on and what the router scores: the tokens, or what stands beside them and their features."""
        if stem is None:
            return batch.tokens if batch.side is None else batch.side, batch.tokens
        features = stem.apply({"params": own["features"]}, batch.tokens)
        return jnp.concatenate([batch.side, features], -1), features

    def init(key, batch):
        moe = layer(rule_of(config.selection), config.dispatch)
        own = {} if stem is None else {"features": stem.init(key, batch.tokens)["params"]}
        tokens, seen = inputs(own, batch)
        state = dict(nn.meta.unbox(moe.init(key, tokens, routed_by=seen, cluster=batch.label)))
        params = state.pop("params")
        own |= params.get("router", {}) | ({"noise": params["noise"]} if "noise" in params else {})
        return {"router": own, "experts": params["experts"]}, state

    def apply(params, state, batch, rule, dispatch, key=None):
        own = dict(params["router"])
        tokens, seen = inputs(own, batch)
        if stem is not None:
            del own["features"]
        variables = {"params": {"noise": own.pop("noise", {}), "router": own, "experts": params["experts"]}, **state}
        moving = {"rngs": {"noise": key}, "mutable": list(state)} if key is not None else {"mutable": []}
        (y, routing), moved = layer(rule, dispatch).apply(
            variables, tokens, routed_by=seen, cluster=batch.label, **moving
        )
        return per_sample(y, batch), routing, moved or state

    def scores(params, tokens, label):
        own = {name: value for name, value in params["router"].items() if name != "noise"}
        return router.apply({"params": own}, tokens, cluster=label)

    return Model(init, apply, scores)


def per_sample(y: Float[Array, "T O"], batch: Batch) -> Float[Array, "B O"]:
    """The outputs of a sample's tokens, added up."""
    return y.reshape(*batch.cluster.shape, -1).sum(1) if batch.cluster.ndim > 1 else y


def _dense(config: ConfigDict) -> Model:
    """An MLP one layer deeper than an expert (Dikkala et al. 2023, Fig. 3a), with the router's share counted.

    dense_active: parameters (so FLOPs per token) of the router plus one expert, what one token uses at evaluation;
    dense_total: parameters of the router plus all experts; dense_expert: one expert alone, no deeper.
    """
    task, experts = TASKS[config.data.name], config.experts
    inputs, outputs = task.dims(config.data), task.outputs(config.data)
    if config.model == "dense_expert" and experts.name == "cnn":
        return _single(EXPERTS["cnn"](experts, outputs))
    depth, width = experts.depth, experts.width
    if config.model != "dense_expert":
        one = mlp_parameters(inputs, outputs, depth, width)
        budget = inputs * experts.count + one * (1 if config.model == "dense_active" else experts.count)
        depth, width = depth + 1, width_for(budget, inputs, outputs, depth + 1)
    mlp = Mlp(outputs, depth, width, experts.activation)

    def rows(batch):
        flat = batch.tokens.reshape(len(batch.tokens), -1)
        return flat if batch.side is None else jnp.concatenate([batch.side, flat], -1)

    def init(key, batch):
        return {"router": {}, "experts": mlp.init(key, rows(batch)[:1])["params"]}, {}

    def apply(params, state, batch, rule, dispatch, key=None):
        del rule, dispatch, key
        return per_sample(mlp.apply({"params": params["experts"]}, rows(batch)), batch), None, state

    return Model(init, apply, scores=None)


def _single(net: nn.Module) -> Model:
    """One expert that sees samples in their own shape."""

    def init(key, batch):
        return {"router": {}, "experts": net.init(key, batch.tokens[:1])["params"]}, {}

    def apply(params, state, batch, rule, dispatch, key=None):
        del rule, dispatch, key
        made = alone(lambda params, tokens: net.apply({"params": params}, tokens), params["experts"], batch.tokens)
        return per_sample(made, batch), None, state

    return Model(init, apply, scores=None)


#: name -> model of a config.
MODELS = {"moe": _moe, "dense_active": _dense, "dense_total": _dense, "dense_expert": _dense}
