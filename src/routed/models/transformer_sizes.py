"""A transformer's settings with their checks, and its sizes: blocks, tokens, groups, FLOPs, widths of dense twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.experts import EXPERTS
from routed.layer.dispatch import reason_against
from routed.layer.dispatch.parallel import devices_of_run
from routed.layer.layer_rules import rules_of
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import SELECTIONS, divisors, group_of, groupless, mean_rule, work
from routed.settings.setting import LAYERS, POSITIVE, RATE, Allowed, Setting, When, at_least, one_of, refuse
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
    tokens, experts = config.batch_size * config.data.input_length, config.experts.count
    return _mean(config, lambda rule: SELECTIONS[rule.name].experts_per_token(rule, tokens, experts)) + shared(config)


def work_of_token(config: Any) -> Any:
    """Returns the work of a training token in a sparse layer, in units of experts that learn from the token.

    An expert that only computes the token counts a third. A shared expert does not count.
    """
    tokens, experts = config.batch_size * config.data.input_length, config.experts.count
    return _mean(config, lambda rule: work(rule, tokens, experts))


def _mean(config: Any, count: Callable[[SelectionRule], Any]) -> Any:
    """Returns the mean of a count over the rules of the sparse layers, each that of an average step."""
    rule = mean_rule(selection_rule(config.selection), config.steps)
    if (rules := rules_of(config) if config.router.layers else None) is None:
        return count(rule)
    return sum(count(rule._replace(**rules.changes[kind])) for kind in rules.kinds) / len(rules.kinds)


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
    """Returns the largest size of a group of tokens, at most `largest`, that cuts no group at the end of a device.

    It holds for the tokens of the encoder and of the decoder. `largest=0` sets no limit; 0 is returned if no size fits.
    """
    most = min(largest or tokens[0], *(n // devices for n in tokens))
    sizes = sorted({most, *(size for n in tokens for size in divisors(n) if size <= most)}, reverse=True)
    return next((size for size in sizes if size and whole_groups(tokens, size, devices)), 0)


def whole_groups(tokens: tuple[int, ...], size: int, devices: int) -> bool:
    """True if groups of at most this size split each stack's tokens evenly over the devices, in whole groups."""
    return all(n // group_of(size, n) % devices == 0 for n in tokens)


_DENSE = When(
    lambda config: config.transformer.sparse_layers < config.transformer.layers,
    "transformer.sparse_layers < transformer.layers",
)
_FFN = When(lambda config: _DENSE.holds(config) or is_twin(config), f"{_DENSE.description}, or by a dense twin")
#: A T5 always has buckets.
_BUCKETS = When(
    lambda config: config.transformer.get("positions", "buckets") == "buckets", "transformer.positions='buckets'"
)

TRANSFORMER: dict[str, Setting] = {
    "layers": Setting(2, "of the encoder, and as many of the decoder", LAYERS),
    "sparse_layers": Setting(1, "of them in each stack, spaced equally", at_least(0)),
    "dim": Setting(32, "width of the trunk", at_least(1)),
    "heads": Setting(4, "of attention", at_least(1)),
    "head_dim": Setting(16, "numbers of a head", at_least(1)),
    "ffn": Setting("gated_ffn", "of the dense layers; its activation is experts.activation", one_of(FFNS), when=_FFN),
    "width": Setting(128, "hidden units of the dense layers' FFN", at_least(1), when=_DENSE),
    "shared_expert": Setting(
        False,
        "sparse layers have one more expert, of every token and with weight 1 (DeepSeek, Llama 4); the trunk's, by its "
        "rate",
        omit_default_from_identity=True,
    ),
    "tied": Setting(False, "logits through the embedding"),
    "buckets": Setting(
        32,
        "of relative positions",
        Allowed(lambda v: v >= 4 and v % 4 == 0, lambda: "must be a multiple of 4"),
        when=_BUCKETS,
    ),
    "max_distance": Setting(128, "positions further apart share a bucket", at_least(2), when=_BUCKETS),
    "init_scale": Setting(1.0, "variance of every weight matrix, times T5's", POSITIVE),
    "remat": Setting(
        False,
        "compute activations again instead of keeping them, block by block: layers up to a sparse one; one block saves "
        "nothing",
    ),
    "dtype": Setting("float32", "of products; routers and softmax are float32 always", one_of(("float32", "bfloat16"))),
    "learning_rate": Setting(0.01, "of everything but routers and experts", RATE, traced=True),
}


#: Settings of a decoder-only transformer.
DECODER: dict[str, Setting] = {
    "positions": Setting(
        "buckets",
        "buckets: a bias for each bucket of distances, as T5's; rotary: turned queries and keys (Su et al. 2021)",
        one_of(("buckets", "rotary")),
    ),
    "norm": Setting("pre", "of what a layer reads, or (post) of its sum with the stream", one_of(("pre", "post"))),
}


def check_t5(config: ConfigDict) -> None:
    """Refuses a T5 config whose two stacks the devices cannot share."""
    _check(config, tokens_of(config), "(encoder, decoder)")


def check_decoder(config: ConfigDict) -> None:
    """Refuses tokens that the devices cannot share, heads without pairs to rotate, and queues that see later tokens."""
    _check(config, (config.batch_size * config.data.input_length,), "a step")
    if config.transformer.positions == "rotary" and config.transformer.head_dim % 2:
        refuse("transformer.head_dim", config.transformer.head_dim, "must be even, as rotary positions turn pairs")
    if config.selection.get("priority") == "score":
        refuse("selection.priority", "score", "a decoder queues its tokens in their order (causal); use causal")


def _check(config: ConfigDict, tokens: tuple[int, ...], unit: str) -> None:
    """Refuses sparse layers that cannot be spaced equally, and batches that the devices cannot share.

    Raises:
      UserError: names the key, and a value that works.
    """
    blocks_of(config)
    exact = config.transformer.buckets // 2
    if _BUCKETS.holds(config) and config.transformer.max_distance <= exact:
        refuse(
            "transformer.max_distance",
            config.transformer.max_distance,
            f"the nearest {exact} of transformer.buckets={config.transformer.buckets} hold one distance each; use "
            f"{2 * exact} or more, or fewer buckets",
        )
    if max(tokens) >= 2**31:
        refuse("batch_size", config.batch_size, f"makes {max(tokens):,} tokens a step; keep them below 2^31")
    if config.model not in TWINS and not config.transformer.sparse_layers:
        refuse("model", config.model, "there is no sparse layer; set transformer.sparse_layers")
    devices = devices_of_run(config)
    if config.batch_size % devices:
        refuse("batch_size", config.batch_size, f"{devices} devices cannot share it; use a multiple of {devices}")
    if is_sparse(config) and (conflict := reason_against(config.dispatch, config.selection.eval.name)):
        refuse("selection.eval.name", config.selection.eval.name, conflict)
    queued: tuple[int, ...] = ()
    if is_sparse(config) and not groupless(selection_rule(config.selection)):
        queued += tokens
    if is_sparse(config) and not groupless(selection_rule(config.selection, evaluation=True)):
        queued += tuple(n // config.batch_size * min(config.batch_size, config.data.eval_rows) for n in tokens)
    if queued and not whole_groups(queued, config.selection.group_size, devices):
        raise UserError(
            f"config key selection.group_size={config.selection.group_size}: {devices} devices cannot share its groups "
            f"of {' and '.join(map(str, dict.fromkeys(queued)))} tokens {unit}; use"
            f" selection.group_size={shared_group(queued, config.selection.group_size, devices)}"
        )
    if config.experts.count % config.mesh.expert:
        fits = max(n for n in range(1, config.mesh.expert + 1) if config.experts.count % n == 0)
        refuse("mesh.expert", config.mesh.expert, f"does not divide experts.count={config.experts.count}; use {fits}")
