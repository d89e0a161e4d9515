"""A language model as a `Model`: a network of stacks, with parameters in groups by role."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts import KIND, TextBatch
from routed.experts import EXPERTS
from routed.layer.rule import SelectionRule, selection_rule
from routed.models.model import LAYER, ROUTED, Model, ModelPart, Outputs, Read
from routed.models.router_layers import Layers, RouterByLayer, layers_of, needs_of, router_modules
from routed.models.transformer import Plan
from routed.models.transformer_sizes import TRANSFORMER, blocks_of, is_sparse
from routed.routers import router_context
from routed.routers.scores import layer_scores
from routed.settings.tree import node_of

#: The names that a stack may have.
STACKS = ("encoder", "decoder")


def language_model(
    network: Callable[[Plan], nn.Module], read: Read, config: ConfigDict, mesh: Mesh | None = None, head: str = ""
) -> Model:
    """Builds the `network` that the config describes, or the dense twin (`transformer_sizes.TWINS`).

    `read` are the ids that each stack reads. The sites are the stacks. Parameters are `router` (with the noise that
    learns) and `experts` by stack, every leaf with a leading axis of sparse layers; the submodule `head`, if named; and
    `trunk`, which has all other parameters. With a mesh (axes `data` and `expert`) all devices share the rows of a
    batch, and the devices of an `expert` axis share the experts.

    Raises:
      UserError: transformer.sparse_layers does not divide transformer.layers.
    """
    blocks_of(config)  # refuses before anything is built
    sparse = is_sparse(config)
    layers = layers_of(config) if sparse else None
    # Made outside of any module, which Flax would make the parent of the routers.
    routers = {stack: router_modules(config, layers) for stack in read if sparse}
    functions = _Functions(network, read, config, mesh, head, routers, layers)
    if not sparse:
        return Model(functions.init, functions.apply)
    return Model(functions.init, functions.apply, functions.scores, functions.responses, layers=layers)


@dataclasses.dataclass(frozen=True, eq=False)
class _Functions:
    """The functions of a language model, and their static arguments."""

    network: Callable[[Plan], nn.Module]
    read: Read
    config: ConfigDict
    mesh: Mesh | None
    head: str
    #: stack -> a router of each kind; empty without sparse layers.
    routers: dict[str, list[nn.Module]]
    #: The sparse layers, where they differ.
    layers: Layers | None

    def router(self, stack: str) -> nn.Module:
        kinds, layers = self.routers[stack], self.layers
        return kinds[0] if layers is None or len(kinds) == 1 else RouterByLayer(kinds, layers.kinds, parent=None)

    def module(self, rule: SelectionRule, dispatch: str, mesh: Mesh | None, kind: int | None = None) -> nn.Module:
        router = self.router if kind is None else lambda stack: self.routers[stack][kind]
        return self.network(Plan(self.config, rule, dispatch, mesh, router, layers=self.layers))

    def init(self, key, batch: TextBatch):
        """Draws all parameters. Each layer has those that it has where all layers have its kind of router."""
        kinds = max(map(len, self.routers.values()), default=1)
        drawn = [self.init_kind(key, batch, kind) for kind in range(kinds)]
        (params, state), *more = drawn

        def of_kinds(trees: list[Any]) -> dict[str, Any]:
            return {f"{KIND}{i}": tree["router"] for i, tree in enumerate(trees) if tree.get("router")}

        for stack in self.routers if more else ():
            path = path_of(self.config, stack)
            params["router"][stack]["router"] = of_kinds([groups["router"][stack] for groups, _ in drawn])
            for name in {name for _, collections in drawn for name in collections}:
                if variables := of_kinds([_at(collections.get(name, {}), path) for _, collections in drawn]):
                    state[name] = _put(state.get(name, {}), path, {"router": variables})
        return params, state

    def init_kind(self, key, batch: TextBatch, kind: int):
        # On one device, as initial parameters do not depend on the size of the batch.
        rule = selection_rule(self.config.selection) if self.routers else SelectionRule()
        state = dict(nn.meta.unbox(self.module(rule, "dense", None, kind).init(key, batch)))
        params, router, experts = state.pop("params"), {}, {}
        for stack in self.routers:
            block = _at(params, path_of(self.config, stack)[:-1])
            moe = block.pop("moe")
            router[stack] = {name: moe[name] for name in ("router", "noise") if name in moe}
            experts[stack] = moe["experts"]
            if "shared" in moe:  # a shared expert is part of the trunk
                block["moe"] = {"shared": moe["shared"]}
        scale = self.config.transformer.init_scale**0.5
        head_params = {"head": params.pop(self.head)} if self.head else {}
        scaled = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf * scale if path[-1].key == "kernel" else leaf, {"experts": experts, "trunk": params}
        )
        return {"router": router, **scaled, **head_params}, state

    def apply(self, params, state, batch: TextBatch, rule: SelectionRule, dispatch: str, key=None, step=0):
        moving: dict[str, Any] = (
            {"rngs": {"noise": key}, "mutable": list(state)} if key is not None else {"mutable": []}
        )
        stopped = self.routers and self.config.router.stop_gradient
        variables = {"params": self._network_params(params), **state}
        with nn.intercept_methods(_stop) if stopped else contextlib.nullcontext():
            (logits, sites), moved = self.module(rule, dispatch, self.mesh).apply(variables, batch, step, **moving)
        return Outputs(logits, sites if self.routers else {}, moved or state)

    def _network_params(self, params) -> dict[str, Any]:
        """Joins the groups to the network's parameters: routers in float32, other weights in the config's type."""
        dtype = jnp.dtype(self.config.transformer.dtype)
        whole = jax.tree.map(lambda a: a.astype(dtype), params["trunk"])
        whole |= {self.head: params["head"]} if self.head else {}
        for stack in self.routers:
            experts = jax.tree.map(lambda a: a.astype(dtype), params["experts"][stack])
            whole = _put(whole, path_of(self.config, stack), params["router"][stack] | {"experts": experts})
        return whole

    def scores(self, params, state, site: str, features: Float[Array, "S T D"], batch: TextBatch, step=0):
        state_of_router = {name: _at(tree, path_of(self.config, site)) for name, tree in state.items()}
        state_of_router = {name: tree["router"] for name, tree in state_of_router.items() if "router" in tree}
        context = context_of(self.config, self.read[site](batch), batch, step)
        router = self.router(site)

        def of_layer(router_params, state_of_router, features, context=context):
            apply_router = partial(router.apply, {"params": router_params, **state_of_router})
            return layer_scores(apply_router, features, context)

        trees = params["router"][site].get("router", {}), state_of_router, features
        if self.layers is None:
            return jax.vmap(of_layer)(*trees)
        numbered = lambda layer, params, state, x: of_layer(params, state, x, context | {"layer": layer})  # noqa: E731
        return jax.vmap(numbered)(jnp.arange(len(features)), *trees)

    def responses(self, params, site: str, features: Float[Array, "S T D"]):
        config = self.config
        expert = EXPERTS[config.experts.name].make(node_of(config).experts, config.transformer.dim)

        def of_layer(experts, features):
            each = jax.vmap(lambda expert_params: expert.apply({"params": expert_params}, features))(experts)
            return jnp.broadcast_to(each, (config.experts.count, len(features), each.shape[-1])).swapaxes(0, 1)

        return jax.vmap(of_layer)(params["experts"][site], features)


def path_of(config: ConfigDict, stack: str) -> tuple[str, ...]:
    """Returns the path of a stack's MoE layers in the network's parameters and state."""
    return (stack, "blocks", f"layer_{blocks_of(config)[0] - 1}", "moe")


def context_of(config: ConfigDict, ids: Int[Array, "B L"], batch: TextBatch, step: Any) -> dict[str, Any]:
    """Returns the router's inputs beside features: step, steps and, if used, token ids and languages."""
    if not is_sparse(config):
        return {}
    language = jnp.repeat(batch.language, ids.shape[1])
    needs = needs_of(config, layers_of(config))
    context = {"token_id": ids.reshape(-1), "cluster": language, "step": step, "steps": config.steps}
    if "previous_id" in needs:
        context["previous_id"] = jnp.pad(ids[:, :-1], ((0, 0), (1, 0))).reshape(-1)
    return router_context(needs, **context)


def _at(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Returns the nested dict at `path`, or an empty dict."""
    for name in path:
        tree = tree.get(name, {})
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], more: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of nested dicts with the entries `more` added to the dict at `path`."""
    if not path:
        return tree | more
    return tree | {path[0]: _put(tree.get(path[0], {}), path[1:], more)}


def _stop(call, args, kwargs, context) -> Any:
    """Stops the gradient of the stream through routers and through the noise that learns."""
    if context.module.name in ("router", "noise") and context.method_name == "__call__":
        args = jax.lax.stop_gradient(args)
    return call(*args, **kwargs)


def expert_axis(path: tuple[Any, ...]) -> int | None:
    """Returns the axis of experts of a leaf from the leaf's path in a tree of parameters, or None.

    Leaves of experts are [sparse layers of the stack, experts, ...], at any depth (in an optimiser's state, say).
    """
    names = [getattr(key, "key", None) for key in path]
    return 1 if any(("experts", stack) in itertools.pairwise(names) for stack in STACKS) else None


def parts_of(
    build: Callable[[ConfigDict, Mesh | None], Model],
    check: Callable[[ConfigDict], None],
    names: tuple[str, str, str] = ("moe", "dense_active", "dense_total"),
    settings: Iterable[str] = TRANSFORMER,
) -> dict[str, ModelPart]:
    """Returns a language model and its dense twins as parts; they read these settings of the node `transformer`."""
    transformer, count = tuple(f"transformer.{name}" for name in settings), ("experts.count", "experts.activation")
    routed = (*LAYER, *transformer, "experts.learning_rate", "experts.activation", "router.stop_gradient")
    routed += tuple(f"router.{name}" for name in ("layers", "fit", "fit_at", "fit_entropy", "freeze_at"))
    active = (*transformer, "selection.k", "selection.capacity_factor", "selection.capacity_rule", *count)
    parts = (
        ModelPart(build, routed=True, uses=ROUTED, reads=routed, check=check),
        ModelPart(build, uses=("experts.name",), reads=active, check=check),
        ModelPart(build, uses=("experts.name",), reads=(*transformer, *count), check=check),
    )
    return dict(zip(names, parts, strict=True))
