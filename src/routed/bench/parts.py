"""Processor time of the parts of a training step of the decoder and of the T5, each alone, forward and backward.

Each part is a program of its own, beside the least FLOPs and bytes of its work: a step has the time of its parts and of
norms, sums and embeddings. `routing` has experts that return their rows; `softmax` has the scores of all heads. The
floor is that of all cores: give this bench one core and one thread (`PJRT_NPROC=1 taskset -c 0`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from routed.bench import lm, t5
from routed.bench.harness import Case, Work, restricted, timed
from routed.bench.trainings import TextTraining
from routed.engine.compilation import compile_lowered
from routed.experts.ffn import Ffn
from routed.kernels import attention as kernel
from routed.kernels.head_product import head_product
from routed.layer.rule import selection_rule
from routed.models.attention import Attention, causal_bias, heads_at_once
from routed.models.transformer import CAUSAL, Plan, moe_layer
from routed.models.transformer_sizes import FFNS, is_sparse
from routed.routers import ROUTERS
from routed.settings.tree import node_of
from routed.training import DECODER, ENCODER_DECODER

#: Products of a forward and a backward pass, for each product forward; bytes of a number.
PASSES, NUMBER = 3, 4
#: Steps of the optimiser in a program: a single one would ask for new memory.
TURNS = 10


class Rows(NamedTuple):
    """Rows that attend."""

    number: int
    queries: int  # of each
    keys: int
    causal: bool  # keys behind a query are hidden

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees."""
        return self.number * self.queries * self.keys / (2 if self.causal else 1)


class Part(NamedTuple):
    """A part of a step."""

    times: int  # that it occurs
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    work: Work | None  # of one occurrence
    turns: int = 1  # that the function computes it


class Identity(nn.Module):
    """An expert that returns its rows; it has a parameter without use, as an expert must."""

    @nn.compact
    def __call__(self, x):
        self.param("unused", nn.initializers.zeros, (1,))
        return x


def bench(rounds: int, only: str = "") -> list[dict[str, Any]]:
    """Returns a record of each part of each shape, and of the whole step."""
    trainings: dict[tuple[str, ...], Callable[[], TextTraining]] = {
        (shape, kind): partial(lm.training_of, shape, kind) for shape in lm.SHAPES for kind in ("dense", "smoe")
    }
    for kind, experts, k in t5.SHAPES["narrow12"].cases[:2]:
        config = t5.config_of("narrow12", kind, experts, k)
        trainings["narrow12", kind] = partial(TextTraining, config, ENCODER_DECODER, t5.SHAPES["narrow12"].targets)
    cases = []
    for (shape, kind), make in restricted(trainings, only).items():
        training = make()
        about = {"shape": shape, "kind": kind}
        cases.append(
            Case(
                about | {"part": "step", "times": 1},
                {"ms": partial(_processor_seconds, training.step, training.count)},
                Work(training.flops),
            )
        )
        for name, part in parts_of(training).items():
            work = part.work and Work(part.times * part.work.flops, part.times * part.work.moved)
            cases.append(Case(about | {"part": name, "times": part.times}, {"ms": _timer(part, DECODER.fuse)}, work))
    return timed(cases, rounds)


def _timer(part: Part, fuse: str) -> Callable[[], float]:
    """Compiles a part's outputs and gradients; returns a function that returns the seconds of all occurrences."""

    def both_ways(arguments, cotangent):
        outputs, pull = jax.vjp(part.function, *arguments)
        return outputs, pull(cotangent)

    cotangent = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), jax.eval_shape(part.function, *part.arguments))
    compiled = compile_lowered(jax.jit(both_ways).lower(part.arguments, cotangent), fuse)
    run = partial(_processor_seconds, lambda: compiled(part.arguments, cotangent), part.turns)
    repeats = max(1, min(50, round(0.2 / max(run(), run()))))
    return lambda: part.times * sum(run() for _ in range(repeats)) / repeats


def _processor_seconds(run: Callable[[], Any], turns: int) -> float:
    """Returns the processor time of one of `turns` turns: other work on the machine hardly moves it."""
    started = time.process_time()
    jax.block_until_ready(run())
    return (time.process_time() - started) / turns


def parts_of(training: TextTraining) -> dict[str, Part]:
    """Returns the parts of a training's step by name."""
    config, t = training.config, training.config.transformer
    tokens, targets = config.data.input_length, training.targets
    rows, sparse = config.batch_size, t.sparse_layers if is_sparse(config) else 0
    parts: dict[str, Part] = {}
    if config.model == CAUSAL:
        stacks = {CAUSAL: rows * tokens}
        attentions = {"self": Rows(rows, tokens, tokens, True)}
    else:
        stacks = {"encoder": rows * tokens, CAUSAL: rows * targets}
        attentions = {"encoder self": Rows(rows, tokens, tokens, False)}
        attentions |= {"self": Rows(rows, targets, targets, True), "cross": Rows(rows, targets, tokens, False)}
    for name, pairs in attentions.items():
        parts |= {f"{name} attention": _attention(config, pairs), f"of it {name} softmax": _softmax(config, pairs)}
    for stack, count in stacks.items():
        if t.layers > sparse:
            parts[f"{stack} feed-forward"] = _feed_forward(config, count, t.layers - sparse)
        if sparse:
            parts[f"{stack} sparse layers"] = _sparse(config, stack, count, sparse, routing_alone=False)
            parts[f"of it {stack} routing"] = _sparse(config, stack, count, sparse, routing_alone=True)
    return parts | {"logits and loss": _logits(config, rows, targets), "optimiser": _optimiser(training)}


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def _attention(config: ConfigDict, rows: Rows) -> Part:
    t, crossed = config.transformer, rows.queries != rows.keys
    module = Attention(t.heads, t.head_dim, causal=rows.causal)
    x, inner = _normal(rows.number, rows.queries, t.dim), t.heads * t.head_dim
    reach = jnp.zeros((t.heads, rows.queries + rows.keys - 1))
    bias = None if crossed else causal_bias(t.heads, rows.queries, None) if rows.causal else reach
    more = (_normal(rows.number, rows.keys, t.dim),) if crossed else ()
    params = module.init(jax.random.key(0), x, bias, *more)
    projected = 4 * rows.number * (rows.queries + rows.keys) * t.dim * inner
    work = Work(PASSES * (projected + 4 * rows.pairs * inner))
    return Part(t.layers, lambda params, x, *more: module.apply(params, x, bias, *more), (params, x, *more), work)


def _softmax(config: ConfigDict, rows: Rows) -> Part:
    """Returns exponentials, maxima and sums of the blocks of scores, each block in cache, without its products."""
    t = config.transformer
    chunk = kernel.queries_at_once(rows.queries, rows.causal)
    together = kernel.at_once(heads_at_once(t.heads, t.head_dim, t.dim), rows.number, chunk, rows.keys)
    block = together[0] * together[1]
    blocks = max(1, round(t.heads * rows.pairs / (block * chunk * rows.keys)))

    def forward(scores, _):
        weight = jnp.exp(scores - scores.max(1, keepdims=True))
        return weight / weight.sum(1, keepdims=True), None

    def run(scores):
        return jax.lax.scan(forward, scores, None, length=blocks)[0]

    def gradient(scores, g):
        weight = jnp.exp(scores - 1.0)
        return weight * (g - (g * weight).sum(1, keepdims=True))

    both = jax.custom_vjp(run)
    both.defvjp(
        lambda scores: (run(scores), scores),
        lambda scores, g: (jax.lax.fori_loop(0, blocks, lambda _, g: gradient(scores, g), g),),
    )
    return Part(t.layers, both, (_normal(block, rows.keys, chunk),), None)


def _feed_forward(config: ConfigDict, tokens: int, times: int) -> Part:
    t, gated = config.transformer, FFNS[config.transformer.ffn]
    module, x = Ffn(t.dim, t.width, config.experts.activation, gated=gated), _normal(tokens, t.dim)
    params = module.init(jax.random.key(0), x)
    return Part(times, module.apply, (params, x), Work(PASSES * 2 * tokens * _numbers(params)))


def _sparse(config: ConfigDict, stack: str, tokens: int, times: int, routing_alone: bool) -> Part:
    rule, count, x = selection_rule(config.selection), config.experts.count, _normal(tokens, config.transformer.dim)
    router = ROUTERS[config.router.name].make(node_of(config).router, count)
    layer = moe_layer(Plan(config, rule, config.dispatch, None, lambda _: router), stack, tokens)
    if routing_alone:
        layer = layer.clone(expert=Identity())
    params = layer.init(jax.random.key(0), x)
    experts = 0 if routing_alone else config.selection.k * _numbers(params["params"]["experts"]) / count
    moved = PASSES * 4 * config.selection.k * x.size * NUMBER  # rows are copied there and back
    work = Work(PASSES * 2 * tokens * (experts + count * config.transformer.dim), moved)
    return Part(times, lambda params, x: layer.apply(params, x)[0], (params, x), work)


def _logits(config: ConfigDict, rows: int, targets: int) -> Part:
    t, vocabulary = config.transformer, config.data.vocabulary

    def loss(y, head):
        logits = head_product(y, head)
        return (jax.nn.logsumexp(logits, -1) - logits[..., 0]).mean()

    work = Work(PASSES * 2 * rows * targets * t.dim * vocabulary)
    return Part(1, loss, (_normal(rows, targets, t.dim), _normal(t.dim, vocabulary)), work)


def _optimiser(training: TextTraining) -> Part:
    """Returns Adam's step, which reads four numbers a parameter and writes three."""
    params, _, moments = training.state
    params, moments = jax.tree.map(jnp.copy, (params, moments))  # a step of the training gives its own away

    def step(_, state):
        updates, new = training.optimiser.update(state[0], state[1], state[0])
        return optax.apply_updates(state[0], updates), new

    run = lambda *state: jax.lax.fori_loop(0, TURNS, step, state)  # noqa: E731
    alone = jax.custom_vjp(run)
    alone.defvjp(lambda *state: (run(*state), state), lambda state, g: state)
    return Part(1, alone, (params, moments), Work(0, 7 * NUMBER * _numbers(params)), TURNS)


def _numbers(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
