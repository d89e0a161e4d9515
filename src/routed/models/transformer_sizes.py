"""Sizes of a transformer that follow from its config: blocks, tokens, shared groups, FLOPs, widths of dense twins."""

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

#: name of an FFN -> True if the FFN is gated.
FFNS = {"ffn": False, "gated_ffn": True}


def _active(config: ConfigDict) -> float:
    rule = config.selection
    each = 1 if rule.capacity_rule == "per_token" and rule.capacity_factor else rule.k
    return min(config.experts.count, each * (rule.capacity_factor or 1))


#: name of a dense twin -> number of experts whose weights the wider FFN of the twin has. dense_total: all experts.
#: dense_active: the experts that compute a token, with the padding of the queues: k, times the capacity factor if the
#: rule has a factor (per_token: the factor alone).
TWINS = {"dense_active": _active, "dense_total": lambda config: config.experts.count}
#: Twins of a decoder-only transformer.
TWINS |= {"decoder_active": TWINS["dense_active"], "decoder_total": TWINS["dense_total"]}


def is_twin(config: ConfigDict) -> bool:
    """True if the config's model is the dense twin of a sparse transformer."""
    return config.model in TWINS and config.transformer.sparse_layers > 0


def is_sparse(config: ConfigDict) -> bool:
    """True if the config's model has sparse layers."""
    return config.transformer.sparse_layers > 0 and not is_twin(config)


def blocks_of(config: ConfigDict) -> tuple[int, int]:
    """Returns the number of layers of a block, and the number of blocks of a stack.

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
    """Returns the hidden units of the FFN by which a dense twin replaces a sparse layer.

    The FFN has as many weights as the router (D E), the experts that TWINS counts, and a shared expert together.
    """
    t = config.transformer
    weights = t.dim * config.experts.count + (TWINS[config.model](config) + shared(config)) * expert_weights(config)
    return max(1, round(weights / (_matrices(t.ffn) * t.dim)))


def flops_per_row(config: ConfigDict, experts: Any = None) -> Any:
    """Computes the model FLOPs of training a T5 on one row: three times the forward matrix products.

    The sum counts attention, projections, FFNs, routers, logits, and the experts that compute a token, without padding.
    `experts` is the measured number of such experts in a sparse layer; by default the rule gives the number.
    """
    t, length, targets = config.transformer, config.data.input_length, spans.lengths(config.data)[1]
    attended = ((length, length), (targets, targets), (targets, length))
    products = t.layers * sum(attention_products(config, queries, keys) for queries, keys in attended)
    return 6.0 * (
        products + feed_of_token(config, experts) * (length + targets) + float(targets * t.dim * config.data.vocabulary)
    )


def flops_of_decoder_row(config: ConfigDict, experts: Any = None) -> Any:
    """Computes the model FLOPs of training a decoder on one row; a decoder predicts every token of the row."""
    t, length = config.transformer, config.data.input_length
    products = t.layers * attention_products(config, length, length) + feed_of_token(config, experts) * length
    return 6.0 * (products + float(length * t.dim * config.data.vocabulary))


def feed_of_token(config: ConfigDict, experts: Any = None) -> Any:
    """Counts the multiplications of a token in the FFNs, routers and experts of a stack."""
    t, blocks = config.transformer, blocks_of(config)[1]
    last = _matrices(t.ffn) * t.dim * (twin_width(config) if is_twin(config) else t.width)
    if is_sparse(config):
        experts = work_of_token(config) if experts is None else experts
        last = t.dim * config.experts.count + (experts + shared(config)) * float(expert_weights(config))
    return float((t.layers - blocks) * _matrices(t.ffn) * t.dim * t.width) + blocks * last


def shared(config: Any) -> int:
    """Returns the number of shared experts of a sparse layer: 0 or 1."""
    return int(config.transformer.shared_expert)


def experts_of_token(config: Any) -> Any:
    """Returns the experts that compute a training token in a sparse layer, shared one included; a mean over steps."""
    rule, tokens = mean_rule(rule_of(config.selection), config.steps), config.batch_size * config.data.input_length
    return SELECTIONS[rule.name].experts_per_token(rule, tokens, config.experts.count) + shared(config)


def work_of_token(config: Any) -> Any:
    """Returns the work of a training token in a sparse layer, in units of experts that learn from the token.

    An expert that only computes the token counts a third. A shared expert does not count.
    """
    return work(
        mean_rule(rule_of(config.selection), config.steps),
        config.batch_size * config.data.input_length,
        config.experts.count,
    )


def attention_products(config: ConfigDict, queries: int, keys: int) -> float:
    """Counts the multiplications of a row in one layer, as a float: JAX accepts no Python integer above 2^31."""
    inner, dim = config.transformer.heads * config.transformer.head_dim, config.transformer.dim
    return 2.0 * inner * (dim * (queries + keys) + queries * keys)


def _matrices(ffn: str) -> int:
    return 3 if FFNS[ffn] else 2


def expert_weights(config: ConfigDict) -> int:
    """Counts the parameters of one expert."""
    expert = EXPERTS[config.experts.name].make(node_of(config).experts, config.transformer.dim)
    shapes = jax.eval_shape(expert.init, jax.random.key(0), jnp.zeros((1, config.transformer.dim)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def tokens_of(config: ConfigDict) -> tuple[int, int]:
    """Returns the tokens of a batch in the encoder and in the decoder of a T5."""
    return config.batch_size * config.data.input_length, config.batch_size * spans.lengths(config.data)[1]


def shared_group(tokens: tuple[int, ...], largest: int, devices: int) -> int:
    """Returns the largest group size, at most `largest` (0: any), with whole groups on every device in all stacks.

    Returns 0 if no size fits.
    """
    most = min(largest or tokens[0], *(n // devices for n in tokens))
    sizes = sorted({most, *(size for n in tokens for size in divisors(n) if size <= most)}, reverse=True)
    return next((size for size in sizes if size and whole_groups(tokens, size, devices)), 0)


def whole_groups(tokens: tuple[int, ...], size: int, devices: int) -> bool:
    """True if groups of at most this size split each stack's tokens evenly over the devices, in whole groups."""
    return all(n // group_of(size, n) % devices == 0 for n in tokens)
