"""Layers of the table of `bench gpu`: four published shapes, two loads, and a column for each way to compute them.

Routing is data: a token's experts and their weights are drawn beforehand. A layer sorts or fills slots, runs the
experts and sums their outputs. The oracle runs the experts one after another in float32, on the sampled tokens alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from routed.bench.products import PRODUCTS
from routed.contracts import Queues, Routing
from routed.experts.ffn import Ffn
from routed.kernels.grouped import grouped
from routed.kernels.ragged import ragged, sorted_outputs
from routed.kernels.ranks import ranks
from routed.layer.dispatch import slots
from routed.layer.rule import SelectionRule
from routed.layer.selection import capacity


class Shape(NamedTuple):
    """Sizes of a layer; gated experts have three matrices, other experts two."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    k: int
    gated: bool = True

    @property
    def matrices(self) -> int:
        """Matrices of an expert."""
        return 3 if self.gated else 2

    @property
    def activation(self) -> str:
        """Name of the activation."""
        return "silu" if self.gated else "relu"


#: Mixtral-8x7B, Qwen3-30B-A3B, the 7B of SonicMoE's benchmark, and the largest layer of this repository's papers.
SHAPES = {
    "mixtral": Shape(32768, 4096, 14336, 8, 2),
    "qwen3": Shape(32768, 2048, 768, 128, 8),
    "sonic": Shape(32768, 4096, 1024, 128, 8),
    "ours": Shape(65536, 2048, 8192, 64, 2, gated=False),
}
#: The same on a CPU.
TINY_SHAPES = {
    "mixtral": Shape(128, 32, 48, 4, 2),
    "qwen3": Shape(128, 16, 16, 8, 3),
    "sonic": Shape(128, 32, 16, 8, 3),
    "ours": Shape(256, 16, 32, 8, 2, gated=False),
}
LOADS = ("balanced", "zipf")
#: The column with the time that is compared, and those of this repository.
DENSE_FFN, OURS = "dense_ffn", ("ragged", "slots")
#: Columns in the order of their importance; torch's is `gpu_torch`.
COLUMNS = (DENSE_FFN, "ragged", "mosaic", "slots", "tokamax", "triton", "ragged_dot")
#: Slots for each assignment; under Zipf's law the others are dropped.
CAPACITY = SelectionRule(capacity_factor=1.25, capacity_rule="per_assignment")
#: Tokens with which values are compared.
SAMPLE = 1024


def draw(shape: Shape, load: str, seed: int = 0) -> tuple[Int[np.ndarray, "T k"], Float[np.ndarray, "T k"]]:
    """Draws the experts of each token, all different, and their weights, which sum to one.

    balanced: each expert has as many tokens. zipf: the first expert is drawn by p(e) = 1 / (e + 1) / H_E, the next one
    by the same law without the experts before it.
    """
    rng = np.random.default_rng(seed)
    if load == "balanced":
        turn = rng.permutation(shape.tokens)[:, None] * shape.k + np.arange(shape.k)
        experts = turn % shape.experts
    else:  # the largest of log p + Gumbel noise are such a draw
        law = -np.log(1.0 + np.arange(shape.experts))
        scores = law + rng.gumbel(size=(shape.tokens, shape.experts))
        experts = np.argsort(-scores, axis=1)[:, : shape.k]
    weights = rng.uniform(0.5, 1.5, size=experts.shape)
    return experts.astype(np.int32), (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def places(shape: Shape) -> int:
    """Returns the slots of an expert."""
    return capacity(CAPACITY._replace(k=shape.k), shape.tokens, shape.experts)


def within_capacity(shape: Shape, column: str, expert: Int[Array, "T k"]) -> Array:
    """True for the assignments [T, k] that a column computes: `slots` drops what is behind its capacity."""
    if column != "slots":
        return jnp.ones(expert.shape, bool)
    return (ranks(expert.reshape(-1), shape.experts) < places(shape)).reshape(expert.shape)


def expert_of(shape: Shape, column: str = "") -> Ffn:
    """Returns an expert; the dense FFN is k times as wide."""
    width = shape.hidden * (shape.k if column == DENSE_FFN else 1)
    return Ffn(shape.dim, width, shape.activation, shape.gated)


def function_of(shape: Shape, column: str) -> Callable[..., Float[Array, "T D"]]:
    """Returns apply(params, x [T, D], weight [T, k], expert [T, k]) -> outputs [T, D]."""
    module = expert_of(shape, column)

    def run(params, rows):
        return module.apply({"params": params}, rows)

    def apply(params, x, weight, expert):
        if column == DENSE_FFN:
            return run(params, x)
        routing = _routing(shape, column, weight, expert)
        if column in OURS:
            queues = Queues(shape.tokens, places(shape))
            return {"ragged": ragged, "slots": slots}[column](run, params, x, routing, queues)
        by_product = functools.partial(grouped, multiply=PRODUCTS[column].run)
        return sorted_outputs(run, params, x, routing, by_product).combined(routing.weight, len(x))

    return apply


def _routing(shape: Shape, column: str, weight: Float[Array, "T k"], expert: Int[Array, "T k"]) -> Routing:
    tokens = len(expert)
    flat = expert.reshape(-1)
    rank = ranks(flat, shape.experts)
    token = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), shape.k)
    fits = rank < places(shape) if column == "slots" else jnp.ones(len(flat), bool)
    return Routing(jnp.zeros((tokens, shape.experts)), token, flat, weight.reshape(-1), fits, rank)


def both_ways(apply: Callable) -> Callable:
    """Returns (params, x, weight, expert, cotangent) -> outputs and the gradients of params, x and weight."""

    def both(params, x, weight, expert, cotangent):
        outputs, derivative = jax.vjp(lambda *inputs: apply(*inputs, expert), params, x, weight)
        return outputs, derivative(cotangent.astype(outputs.dtype))

    return both


def oracle(shape: Shape, params, x, weight, expert) -> Float[Array, "S D"]:
    """Computes y = sum_e w_e f_e(x), every expert on every sampled token, one expert after another in float32."""
    module = expert_of(shape)

    def add(total, item):
        index, weights = item
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
        share = jnp.where(expert == index, weight, 0.0).sum(1, keepdims=True)
        return total + share * module.apply({"params": wide}, x.astype(jnp.float32)), None

    start = jnp.zeros(x.shape, jnp.float32)
    with jax.default_matmul_precision("highest"):
        return jax.lax.scan(jax.checkpoint(add), start, (jnp.arange(shape.experts), params))[0]


def distance(first: Any, second: Any) -> Array:
    """Returns the largest relative distance of the leaves of two trees: |a - b| / |b|."""

    def relative(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

    return jnp.stack(jax.tree.leaves(jax.tree.map(relative, first, second))).max()


def shapes_of(shape: Shape, column: str) -> tuple[Any, ...]:
    """Returns the shapes of params, x, weight, expert and cotangent."""
    x = jax.ShapeDtypeStruct((shape.tokens, shape.dim), jnp.bfloat16)
    chosen = (shape.tokens, shape.k)
    params = jax.eval_shape(expert_of(shape, column).init, jax.random.key(0), jnp.zeros((1, shape.dim)))["params"]
    axes = () if column == DENSE_FFN else (shape.experts,)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*axes, *leaf.shape), x.dtype), params)
    return params, x, jax.ShapeDtypeStruct(chosen, jnp.float32), jax.ShapeDtypeStruct(chosen, jnp.int32), x


def flops_of(shape: Shape, way: str) -> float:
    """Returns the FLOPs of the experts: 2 T k x matrices x d x f forward, three times as many both ways."""
    forward = 2.0 * shape.tokens * shape.k * shape.matrices * shape.dim * shape.hidden
    return forward if way == "forward" else 3 * forward


def bytes_of(shape: Shape, way: str, column: str = "") -> float:
    """Returns the least bytes that are moved, two a number: forward weights, tokens and outputs once.

    Both ways: weights in each direction and their gradient, tokens, outputs, cotangents and gradients of tokens.
    """
    experts = shape.k if column == DENSE_FFN else shape.experts
    weights = experts * shape.matrices * shape.dim * shape.hidden
    tokens = shape.tokens * shape.dim
    return 2 * float(weights + 2 * tokens if way == "forward" else 3 * weights + 4 * tokens)
