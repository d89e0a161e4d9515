"""One MoE layer on samples: the model of the synthetic experiments."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.experts import EXPERTS
from routed.layer.moe import CONTROL, MoE
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import SELECTIONS, in_samples
from routed.metrics.router import PROBE
from routed.models.model import Model, Outputs, Site
from routed.routers import ROUTERS, Flat, router_context
from routed.routers.noise import noise_settings
from routed.routers.scores import layer_scores
from routed.settings.tree import node_of
from routed.tasks import TASKS
from routed.tasks.task import watch_nothing

#: The name of the only site.
SITE = "layer"


def single_layer(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds the model of one layer.

    Parameters are `router` and `experts`. The group `router` holds the noise that learns and, for images with side
    inputs, the features that the experts read too.
    """
    task, count, node = TASKS[config.data.name], config.experts.count, node_of(config)
    router = ROUTERS[config.router.name].make(node.router, count)
    stem = getattr(router, "features", None) if task.side(config.data) else None
    expert = EXPERTS[config.experts.name].make(node.experts, task.outputs(config.data))
    functions = _Functions(config, router, stem, expert)
    watch = functions.watch if EXPERTS[config.experts.name].embeds and config.experts.embeddings else watch_nothing
    return Model(functions.init, functions.apply, functions.scores, functions.responses, watch)


@dataclasses.dataclass(frozen=True, eq=False)
class _Functions:
    """The functions of a single layer, and their static arguments."""

    config: ConfigDict
    router: Any
    #: The module of features that the experts read too, or None.
    stem: Any
    expert: Any

    def layer(self, rule: SelectionRule, dispatch: str) -> MoE:
        config = self.config
        return MoE(
            router=self.router if self.stem is None else self.router.clone(features=Flat()),
            expert=self.expert,
            num_experts=config.experts.count,
            rule=rule,
            dispatch=dispatch,
            balance_rate=rule.balance_rate,
            **noise_settings(config, SELECTIONS[rule.name].chooses),
        )

    def context(self, batch: Batch, step) -> dict[str, Any]:
        """Returns the inputs of the router beside the tokens."""
        needs = ROUTERS[self.config.router.name].needs
        return router_context(needs, cluster=batch.label, step=step, steps=self.config.steps)

    def inputs(self, router_params, batch):
        """Returns the inputs of the experts, and the inputs of the router."""
        if self.stem is None:
            return batch.tokens if batch.side is None else batch.side, batch.tokens
        features = self.stem.apply({"params": router_params["features"]}, batch.tokens)
        return jnp.concatenate([batch.side, features], -1), features

    def init(self, key, batch):
        rule = selection_rule(node_of(self.config).selection)._replace(group_size=0)  # fits any number of samples
        moe = self.layer(rule, self.config.dispatch)
        router_params = {} if self.stem is None else {"features": self.stem.init(key, batch.tokens)["params"]}
        tokens, routed_by = self.inputs(router_params, batch)
        state = dict(nn.meta.unbox(moe.init(key, tokens, routed_by=routed_by, **self.context(batch, 0))))
        params = state.pop("params")
        router_params |= params.get("router", {}) | ({"noise": params["noise"]} if "noise" in params else {})
        return {"router": router_params, "experts": params["experts"]}, state

    def apply(self, params, state, batch, rule, dispatch, key=None, step=0):
        router_params = dict(params["router"])
        tokens, routed_by = self.inputs(router_params, batch)
        if self.stem is not None:
            del router_params["features"]
        noise = router_params.pop("noise", {})
        variables = {"params": {"noise": noise, "router": router_params, "experts": params["experts"]}, **state}
        moving = {"rngs": {"noise": key}, "mutable": list(state)} if key is not None else {"mutable": []}
        rule = in_samples(rule, len(batch.tokens) // len(batch.x))
        (y, routing), moved = self.layer(rule, dispatch).apply(
            variables, tokens, routed_by=routed_by, **self.context(batch, step), **moving
        )
        return Outputs(per_sample(y, batch), {SITE: Site(routing, tokens)}, moved or state)

    def scores(self, params, state, site, features, batch, step=0):
        router_params = {name: value for name, value in params["router"].items() if name != "noise"}
        state_of_router = {name: tree["router"] for name, tree in state.items() if "router" in tree}
        (x,) = features
        apply_router = partial(self.router.apply, {"params": router_params, **state_of_router})
        return layer_scores(apply_router, x, self.context(batch, step), sharpness(state))[None]

    def responses(self, params, site, features):
        (x,) = features
        apply = lambda expert_params: self.expert.apply({"params": expert_params}, x)  # noqa: E731
        each = jax.vmap(apply)(params["experts"])  # [E, T or 1, O]
        return jnp.broadcast_to(each, (self.config.experts.count, len(x), each.shape[-1])).swapaxes(0, 1)[None]

    def watch(self, params, world, test, key):
        """Returns the embeddings of the first test images by each expert."""
        tokens = test.tokens[:PROBE]
        embed = lambda p: self.expert.apply({"params": p}, tokens, method="embed")  # noqa: E731
        return {"embeddings": jax.lax.map(embed, params["experts"]).swapaxes(0, 1)}


def sharpness(state) -> Float[Array, ""] | float:
    """Returns the factor on the scores from a layer's state, or 1 if the state has no factor."""
    return state[CONTROL]["sharpness"] if CONTROL in state else 1.0


def per_sample(y: Float[Array, "T O"], batch: Batch) -> Float[Array, "B O"]:
    """Sums the outputs of the tokens of each sample."""
    return y.reshape(*batch.cluster.shape, -1).sum(1) if batch.cluster.ndim > 1 else y
