"""A language model as a `Model`: a network of stacks, with parameters in groups, and its routers and experts one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts import TextBatch
from routed.experts import EXPERTS
from routed.layer.rule import Rule, rule_of
from routed.models.model import Model, Outputs
from routed.models.transformer import Plan
from routed.models.transformer_sizes import blocks_of, is_sparse
from routed.routers import ROUTERS
from routed.routers.scores import layer_scores, router_context
from routed.settings.tree import node_of

#: stack -> the ids that it reads of a batch.
Read = Mapping[str, Callable[[TextBatch], Int[Array, "B L"]]]

#: The names that a stack may have.
STACKS = ("encoder", "decoder")


def language_model(
    network: Callable[[Plan], nn.Module],
    read: Read,
    config: ConfigDict,
    mesh: Mesh | None = None,
    head: str = "",
) -> Model:
    """The `network` that the config describes, or its dense twin (`transformer_sizes.TWINS`); `read` are the ids that each stack reads.

    The sites are the stacks. Parameters are `router` (with the noise that learns) and `experts` by stack, every leaf
    with a leading axis of sparse layers, the submodule `head` if there is one, and `trunk`, which is all else. With a
    mesh (axes `data` and `expert`) all devices share the rows of a batch, and those of an `expert` axis the experts.

    Raises:
      UserError: transformer.sparse_layers does not divide transformer.layers.
    """
    block, _ = blocks_of(config)
    last, sparse = f"layer_{block - 1}", is_sparse(config)
    path = ("blocks", last, "moe")
    # Made here, where no module is at work that would become their parent.
    routers = {
        stack: ROUTERS[config.router.name].make(node_of(config).router, config.experts.count)
        for stack in read
        if sparse
    }
    intercept = _stop if sparse and config.router.stop_gradient else _pass

    def module(rule: Rule, dispatch: str, mesh: Mesh | None = mesh) -> nn.Module:
        return network(Plan(config, rule, dispatch, mesh, routers.__getitem__))

    def init(key, batch: TextBatch):
        # On one device: a batch of any size will do.
        rule = rule_of(config.selection) if sparse else Rule()
        state = dict(nn.meta.unbox(module(rule, "dense", mesh=None).init(key, batch)))
        params, router, experts = state.pop("params"), {}, {}
        for stack in routers:
            moe = params[stack]["blocks"][last].pop("moe")
            router[stack] = {name: moe[name] for name in ("router", "noise") if name in moe}
            experts[stack] = moe["experts"]
            if "shared" in moe:
                params[stack]["blocks"][last]["moe"] = {"shared": moe["shared"]}  # the trunk's
        scale = config.transformer.init_scale**0.5
        own = {"head": params.pop(head)} if head else {}
        scaled = _of_kernels(lambda kernel: kernel * scale, {"experts": experts, "trunk": params}) | own
        return {"router": router, **scaled}, state

    def apply(params, state, batch: TextBatch, rule: Rule, dispatch: str, key=None, step=0):
        dtype = jnp.dtype(config.transformer.dtype)
        whole = jax.tree.map(lambda a: a.astype(dtype), params["trunk"])
        whole |= {head: params["head"]} if head else {}
        for stack in routers:  # routers are float32, whatever the others are
            experts = jax.tree.map(lambda a: a.astype(dtype), params["experts"][stack])
            whole = _put(whole, (stack, *path), params["router"][stack] | {"experts": experts})
        moving: dict[str, Any] = (
            {"rngs": {"noise": key}, "mutable": list(state)} if key is not None else {"mutable": []}
        )
        with nn.intercept_methods(intercept):
            (logits, sites), moved = module(rule, dispatch).apply({"params": whole, **state}, batch, step, **moving)
        return Outputs(logits, sites if sparse else {}, moved or state)

    def scores(params, state, site: str, features: Float[Array, "S T D"], batch: TextBatch, step=0):
        state_of_router = {name: _at(tree, (site, *path)) for name, tree in state.items()}
        state_of_router = {name: tree["router"] for name, tree in state_of_router.items() if "router" in tree}

        context = context_of(config, read[site](batch), batch, step)

        def of_layer(own, state_of_router, features):
            return layer_scores(partial(routers[site].apply, {"params": own, **state_of_router}), features, context)

        return jax.vmap(of_layer)(params["router"][site].get("router", {}), state_of_router, features)

    def responses(params, site: str, features: Float[Array, "S T D"]):
        expert = EXPERTS[config.experts.name].make(node_of(config).experts, config.transformer.dim)

        def of_layer(experts, features):
            each = jax.vmap(lambda own: expert.apply({"params": own}, features))(experts)
            return jnp.broadcast_to(each, (config.experts.count, len(features), each.shape[-1])).swapaxes(0, 1)

        return jax.vmap(of_layer)(params["experts"][site], features)

    return Model(init, apply, scores, responses) if sparse else Model(init, apply)


def context_of(config: ConfigDict, ids: Int[Array, "B L"], batch: TextBatch, step: Any) -> dict[str, Any]:
    """Returns the context that the router reads beside features: the step and, if it needs them, token ids and languages."""
    if not is_sparse(config):
        return {}
    language = jnp.repeat(batch.language, ids.shape[1])
    return router_context(config.router, token_id=ids.reshape(-1), cluster=language, step=step)


def _of_kernels(function, params: Any) -> Any:
    """`params` with `function` applied to every leaf that is named `kernel`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(leaf) if path[-1].key == "kernel" else leaf, params
    )


def _at(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The nested dict at `path`, empty where there is none."""
    for name in path:
        tree = tree.get(name, {})
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], more: dict[str, Any]) -> dict[str, Any]:
    """A copy of nested dicts in which the one at `path` has the entries `more` too."""
    if not path:
        return tree | more
    return tree | {path[0]: _put(tree.get(path[0], {}), path[1:], more)}


def _stop(call, args, kwargs, context) -> Any:
    """Routers, and the noise that learns, see the stream but send no gradient into it."""
    if context.module.name in ("router", "noise") and context.method_name == "__call__":
        args = jax.lax.stop_gradient(args)
    return call(*args, **kwargs)


def _pass(call, args, kwargs, context) -> Any:
    del context
    return call(*args, **kwargs)


def expert_axis(path: tuple[Any, ...]) -> int | None:
    """Which axis of a leaf counts experts, by its path in a tree of parameters; None where none does.

    Leaves of experts are [sparse layers of the stack, experts, ...], wherever the tree hangs (an optimiser's state,
    say).
    """
    names = [getattr(key, "key", None) for key in path]
    return 1 if any(("experts", stack) in itertools.pairwise(names) for stack in STACKS) else None
