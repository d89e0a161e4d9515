"""A T5 encoder-decoder (Raffel et al. 2020) whose sparse layers are the MoE layer of the project, and its dense twins.

No dropout: runs are short and see few rows twice. Rows are full, so nothing is masked but the future of the decoder. A stack of L
layers with S sparse ones is S equal blocks, each ending in its sparse layer, and the blocks are scanned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts import TextBatch
from routed.experts import EXPERTS
from routed.experts.ffn import Ffn
from routed.layer.dispatch.parallel import DATA, EXPERT
from routed.layer.moe import MoE
from routed.layer.rule import Rule, rule_of
from routed.layer.selection import group_of, groupless
from routed.models.attention import Attention, Kernel, PositionBias
from routed.models.model import Model, Outputs, Site
from routed.models.t5_sizes import FFNS, blocks_of, is_sparse, is_twin, twin_width
from routed.routers import ROUTERS
from routed.settings.tree import node_of

STACKS = ("encoder", "decoder")

#: What the decoder reads before the first target: the id that pads.
START = 0


class Plan(NamedTuple):
    """The static part of a T5: everything its modules are built from."""

    config: ConfigDict
    rule: Rule
    dispatch: str
    mesh: Mesh | None
    #: Of a stack; a function, or Flax would take the modules for parts of each holder.
    router: Callable[[str], nn.Module]


def t5(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """The T5 that the config describes, or its dense twin (`t5_sizes.TWINS`).

    The sites are the stacks `encoder` and `decoder`. Parameters are `router` (with the noise that learns) and `experts` by stack,
    every leaf with a leading axis of sparse layers, and `trunk`, which is all else. With a mesh (axes `data` and `expert`) all
    devices share the rows of a batch, and those of an `expert` axis the experts.

    Raises:
      UserError: transformer.sparse_layers does not divide transformer.layers.
    """
    block, _ = blocks_of(config)
    last, sparse = f"layer_{block - 1}", is_sparse(config)
    path = ("blocks", last, "moe")
    # Made here, where no module is at work that would become their parent.
    routers = {
        stack: ROUTERS[config.router.name].make(node_of(config).router, config.experts.count)
        for stack in STACKS
        if sparse
    }
    intercept = _stop if sparse and config.router.stop_gradient else _pass

    def module(rule: Rule, dispatch: str, mesh: Mesh | None = mesh) -> T5:
        return T5(Plan(config, rule, dispatch, mesh, routers.__getitem__))

    def init(key, batch: TextBatch):
        # On one device: a batch of any size will do.
        rule = rule_of(config.selection) if sparse else Rule()
        state = dict(nn.meta.unbox(module(rule, "dense", mesh=None).init(key, batch)))
        params, router, experts = state.pop("params"), {}, {}
        for stack in routers:
            moe = params[stack]["blocks"][last].pop("moe")
            router[stack] = {name: moe[name] for name in ("router", "noise") if name in moe}
            experts[stack] = moe["experts"]
        scale = config.transformer.init_scale**0.5
        scaled = _of_kernels(lambda kernel: kernel * scale, {"experts": experts, "trunk": params})
        return {"router": router, **scaled}, state

    def apply(params, state, batch: TextBatch, rule: Rule, dispatch: str, key=None, step=0):
        dtype = jnp.dtype(config.transformer.dtype)
        whole = jax.tree.map(lambda a: a.astype(dtype), params["trunk"])
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
        ids = batch.inputs if site == "encoder" else shifted(batch.targets)
        state_of_router = {name: _at(tree, (site, *path)) for name, tree in state.items()}
        state_of_router = {name: tree["router"] for name, tree in state_of_router.items() if "router" in tree}

        context = told(ids, batch, step)

        def of_layer(own, state_of_router, features):
            return routers[site].apply({"params": own, **state_of_router}, features, **context)

        return jax.vmap(of_layer)(params["router"][site].get("router", {}), state_of_router, features)

    def responses(params, site: str, features: Float[Array, "S T D"]):
        expert = EXPERTS[config.experts.name].make(node_of(config).experts, config.transformer.dim)

        def of_layer(experts, features):
            each = jax.vmap(lambda own: expert.apply({"params": own}, features))(experts)
            return jnp.broadcast_to(each, (config.experts.count, len(features), each.shape[-1])).swapaxes(0, 1)

        return jax.vmap(of_layer)(params["experts"][site], features)

    return Model(init, apply, scores, responses) if sparse else Model(init, apply)


def shifted(targets: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """The decoder's input: the targets, one place later."""
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)


def told(ids: Int[Array, "B L"], batch: TextBatch, step: Any) -> dict[str, Any]:
    """What routers may know of tokens beside their features: the id, the language (their cluster), the step."""
    return {"token_id": ids.reshape(-1), "cluster": jnp.repeat(batch.language, ids.shape[1]), "step": step}


class T5(nn.Module):
    """Logits [B, M, V], float32, of every target token from the tokens before it; and what the routers did."""

    plan: Plan

    @nn.compact
    def __call__(self, batch: TextBatch, step: Any = 0) -> tuple[Float[Array, "B M V"], dict[str, Site | None]]:
        transformer, vocabulary = self.plan.config.transformer, self.plan.config.data.vocabulary
        embedding = self.param("embedding", nn.initializers.normal(1.0), (vocabulary, transformer.dim))
        ids, before = batch.inputs, shifted(batch.targets)
        # Both stacks at once: the embedding has one gradient, which devices that share a run sum once.
        x = embedding[jnp.concatenate((ids, before), 1)]
        source, encoder = Stack(self.plan, name="encoder")(x[:, : ids.shape[1]], told(ids, batch, step))
        y, decoder = Stack(self.plan, name="decoder")(x[:, ids.shape[1] :], told(before, batch, step), source)
        if transformer.tied:
            y, head = y * transformer.dim**-0.5, embedding.T
        else:
            head = Kernel((transformer.dim, vocabulary), transformer.dim**-0.5, name="head")()
        logits = jnp.einsum("BMD,DV->BMV", y, head, preferred_element_type=jnp.float32)
        return logits, {"encoder": encoder, "decoder": decoder}


class Stack(nn.Module):
    """The encoder, or with `source` the decoder, of embedded ids: the blocks, a norm."""

    plan: Plan

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B L D"],
        context: dict[str, Any],
        source: Float[Array, "B N D"] | None = None,
    ) -> tuple[Float[Array, "B L D"], Site | None]:
        config = self.plan.config.transformer
        bias = PositionBias(
            config.heads,
            config.buckets,
            config.max_distance,
            source is not None,
            config.dim,
            self.plan.mesh,
            name="bias",
        )(x.shape[1])
        blocks = nn.scan(
            # The barrier against merging with the first computation is only needed outside of a scan.
            nn.remat(Block, prevent_cse=False) if config.remat else Block,
            length=blocks_of(self.plan.config)[1],
            in_axes=(nn.broadcast,) * 3,
            variable_axes={True: 0},  # type: ignore[dict-item]
            split_rngs={"params": True, "noise": True},
            check_constancy_invariants=False,  # traces a block once and not twice: nothing that it could check is there
            metadata_params={nn.PARTITION_NAME: "layer"},
        )
        x, sites = blocks(self.plan, name="blocks")(x, bias, source, context)
        return _norm("norm")(x), sites


class Block(nn.Module):
    """Layers with an FFN, the last of them sparse (or, in a twin, with an FFN of another width)."""

    plan: Plan

    @nn.compact
    def __call__(self, x, bias, source, context):
        count = blocks_of(self.plan.config)[0]
        for i in range(count):
            x, site = Layer(self.plan, i == count - 1, name=f"layer_{i}")(x, bias, source, context)
        return x, site


class Layer(nn.Module):
    """Attention, in the decoder attention to `source`, then FFN or MoE: each on the normed stream, added to it."""

    plan: Plan
    last: bool

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B L D"],
        bias: Float[Array, "H L L"],
        source: Float[Array, "B N D"] | None,
        context: dict[str, Any],
    ) -> tuple[Float[Array, "B L D"], Site | None]:
        config, mesh = self.plan.config, self.plan.mesh
        heads, size = config.transformer.heads, config.transformer.head_dim
        if mesh is not None:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec((DATA, EXPERT))))
        # Attention is always computed again for its gradient: that costs what keeping its scores does, in a seventh of the memory.
        attention = nn.remat(Attention, prevent_cse=False)
        x += attention(heads, size, mesh, name="self")(_norm("self_norm")(x), bias)
        if source is not None:
            x += attention(heads, size, mesh, name="cross")(_norm("cross_norm")(x), None, source)
        rows = _norm("feed_norm")(x).reshape(-1, x.shape[-1])
        if self.last and is_sparse(config):
            stack = STACKS[source is not None]
            outputs, routing = _moe(self.plan, stack, len(rows))(rows, **context)
            return x + outputs.reshape(x.shape), Site(routing, rows)
        return x + _ffn(config, self.last)(rows).reshape(x.shape), None


def _moe(plan: Plan, stack: str, tokens: int) -> MoE:
    config, count = plan.config, plan.config.experts.count
    size = plan.rule.group_size
    if plan.mesh is not None and groupless(plan.rule):
        size = tokens // plan.mesh.size  # so every device has its own group
    return MoE(
        router=plan.router(stack),
        expert=EXPERTS[config.experts.name].make(node_of(config).experts, config.transformer.dim),
        num_experts=count,
        # Groups of at most the configured size, as the decoder has another number of tokens; and its queues are causal.
        rule=plan.rule._replace(
            group_size=group_of(size, tokens),
            priority=plan.rule.priority if stack == "encoder" else "causal",
        ),
        dispatch=plan.dispatch,
        noise=config.router.noise,
        **{name: config.router[name] for name in ("noise_scale", "noise_in_weights") if name in config.router},
        balance_rate=config.selection.balance_rate,
        mesh=plan.mesh,
        name="moe",
    )


def _ffn(config: ConfigDict, last: bool) -> Ffn:
    t = config.transformer
    width = twin_width(config) if last and is_twin(config) else t.width
    return Ffn(t.dim, width, config.experts.activation, gated=FFNS[t.ffn], name="ffn")


def _norm(name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=1e-6, name=name)


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

    Leaves of experts are [sparse layers of the stack, experts, ...], wherever the tree hangs (an optimiser's state, say).
    """
    names = [getattr(key, "key", None) for key in path]
    return 1 if any(("experts", stack) in itertools.pairwise(names) for stack in STACKS) else None
