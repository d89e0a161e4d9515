"""A transformer's stack of layers, some of which are the MoE layer of the project.

The stack has no dropout: runs are short and read few rows twice. Rows are full, so the only mask of a stack hides a
decoder's future (and other documents of a packed row). A stack of L layers with S sparse layers is a scan over S equal
blocks; each block ends in its sparse layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from routed.experts import EXPERTS
from routed.experts.ffn import Ffn
from routed.kernels.head_product import head_product
from routed.layer.dispatch.parallel import DATA, EXPERT
from routed.layer.moe import MoE
from routed.layer.rule import SelectionRule
from routed.layer.selection import SELECTIONS, group_of, groupless
from routed.models.attention import Attention, Kernel, PositionBias, causal_bias
from routed.models.model import Site
from routed.models.router_layers import Layers
from routed.models.transformer_sizes import FFNS, blocks_of, is_sparse, is_twin, twin_width
from routed.routers.noise import noise_settings
from routed.settings.tree import node_of
from routed.system.platform import platform

#: Up to this number of blocks the scan is unrolled on a CPU: a loop copies the saved activations into one array and
#: back. With remat the scan stays a loop: outside of a loop XLA:CPU keeps activations instead of recomputing them.
UNROLLED = 4

#: The stack with causal attention; attention of any other stack reads the whole row.
CAUSAL = "decoder"


class Plan(NamedTuple):
    """The static part of a transformer: all inputs from which the modules are built."""

    config: ConfigDict
    rule: SelectionRule
    dispatch: str
    mesh: Mesh | None
    #: stack -> router. A function, as Flax would take a module in a field for a submodule of each holder.
    router: Callable[[str], nn.Module]
    #: The settings `transformer_sizes.DECODER`; the defaults are those of a T5.
    positions: str = "buckets"
    norm: str = "pre"
    #: The sparse layers of a stack, where they differ.
    layers: Layers | None = None


def embedded(table: Float[Array, "V D"], ids: Int[Array, "*N"]) -> Float[Array, "*N D"]:
    """Looks up the embeddings of token ids.

    The gradients of a token's occurrences are summed in float32: a bfloat16 sum of thousands of terms stops growing.
    """
    return table.astype(jnp.float32)[ids].astype(table.dtype)


class Stack(nn.Module):
    """An encoder or a decoder on embedded ids: the blocks, then a norm.

    source: outputs of the encoder to which a decoder attends. mask: pairs of tokens that may attend.
    """

    plan: Plan
    stack: str

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B L D"],
        context: dict[str, Any],
        source: Float[Array, "B N D"] | None = None,
        mask: Bool[Array, "B L L"] | None = None,
    ) -> tuple[Float[Array, "B L D"], Site | None]:
        config = self.plan.config.transformer
        if self.plan.positions == "rotary":
            bias = causal_bias(config.heads, x.shape[1], self.plan.mesh)
        else:
            bias = PositionBias(
                config.heads,
                config.buckets,
                config.max_distance,
                self.stack == CAUSAL,
                config.dim,
                self.plan.mesh,
                name="bias",
            )(x.shape[1])
        count = blocks_of(self.plan.config)[1]
        numbers = () if self.plan.layers is None else (jnp.arange(count),)
        blocks = nn.scan(
            # Outside of a scan a barrier keeps XLA from merging both computations; a scan needs no barrier.
            nn.remat(Block, prevent_cse=False) if config.remat else Block,
            length=count,
            unroll=count if platform() == "cpu" and count <= UNROLLED and not config.remat else 1,
            in_axes=(*(nn.broadcast,) * 4, *(0,) * len(numbers)),
            variable_axes={True: 0},  # type: ignore[dict-item]
            split_rngs={"params": True, "noise": True},
            check_constancy_invariants=False,  # one trace of a block, not two: a block has no constants
            metadata_params={nn.PARTITION_NAME: "layer"},
        )
        x, sites = blocks(self.plan, self.stack, name="blocks")(x, bias, source, context, mask, *numbers)
        return (x if self.plan.norm == "post" else _norm("norm")(x)), sites


class Block(nn.Module):
    """Layers with an FFN; the last layer is sparse (in a dense twin: has an FFN of another width)."""

    plan: Plan
    stack: str

    @nn.compact
    def __call__(self, x, bias, source, context, mask, number=None):
        count = blocks_of(self.plan.config)[0]
        context = context if number is None else context | {"layer": number}
        for i in range(count):
            x, site = Layer(self.plan, self.stack, i == count - 1, name=f"layer_{i}")(x, bias, source, context, mask)
        return x, site


class Layer(nn.Module):
    """Attention, attention to `source` if present, then FFN or MoE.

    Pre-norm: each sublayer reads the normed stream, and its output is added to the stream. Post-norm: each sublayer
    reads the stream, and the sum is normed.
    """

    plan: Plan
    stack: str
    last: bool

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B L D"],
        bias: Float[Array, "C R"],
        source: Float[Array, "B N D"] | None,
        context: dict[str, Any],
        mask: Bool[Array, "B L L"] | None,
    ) -> tuple[Float[Array, "B L D"], Site | None]:
        config, mesh = self.plan.config, self.plan.mesh
        heads, size = config.transformer.heads, config.transformer.head_dim
        before, after = (_norm, _pass)[:: 1 if self.plan.norm == "pre" else -1]
        if mesh is not None:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec((DATA, EXPERT))))
        self_attention = Attention(
            heads, size, mesh, self.plan.positions == "rotary", self.stack == CAUSAL, name="self"
        )
        x = after("self_norm")(x + self_attention(before("self_norm")(x), bias, None, mask))
        if source is not None:
            x = after("cross_norm")(
                x + Attention(heads, size, mesh, name="cross")(before("cross_norm")(x), None, source)
            )
        rows, site = before("feed_norm")(x).reshape(-1, x.shape[-1]), None
        if self.last and is_sparse(config):
            outputs, routing = moe_layer(self.plan, self.stack, len(rows))(rows, **context)
            site = Site(routing, rows)
        else:
            t = config.transformer
            width = twin_width(config) if self.last and is_twin(config) else t.width
            outputs = Ffn(t.dim, width, config.experts.activation, gated=FFNS[t.ffn], name="ffn")(rows)
        return after("feed_norm")(x + outputs.reshape(x.shape)), site


def logits(plan: Plan, y: Float[Array, "B M D"], embedding: Float[Array, "V D"]) -> Float[Array, "B M V"]:
    """Computes float32 logits from a stack's outputs: through the embedding, or a submodule `head` of the caller."""
    transformer = plan.config.transformer
    if transformer.tied:
        y, head = y * transformer.dim**-0.5, embedding.T
    else:
        head = Kernel((transformer.dim, plan.config.data.vocabulary), transformer.dim**-0.5, name="head")()
    return head_product(y, head)


def moe_layer(plan: Plan, stack: str, tokens: int) -> MoE:
    """Builds the sparse layer of a stack on `tokens` tokens."""
    config, count = plan.config, plan.config.experts.count
    size = plan.rule.group_size
    if plan.mesh is not None and groupless(plan.rule):
        size = tokens // plan.mesh.size  # one group per device
    expert = EXPERTS[config.experts.name].make(node_of(config).experts, config.transformer.dim)
    return MoE(
        router=plan.router(stack),
        expert=expert,
        shared=expert.clone() if config.transformer.shared_expert else None,
        num_experts=count,
        # At most the configured size, as encoder and decoder differ in tokens. Queues of a decoder are causal.
        rule=plan.rule._replace(
            group_size=group_of(size, tokens), priority="causal" if stack == CAUSAL else plan.rule.priority
        ),
        dispatch=plan.dispatch,
        **noise_settings(config, SELECTIONS[plan.rule.name].chooses),
        balance_rate=plan.rule.balance_rate,
        mesh=plan.mesh,
        layer_rules=None if plan.layers is None else plan.layers.rules,
        name="moe",
    )


def _pass(name: str) -> Callable[[Any], Any]:
    return lambda x: x


def _norm(name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=1e-6, name=name)
