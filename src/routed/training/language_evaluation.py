"""What is measured of a language model at one moment: losses by language, and what the routers of each layer do with held-out tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging as log
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from routed.contracts import TextBatch
from routed.layer.dispatch import parallel_select
from routed.layer.rule import Rule, rule_of
from routed.layer.selection import SELECTIONS, group_of, groupless, select
from routed.metrics import entropies, load
from routed.metrics.router import chosen
from routed.metrics.specialists import alike_by_cosine
from routed.models.model import Model, Site
from routed.models.transformer_sizes import experts_of_token, work_of_token
from routed.settings.setting import refuse
from routed.tasks.text.spans import PAD
from routed.training import text_feed
from routed.training.phases import mean_so_far_of
from routed.training.problem import Inputs

#: Tokens of a block of rows on which the outputs of all experts are compared.
ALIKE = 256
#: Tokens of the first validation row (of text behind pads, the last ones) whose routing probabilities are kept one by one.
SAMPLE = 64


def evaluate(
    config: ConfigDict,
    model: Model,
    flops: Callable[..., Any],
    languages: int,
    padded: bool,
    mesh: Mesh | None,
    inputs: Inputs,
    params,
    state,
    step,
    memory,
) -> dict[str, Array]:
    """All metrics of one moment; rows pass in blocks of at most a batch. Of `padded` inputs nothing that is said of routers counts pads.

    Raises:
      UserError: devices that share a run cannot share these blocks.
    """
    rows = inputs.shared["validation"]
    rule, dispatch = _evaluation_gate(config)

    def by_row(values: Float[Array, "B M"], block: TextBatch) -> Float[Array, " B"]:
        """The mean of each row; targets that do not count are 0 in it."""
        counted = text_feed.counted_of(config, block.inputs)
        return (values if counted is None else values * counted).mean(1)

    def share(of: TextBatch) -> tuple[Any, Any]:
        """The share of the targets that count, of all rows and by language."""
        if (counted := text_feed.counted_of(config, of.inputs)) is None:
            return 1.0, 1.0
        sums = entropies.cluster_sums(counted.mean(1)[:, None], of.language, languages)
        return counted.mean(), sums / jnp.maximum(jnp.bincount(of.language, length=languages), 1)[:, None]

    def text_of(of: TextBatch) -> Bool[Array, " T"] | None:
        """Which tokens are text; None: all."""
        return (of.inputs != PAD).reshape(-1) if padded else None

    def forward(block: TextBatch):
        logits, sites, _ = model.apply(params, state, block, rule, dispatch, step=step)
        nats = jax.nn.logsumexp(logits, axis=-1) - at(logits, block.targets)
        right = (logits.argmax(-1) == block.targets).astype(jnp.float32)
        both = jnp.stack([by_row(values, block) for values in (nats, right)], 1)
        sums = entropies.cluster_sums(both, block.language, languages)
        return sums, {name: of_stack(name, site, block) for name, site in sites.items()}

    def of_stack(name: str, site: Site, block: TextBatch):
        tokens = site.features.shape[1]
        language = jnp.repeat(block.language, tokens // len(block.language))
        probs = jax.nn.softmax(site.routing.scores)
        router, held = memory
        text = text_of(block)
        assert model.responses is not None  # a model with gates has them
        if SELECTIONS[rule.name].forward is not None:  # by outputs: of earlier experts nobody keeps any
            choices = jax.vmap(chosen)(site.routing)
            stale = jnp.full_like(choices, -1)
        else:
            stale = _choose(config, model, mesh, params | {"router": router}, held, name, site.features, block, step)
            choices = _choose(config, model, mesh, params, state, name, site.features, block, step)
        row = tokens // len(block.language)
        sampled = slice(max(row - SAMPLE, 0), row) if padded else slice(min(SAMPLE, row))
        sample, entropy = probs[:, sampled], entropies.entropy(probs)
        first = slice(ALIKE) if text is None else jnp.argsort(jnp.logical_not(text))[:ALIKE]
        if text is not None:
            probs, entropy = probs * text[None, :, None], entropy * text[None]
            choices, stale = (jnp.where(text[None, :, None], one, -1) for one in (choices, stale))
        return {
            "probs": jax.vmap(lambda p: entropies.cluster_sums(p, language, languages))(probs),
            "token": entropy.sum(1),
            "sample": sample,
            "dropped": jax.vmap(partial(load.dropped, mask=text))(site.routing)
            * (tokens if text is None else text.sum()),
            "choices": choices.astype(jnp.int16),
            "stale": stale.astype(jnp.int16),
            "alike": jax.vmap(partial(alike_by_cosine, real=None if text is None else text[first]))(
                model.responses(params, name, site.features[:, first])
            ),
        }

    def tested(block: TextBatch):
        logits, sites, _ = model.apply(params, state, block, rule, dispatch, step=step)
        nats = jax.nn.logsumexp(logits, axis=-1) - at(logits, block.targets)
        right = (logits.argmax(-1) == block.targets).astype(jnp.float32)
        gates = {name: entropies.entropy(jax.nn.softmax(site.routing.scores)) for name, site in sites.items()}
        # From that of a uniform gate, log E: of a fresh router's the squares would differ in digits that float32 has not.
        less = {name: entropy - jnp.log(config.experts.count) for name, entropy in gates.items()}
        text = text_of(block)
        weight = 1.0 if text is None else text[None]
        moments = {name: ((one * weight).mean(1), (jnp.square(one) * weight).mean(1)) for name, one in less.items()}
        return jnp.stack([by_row(values, block).mean() for values in (nats, right)]), moments

    blocks = _in_blocks(config, rows, "validation")
    sums, stacks = jax.lax.map(forward, blocks)
    counting, each = share(rows)
    by_language = sums.sum(0) / jnp.maximum(jnp.bincount(rows.language, length=languages), 1)[:, None] / each
    nats, right = sums.sum((0, 1)) / len(rows.inputs) / counting
    seen = {
        "eval/loss": nats,
        "eval/accuracy": right,
        **{f"eval/{name}": loss for name, loss in inputs.shared["references"].items()},
        "language/loss": by_language[:, 0],
        "language/accuracy": by_language[:, 1],
    }
    learning = None
    if stacks:
        seen["train/experts"] = jnp.asarray(mean_so_far_of(experts_of_token, config, inputs.config, step), jnp.float32)
        learning = mean_so_far_of(work_of_token, config, inputs.config, step)
    seen["train/flops"] = jnp.float32(step) * config.batch_size * flops(config, learning)
    if "test" in inputs.shared:
        tests, moments = jax.tree.map(
            lambda a: a.mean(0), jax.lax.map(tested, _in_blocks(config, inputs.shared["test"], "test"))
        )
        nats, right = tests / share(inputs.shared["test"])[0]
        seen |= {"test/loss": nats, "test/accuracy": right}
        tokens = text_of(inputs.shared["test"])
        share_of_text = 1.0 if tokens is None else tokens.mean()
        for name, sums in moments.items():
            mean, square = (one / share_of_text for one in sums)
            deviation = jnp.sqrt(jnp.maximum(square - mean**2, 0))
            mean += jnp.log(config.experts.count)
            seen |= {f"{name}/entropy_test": mean, f"{name}/entropy_test_std": deviation}
    for name, one in stacks.items():
        tokens = text_of(rows)
        found = summary(config.experts.count, one, None if tokens is None else tokens.sum())
        seen |= {f"{name}/{metric}": values for metric, values in found.items()}
    return seen


@functools.cache
def warn_of_blocks(split: str, rows: int, size: int, fits: int) -> None:
    """Says once that an evaluation takes few rows at a time, as a batch does not divide them."""
    log.warning(
        "the %s text gives %d rows, evaluated in blocks of %d; data.eval_rows=%d is faster", split, rows, size, fits
    )


def _in_blocks(config: ConfigDict, rows: TextBatch, split: str) -> TextBatch:
    """Rows of a split [blocks, size, ...], of at most a batch each; where that makes many small blocks, a warning says so.

    Raises:
      UserError: devices that share a run cannot share these blocks.
    """
    found = len(rows.inputs)
    size = group_of(config.batch_size, found)
    if size % (devices := config.mesh.data * config.mesh.expert):
        fits = max(1, found // devices) * devices
        refuse(
            "data.eval_rows",
            config.data.eval_rows,
            f"the {split} text gives {found} rows, of which {devices} devices cannot share blocks of {size}; use {fits}",
        )
    if 4 * size <= min(config.batch_size, found):
        warn_of_blocks(split, found, size, found - found % config.batch_size)
    return jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), rows)


def summary(experts: int, blocks: dict[str, Array], text: Int[Array, ""] | None = None) -> dict[str, Array]:
    """The metrics of a stack's layers from those of its blocks of validation rows, so many of whose tokens are `text` (None: all)."""
    count, layers, size, _ = blocks["choices"].shape
    choices = jnp.moveaxis(blocks["choices"], 0, 1).reshape(layers, count * size, -1)
    tokens = count * size if text is None else text
    found = jax.vmap(lambda probs, token: entropies.split(probs, token / tokens))(
        blocks["probs"].sum(0), blocks["token"].sum(0)
    )
    shares = jax.vmap(lambda c: load.load(c, experts))(choices)
    found |= jax.vmap(lambda share: load.load_summary(share, tokens))(shares)
    if choices.shape[-1] == experts:
        found["chosen"] = (choices >= 0).sum((-2, -1)) / tokens
    found["alike"] = blocks["alike"].mean(0)
    sums = blocks["probs"].sum(0)
    return found | {
        "maps": sums / jnp.maximum(sums.sum(-1, keepdims=True), 1e-9),
        "sample": blocks["sample"][0],
        "load": shares,
        "dropped": blocks["dropped"].sum(0) / tokens,
        "choices": choices,
        "stale": jnp.moveaxis(blocks["stale"], 0, 1).reshape(choices.shape),
    }


def _choose(
    config: ConfigDict,
    model: Model,
    mesh: Mesh | None,
    params,
    state,
    site: str,
    features: Float[Array, "S T D"],
    block: TextBatch,
    step,
) -> Int[Array, "S T k"]:
    """The experts that a stack's routers, and their balancing bias, choose on given features."""
    assert model.scores is not None  # a dense twin has no sites to choose for
    scores = model.scores(params, state, site, features, block, step)
    biases = jax.tree.leaves(state.get("balance", {}).get(site, {}))
    bias = biases[0] if biases else jnp.zeros((len(scores), config.experts.count))
    rule = _evaluation_gate(config)[0]._replace(capacity_factor=0.0, group_size=0)
    pick = partial(select, rule)
    if mesh is not None and groupless(rule):  # every device for its own tokens
        pick = partial(parallel_select, rule._replace(group_size=features.shape[1] // mesh.size), mesh, mask=None)

    def choose(scores, bias):
        return chosen(pick(scores, preference=scores, bias=bias))

    return jax.vmap(choose)(scores, bias)


def _evaluation_gate(config: ConfigDict) -> tuple[Rule, str]:
    """The rule and the dispatch of evaluation; of a dense twin, any."""
    return (rule_of(config.selection, evaluation=True), config.dispatch) if "dispatch" in config else (Rule(), "dense")


def at(logits: Float[Array, "B M V"], targets: Int[Array, "B M"]) -> Float[Array, "B M"]:
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
