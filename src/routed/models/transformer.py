"""A transformer's stack of layers, some of which are the MoE layer of the project.

No dropout: runs are short and see few rows twice. Rows are full, so nothing is masked but the future of a decoder. A
stack of L layers with S sparse ones is S equal blocks, each ending in its sparse layer, and the blocks are scanned.
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
from routed.layer.rule import Rule
from routed.layer.selection import group_of, groupless
from routed.models.attention import Attention, Kernel, PositionBias, causal_bias
from routed.models.model import Site
from routed.models.transformer_sizes import FFNS, blocks_of, is_sparse, is_twin, twin_width
from routed.settings.tree import node_of
from routed.system.platform import platform

#: So many blocks a CPU takes one after the other and not in a loop, which copies what their gradients need into one
#: array and out of it again. But for remat: outside of a loop XLA:CPU keeps what was to be computed again.
UNROLLED = 4

#: The stack that sees the past only; any other sees all of its row.
CAUSAL = "decoder"


class Plan(NamedTuple):
    """The static part of a transformer: everything its modules are built from."""

    config: ConfigDict
    rule: Rule
    dispatch: str
    mesh: Mesh | None
    #: Of a stack; a function, or Flax would take the modules for parts of each holder.
    router: Callable[[str], nn.Module]
    #: `transformer_settings.DECODER`, as which a T5 has no choice.
    positions: str = "buckets"
    norm: str = "pre"


def embedded(table: Float[Array, "V D"], ids: Int[Array, "*N"]) -> Float[Array, "*N D"]:
    """The rows of some tokens.

    Gradients of a token's occurrences are summed in float32: a sum of thousands in bfloat16 stands still halfway.
    """
    return table.astype(jnp.float32)[ids].astype(table.dtype)


class Stack(nn.Module):
    """The encoder or the decoder, which may attend to a `source`, of embedded ids: the blocks, a norm.

    `seen`: what tokens may see of their row.
    """

    plan: Plan
    stack: str

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B L D"],
        context: dict[str, Any],
        source: Float[Array, "B N D"] | None = None,
        seen: Bool[Array, "B L L"] | None = None,
    ) -> tuple[Float[Array, "B L D"], Site | None]:
        config = self.plan.config.transformer
        if self.plan.positions == "rotary":
            bias = causal_bias(config.heads, x.shape[1], self.plan.mesh)
        else:
            bias = PositionBias(
                config.heads, config.buckets, config.max_distance, self.stack == CAUSAL, config.dim, self.plan.mesh, name="bias"
            )(x.shape[1])  # fmt: skip
        count = blocks_of(self.plan.config)[1]
        blocks = nn.scan(
            # The barrier against merging with the first computation is only needed outside of a scan.
            nn.remat(Block, prevent_cse=False) if config.remat else Block,
            length=count,
            unroll=count if platform() == "cpu" and count <= UNROLLED and not config.remat else 1,
            in_axes=(nn.broadcast,) * 4,
            variable_axes={True: 0},  # type: ignore[dict-item]
            split_rngs={"params": True, "noise": True},
            check_constancy_invariants=False,  # traces a block once and not twice: nothing that it could check is there
            metadata_params={nn.PARTITION_NAME: "layer"},
        )
        x, sites = blocks(self.plan, self.stack, name="blocks")(x, bias, source, context, seen)
        return (x if self.plan.norm == "post" else _norm("norm")(x)), sites


class Block(nn.Module):
    """Layers with an FFN, the last of them sparse (or, in a twin, with an FFN of another width)."""

    plan: Plan
    stack: str

    @nn.compact
    def __call__(self, x, bias, source, context, seen):
        count = blocks_of(self.plan.config)[0]
        for i in range(count):
            x, site = Layer(self.plan, self.stack, i == count - 1, name=f"layer_{i}")(x, bias, source, context, seen)
        return x, site


class Layer(nn.Module):
    """Attention, attention to `source` if there is one, then FFN or MoE: each on the normed stream, added to it.

    With post-norm each on the stream as it is, and the sum is normed.
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
        seen: Bool[Array, "B L L"] | None,
    ) -> tuple[Float[Array, "B L D"], Site | None]:
        config, mesh = self.plan.config, self.plan.mesh
        heads, size = config.transformer.heads, config.transformer.head_dim
        before, after = (_norm, _pass)[:: 1 if self.plan.norm == "pre" else -1]
        if mesh is not None:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec((DATA, EXPERT))))
        own = Attention(heads, size, mesh, self.plan.positions == "rotary", self.stack == CAUSAL, name="self")
        x = after("self_norm")(x + own(before("self_norm")(x), bias, None, seen))
        if source is not None:
            x = after("cross_norm")(
                x + Attention(heads, size, mesh, name="cross")(before("cross_norm")(x), None, source)
            )
        rows, site = before("feed_norm")(x).reshape(-1, x.shape[-1]), None
        if self.last and is_sparse(config):
            outputs, routing = _moe(self.plan, self.stack, len(rows))(rows, **context)
            site = Site(routing, rows)
        else:
            outputs = _ffn(config, self.last)(rows)
        return after("feed_norm")(x + outputs.reshape(x.shape)), site


def logits(plan: Plan, y: Float[Array, "B M D"], embedding: Float[Array, "V D"]) -> Float[Array, "B M V"]:
    """Logits, float32, of a stack's outputs: through the embedding, or through a `head`, a submodule of who calls."""
    transformer = plan.config.transformer
    if transformer.tied:
        y, head = y * transformer.dim**-0.5, embedding.T
    else:
        head = Kernel((transformer.dim, plan.config.data.vocabulary), transformer.dim**-0.5, name="head")()
    return head_product(y, head)


def _moe(plan: Plan, stack: str, tokens: int) -> MoE:
    config, count = plan.config, plan.config.experts.count
    size = plan.rule.group_size
    if plan.mesh is not None and groupless(plan.rule):
        size = tokens // plan.mesh.size  # so every device has its own group
    expert = EXPERTS[config.experts.name].make(node_of(config).experts, config.transformer.dim)
    return MoE(
        router=plan.router(stack),
        expert=expert,
        shared=expert.clone() if config.transformer.shared_expert else None,
        num_experts=count,
        # Groups of at most the configured size, as the decoder has another number of tokens; and its queues are causal.
        rule=plan.rule._replace(
            group_size=group_of(size, tokens),
            priority="causal" if stack == CAUSAL else plan.rule.priority,
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


def _pass(name: str) -> Callable[[Any], Any]:
    del name
    return lambda x: x


def _norm(name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=1e-6, name=name)
