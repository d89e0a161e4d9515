"""The settings of the node `transformer`, and the checks of a transformer's config."""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.layer.rule import rule_of
from routed.layer.selection import groupless
from routed.models.transformer_sizes import (
    FFNS,
    TWINS,
    blocks_of,
    is_sparse,
    is_twin,
    shared_group,
    tokens_of,
    whole_groups,
)
from routed.settings.setting import LAYERS, POSITIVE, Allowed, Setting, When, at_least, one_of, refuse

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
    "learning_rate": Setting(0.01, "of everything but routers and experts", at_least(0), traced=True),
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
    """Refuses a decoder config whose tokens the devices cannot share, or whose heads have no pairs to rotate."""
    _check(config, (config.batch_size * config.data.input_length,), "a step")
    if config.transformer.positions == "rotary" and config.transformer.head_dim % 2:
        refuse("transformer.head_dim", config.transformer.head_dim, "must be even, as rotary positions turn pairs")


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
    devices = config.mesh.data * config.mesh.expert
    if config.batch_size % devices:
        refuse("batch_size", config.batch_size, f"{devices} devices cannot share it; use a multiple of {devices}")
    if (
        is_sparse(config)
        and not groupless(rule_of(config.selection))
        and not whole_groups(tokens, config.selection.group_size, devices)
    ):
        raise UserError(
            f"config key selection.group_size={config.selection.group_size}: {devices} devices cannot share its groups "
            f"of {' and '.join(map(str, tokens))} tokens {unit}; use"
            f" selection.group_size={shared_group(tokens, config.selection.group_size, devices)}"
        )
    if config.experts.count % config.mesh.expert:
        fits = max(n for n in range(1, config.mesh.expert + 1) if config.experts.count % n == 0)
        refuse("mesh.expert", config.mesh.expert, f"does not divide experts.count={config.experts.count}; use {fits}")
