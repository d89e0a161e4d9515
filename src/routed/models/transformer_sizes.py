"""Sizes of a transformer that follow from its config: blocks, tokens, groups that devices share, FLOPs, and the widths of dense twins."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.experts import EXPERTS
from routed.layer.rule import rule_of
from routed.layer.selection import SELECTIONS, divisors, group_of, mean_rule, work
from routed.settings.tree import node_of
from routed.tasks.text import spans

#: name of an FFN -> is it gated?
FFNS = {"ffn": False, "gated_ffn": True}


def _active(config: ConfigDict) -> float:
    rule = config.selection
    each = 1 if rule.capacity_rule == "per_token" and rule.capacity_factor else rule.k
    return min(config.experts.count, each * (rule.capacity_factor or 1))


#: name of a dense twin -> experts whose weights its wider FFN has. dense_total: all. dense_active: as many as run for a
#: token, with the padding of their queues: k, times the capacity factor if there is one (per_token: the factor).
TWINS = {"dense_active": _active, "dense_total": lambda config: config.experts.count}
#: Of a decoder alone.
TWINS |= {"decoder_active": TWINS["dense_active"], "decoder_total": TWINS["dense_total"]}


def is_twin(config: ConfigDict) -> bool:
    """Is it the dense twin of a sparse transformer?"""
    return config.model in TWINS and config.transformer.sparse_layers > 0


def is_sparse(config: ConfigDict) -> bool:
    """Has it sparse layers?"""
    return config.transformer.sparse_layers > 0 and not is_twin(config)


def blocks_of(config: ConfigDict) -> tuple[int, int]:
    """Layers of a block, and blocks of a stack.

    Raises:
      UserError: the sparse layers cannot be spaced equally.
    """
    layers, sparse = config.transformer.layers, config.transformer.sparse_layers
    if sparse and layers % sparse:
        fits = max(n for n in range(1, min(sparse, layers) + 1) if layers % n == 0)
        raise UserError(
            f"config key transformer.sparse_layers={sparse}: does not divide transformer.layers={layers}; use {fits}"
        )
    return (layers // sparse, sparse) if sparse else (1, layers)


def twin_width(config: ConfigDict) -> int:
    """Hidden units of the FFN that a dense twin has where the other is sparse.

    As many as give it the weights of the router (D E), of the experts that TWINS counts, and of a shared one.
    """
    t = config.transformer
    weights = t.dim * config.experts.count + (TWINS[config.model](config) + shared(config)) * expert_weights(config)
    return max(1, round(weights / (_matrices(t.ffn) * t.dim)))


def flops_per_row(config: ConfigDict, experts: Any = None) -> Any:
    """Model FLOPs of training a T5 on one row: three times its forward matrix products.

    Counted are attention, projections, FFNs, experts that compute a token (of a sparse layer `experts`, if it is known;
    no padding), routers and logits.
    """
    t, length, targets = config.transformer, config.data.input_length, spans.lengths(config.data)[1]
    attended = ((length, length), (targets, targets), (targets, length))
    products = t.layers * sum(_attention(config, queries, keys) for queries, keys in attended)
    return 6.0 * (
        products + feed_of_token(config, experts) * (length + targets) + float(targets * t.dim * config.data.vocabulary)
    )


def flops_of_decoder_row(config: ConfigDict, experts: Any = None) -> Any:
    """The same of a decoder alone, whose row is as many tokens as it predicts."""
    t, length = config.transformer, config.data.input_length
    products = t.layers * _attention(config, length, length) + feed_of_token(config, experts) * length
    return 6.0 * (products + float(length * t.dim * config.data.vocabulary))


def flops_of_classifier_row(config: ConfigDict, experts: Any = None) -> Any:
    """The same of a decoder with a head of two layers on a row's last token in place of logits."""
    t, length = config.transformer, config.data.input_length
    products = t.layers * _attention(config, length, length) + feed_of_token(config, experts) * length
    return 6.0 * (products + t.dim * (t.dim + len(config.data.labels)))


def feed_of_token(config: ConfigDict, experts: Any = None) -> Any:
    """Multiplications of a token in the FFNs, routers and experts of a stack."""
    t, blocks = config.transformer, blocks_of(config)[1]
    last = _matrices(t.ffn) * t.dim * (twin_width(config) if is_twin(config) else t.width)
    if is_sparse(config):
        experts = work_of_token(config) if experts is None else experts
        last = t.dim * config.experts.count + (experts + shared(config)) * float(expert_weights(config))
    return float((t.layers - blocks) * _matrices(t.ffn) * t.dim * t.width) + blocks * last


def shared(config: Any) -> int:
    """Experts of every token in a sparse layer."""
    return int(config.transformer.shared_expert)


def experts_of_token(config: Any) -> Any:
    """Experts that compute a training token in a sparse layer, a shared one too, on average over the steps."""
    rule, tokens = mean_rule(rule_of(config.selection), config.steps), config.batch_size * config.data.input_length
    return SELECTIONS[rule.name].experts_per_token(rule, tokens, config.experts.count) + shared(config)


def work_of_token(config: Any) -> Any:
    """The same in experts that learn from it, of which one that only computes is a third; without a shared one."""
    return work(
        mean_rule(rule_of(config.selection), config.steps),
        config.batch_size * config.data.input_length,
        config.experts.count,
    )


def _attention(config: ConfigDict, queries: int, keys: int) -> float:
    """Multiplications in one layer of a row; a float, as JAX takes no whole number above 2^31 beside its own."""
    inner, dim = config.transformer.heads * config.transformer.head_dim, config.transformer.dim
    return 2.0 * inner * (dim * (queries + keys) + queries * keys)


def _matrices(ffn: str) -> int:
    return 3 if FFNS[ffn] else 2


def expert_weights(config: ConfigDict) -> int:
    """Parameters of one expert."""
    expert = EXPERTS[config.experts.name].make(node_of(config).experts, config.transformer.dim)
    shapes = jax.eval_shape(expert.init, jax.random.key(0), jnp.zeros((1, config.transformer.dim)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def tokens_of(config: ConfigDict) -> tuple[int, int]:
    """Tokens of a batch in the encoder and in the decoder of a T5."""
    return config.batch_size * config.data.input_length, config.batch_size * spans.lengths(config.data)[1]


def shared_group(tokens: tuple[int, ...], largest: int, devices: int) -> int:
    """The largest group size, at most `largest` (0: any), of which every device has whole groups in all stacks; 0 if none."""
    most = min(largest or tokens[0], *(n // devices for n in tokens))
    sizes = sorted({most, *(size for n in tokens for size in divisors(n) if size <= most)}, reverse=True)
    return next((size for size in sizes if size and whole_groups(tokens, size, devices)), 0)


def whole_groups(tokens: tuple[int, ...], size: int, devices: int) -> bool:
    """Has every device whole groups of (at most) this size, as many as the others, of each stack's tokens?"""
    return all(n // group_of(size, n) % devices == 0 for n in tokens)
