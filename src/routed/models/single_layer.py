"""One MoE layer on samples: the model of the synthetic experiments."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.experts import EXPERTS
from routed.layer.moe import CONTROL, MoE
from routed.layer.rule import Rule, rule_of
from routed.layer.selection import in_samples
from routed.metrics.router import PROBE
from routed.models.model import Model, Outputs, Site
from routed.routers import ROUTERS, Flat
from routed.routers.scores import layer_scores, router_context
from routed.settings.tree import node_of
from routed.tasks import TASKS
from routed.tasks.task import watch_nothing

#: The name of the only site.
SITE = "layer"


def single_layer(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """The layer; params are `router` (with its noise and, of images, the features that the experts see too) and `experts`."""
    del mesh
    task, count, own = TASKS[config.data.name], config.experts.count, node_of(config)
    expert = EXPERTS[config.experts.name].make(own.experts, task.outputs(config.data))
    router = ROUTERS[config.router.name].make(own.router, count)
    stem = getattr(router, "features", None) if task.side(config.data) else None
    head = router if stem is None else router.clone(features=Flat())
    noise = {name: config.router[name] for name in ("noise_scale", "noise_in_weights") if name in config.router}

    def layer(rule: Rule, dispatch: str) -> MoE:
        return MoE(
            router=head,
            expert=expert,
            num_experts=count,
            rule=rule,
            dispatch=dispatch,
            noise=config.router.noise,
            balance_rate=config.selection.balance_rate,
            **noise,
        )

    def context(batch, step):
        return router_context(config.router, cluster=batch.label, step=step)

    def inputs(own, batch):
        """What the experts compute on and what the router scores: the tokens, or what stands beside them and their features."""
        if stem is None:
            return batch.tokens if batch.side is None else batch.side, batch.tokens
        features = stem.apply({"params": own["features"]}, batch.tokens)
        return jnp.concatenate([batch.side, features], -1), features

    def init(key, batch):
        moe = layer(
            rule_of(node_of(config).selection)._replace(group_size=0), config.dispatch
        )  # of any number of samples
        own = {} if stem is None else {"features": stem.init(key, batch.tokens)["params"]}
        tokens, routed_by = inputs(own, batch)
        state = dict(nn.meta.unbox(moe.init(key, tokens, routed_by=routed_by, **context(batch, 0))))
        params = state.pop("params")
        own |= params.get("router", {}) | ({"noise": params["noise"]} if "noise" in params else {})
        return {"router": own, "experts": params["experts"]}, state

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        own = dict(params["router"])
        tokens, routed_by = inputs(own, batch)
        if stem is not None:
            del own["features"]
        variables = {"params": {"noise": own.pop("noise", {}), "router": own, "experts": params["experts"]}, **state}
        moving = {"rngs": {"noise": key}, "mutable": list(state)} if key is not None else {"mutable": []}
        rule = in_samples(rule, len(batch.tokens) // len(batch.x))
        (y, routing), moved = layer(rule, dispatch).apply(
            variables, tokens, routed_by=routed_by, **context(batch, step), **moving
        )
        return Outputs(per_sample(y, batch), {SITE: Site(routing, tokens)}, moved or state)

    def scores(params, state, site, features, batch, step=0):
        own = {name: value for name, value in params["router"].items() if name != "noise"}
        state_of_router = {name: tree["router"] for name, tree in state.items() if "router" in tree}
        (x,) = features
        apply_router = partial(router.apply, {"params": own, **state_of_router})
        return layer_scores(apply_router, x, context(batch, step), sharpness(state))[None]

    def responses(params, site, features):
        (x,) = features
        each = jax.vmap(lambda own: expert.apply({"params": own}, x))(params["experts"])  # [E, T or 1, O]
        return jnp.broadcast_to(each, (count, len(x), each.shape[-1])).swapaxes(0, 1)[None]

    def watch(params, world, test, key):
        """What each expert makes of the first test images."""
        del world, key
        seen = test.tokens[:PROBE]
        made = jax.lax.map(lambda p: expert.apply({"params": p}, seen, method="embed"), params["experts"])
        return {"embeddings": made.swapaxes(0, 1)}

    kept = "embeddings" in config.experts and config.experts.embeddings
    return Model(init, apply, scores, responses, watch if kept else watch_nothing)


def sharpness(state) -> Float[Array, ""] | float:
    """The factor on the scores that a layer's state holds; 1 where it holds none."""
    return state[CONTROL]["sharpness"] if CONTROL in state else 1.0


def per_sample(y: Float[Array, "T O"], batch: Batch) -> Float[Array, "B O"]:
    """The outputs of a sample's tokens, added up."""
    return y.reshape(*batch.cluster.shape, -1).sum(1) if batch.cluster.ndim > 1 else y
