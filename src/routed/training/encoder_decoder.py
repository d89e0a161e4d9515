"""The problem of text in, text out: an encoder-decoder on rows that the host feeds.

Validation is paired: every arm and seed sees the same rows, with the same spans cut out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, SHARE, Column, SoftRouting, TextBatch
from routed.layer.dispatch import parallel_select
from routed.layer.rule import Rule, rule_of
from routed.layer.selection import group_of, groupless, select
from routed.metrics import entropies, load
from routed.metrics.router import COLUMNS as ROUTER_COLUMNS
from routed.models import ENCODER_DECODERS, flops_per_row
from routed.models.model import Model, Site
from routed.settings.setting import Setting, at_least, refuse
from routed.settings.tree import override
from routed.tasks import text
from routed.training import text_feed
from routed.training.problem import Cost, Inputs, Problem, ProblemPart
from routed.training.text_history import offline


def build(config: ConfigDict, pool: int, mesh: Mesh | None = None) -> Problem:
    """The problem of a config; with a mesh of axes `data` and `expert`, its devices share the run."""
    del pool
    model = ENCODER_DECODERS[config.model].build(config, mesh)

    def init(inputs: Inputs):
        rows = jax.tree.map(lambda a: a[:1], inputs.shared["validation"])
        params, state = model.init(inputs.keys["init"], rows)
        if "table" in inputs.shared:
            table = inputs.shared["table"]
            params = params | {"router": jax.tree.map(lambda a: jnp.broadcast_to(table, a.shape), params["router"])}
        return params, state

    def task_loss(phase: Any, outputs, batch: TextBatch):
        logits = outputs.prediction
        partition = jax.nn.logsumexp(logits, axis=-1)
        nats = (partition - _at(logits, batch.targets)).mean()
        if not phase.losses.logits_z:
            return nats, nats
        return nats + phase.losses.logits_z * (partition**2).mean(), nats

    return Problem(
        model=model,
        draw_world=lambda keys, run: (),
        init=init,
        batch=lambda inputs, feed, step: jax.tree.map(lambda a: a[step % len(a)], feed),
        task_loss=task_loss,
        evaluate=lambda inputs, params, state, step, memory: _evaluate(
            config, model, mesh, inputs, params, state, step, memory
        ),
        remember=lambda params, state: (params["router"], state),
    )


def _evaluate(
    config: ConfigDict, model: Model, mesh: Mesh | None, inputs: Inputs, params, state, step, memory
) -> dict[str, Array]:
    """All metrics of one moment; validation rows pass in blocks of at most a batch.

    Raises:
      UserError: devices that share a run cannot share these blocks.
    """
    rows, languages = inputs.shared["validation"], len(text_feed.corpus(config).languages)
    rule, dispatch = _evaluation_gate(config)

    def forward(block: TextBatch):
        logits, sites, _ = model.apply(params, state, block, rule, dispatch, step=step)
        nats = jax.nn.logsumexp(logits, axis=-1) - _at(logits, block.targets)
        right = (logits.argmax(-1) == block.targets).astype(jnp.float32)
        sums = entropies.cluster_sums(jnp.stack([nats.mean(1), right.mean(1)], 1), block.language, languages)
        return sums, {name: of_stack(name, site, block) for name, site in sites.items()}

    def of_stack(name: str, site: Site, block: TextBatch):
        tokens = site.features.shape[1]
        language = jnp.repeat(block.language, tokens // len(block.language))
        probs = jax.nn.softmax(site.routing.scores)
        router, held = memory
        stale = _choose(config, model, mesh, params | {"router": router}, held, name, site.features, block, step)
        choices = _choose(config, model, mesh, params, state, name, site.features, block, step)
        return {
            "probs": jax.vmap(lambda p: entropies.cluster_sums(p, language, languages))(probs),
            "token": entropies.entropy(probs).sum(1),
            "dropped": jax.vmap(load.dropped)(site.routing) * tokens,
            "choices": choices.astype(jnp.int16),
            "stale": stale.astype(jnp.int16),
        }

    size = group_of(config.batch_size, len(rows.inputs))
    if size % (devices := config.mesh.data * config.mesh.expert):
        found, fits = len(rows.inputs), max(1, len(rows.inputs) // devices) * devices
        refuse(
            "data.eval_rows",
            config.data.eval_rows,
            f"the validation text gives {found} rows, of which {devices} devices cannot share blocks of {size}; use {fits}",
        )
    blocks = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), rows)
    sums, stacks = jax.lax.map(forward, blocks)
    by_language = sums.sum(0) / jnp.maximum(jnp.bincount(rows.language, length=languages), 1)[:, None]
    nats, right = sums.sum((0, 1)) / len(rows.inputs)
    seen = {
        "eval/loss": nats,
        "eval/accuracy": right,
        **{f"eval/{name}": loss for name, loss in inputs.shared["references"].items()},
        "language/loss": by_language[:, 0],
        "language/accuracy": by_language[:, 1],
    }
    for name, one in stacks.items():
        seen |= {f"{name}/{metric}": values for metric, values in _summary(config.experts.count, one).items()}
    return seen


def _summary(experts: int, blocks: dict[str, Array]) -> dict[str, Array]:
    """The metrics of a stack's layers from those of its blocks of validation rows."""
    layers, tokens = blocks["choices"].shape[1], blocks["choices"].shape[0] * blocks["choices"].shape[2]
    choices = jnp.moveaxis(blocks["choices"], 0, 1).reshape(layers, tokens, -1)
    found = jax.vmap(lambda probs, token: entropies.split(probs, token / tokens))(
        blocks["probs"].sum(0), blocks["token"].sum(0)
    )
    shares = jax.vmap(lambda c: load.load(c, experts))(choices)
    found |= jax.vmap(lambda share: load.load_summary(share, tokens))(shares)
    sums = blocks["probs"].sum(0)
    return found | {
        "maps": sums / jnp.maximum(sums.sum(-1, keepdims=True), 1e-9),
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

    def chosen(scores, bias):
        routing = pick(scores, preference=scores, bias=bias)
        soft = isinstance(routing, SoftRouting)
        return scores.argmax(-1)[:, None] if soft else routing.expert.reshape(len(scores), -1)

    return jax.vmap(chosen)(scores, bias)


def _evaluation_gate(config: ConfigDict) -> tuple[Rule, str]:
    """The rule and the dispatch of evaluation; of a dense twin, any."""
    return (rule_of(config.selection, evaluation=True), config.dispatch) if "dispatch" in config else (Rule(), "dense")


def _at(logits: Float[Array, "B M V"], targets: Int[Array, "B M"]) -> Float[Array, "B M"]:
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


#: How the problem's columns are shown.
COLUMNS = {
    "train/loss": Column(
        "training loss (nats per token)",
        bounds=AT_LEAST_0,
        definition="Mean cross-entropy of the training batches since the last evaluation, in nats for each target token.",
    ),
    "eval/loss": Column(
        "validation loss (nats per token)",
        bounds=AT_LEAST_0,
        definition="Cross-entropy on held-out rows, in nats for each target token; all arms are asked about the same tokens.",
    ),
    "eval/bigram": Column(
        "loss of a bigram model (nats per token)",
        bounds=AT_LEAST_0,
        definition="Loss of a smoothed model that sees only the token before: an arm that is not better has learned nothing that needs a network.",
    ),
    "eval/floor": Column(
        "least loss that is possible (nats per token)",
        bounds=AT_LEAST_0,
        definition="Entropy of the language that generated the text: no model does better on average.",
    ),
    "eval/floor_blind": Column(
        "least loss without the dialect (nats per token)",
        bounds=AT_LEAST_0,
        definition="The least loss of a model that is not told which dialect a row is in.",
    ),
    "eval/accuracy": Column(
        "validation token accuracy",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of held-out target tokens that the model ranks first.",
    ),
    "router/mi_language": Column(
        "I(expert; language) (nats)",
        bounds=AT_LEAST_0,
        definition="Mutual information of the chosen expert and the language of the row: 0 where routing ignores language.",
    ),
    "router/mi_language_given_token": Column(
        "I(expert; language | token id) (nats)",
        bounds=AT_LEAST_0,
        definition="Mutual information of expert and language among occurrences of the same token id: what routing knows of the language beyond which words it has.",
    ),
    "router/churn_router": Column(
        "churn by the router in the last interval",
        bounds=SHARE,
        definition="Share of probe tokens whose experts change when the router of now replaces that of the last evaluation, on the features of now.",
    ),
    "router/churn_features": Column(
        "churn by its features in the last interval",
        bounds=SHARE,
        definition="Share of probe tokens whose experts change when the features move and the router of the last evaluation stays.",
    ),
    "train/steps": Column(
        "steps until the run stopped",
        bounds=AT_LEAST_0,
        definition="Optimiser steps after which the run stopped by itself, or all of them.",
    ),
    "train/rate_scale": Column(
        "multiplier of all rates",
        log=True,
        bounds=AT_LEAST_0,
        definition="The factor on all learning rates that tuning chose for the run, or 1.",
    ),
}


def _parameters(config: ConfigDict) -> int:
    """Parameters of the model, whatever the batch and the text."""
    small = override(config, {"batch_size": 1, "selection.group_size": 0})
    rows = TextBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((1, 1), (1, 1), (1,))))
    params, _ = jax.eval_shape(ENCODER_DECODERS[config.model].build(small, None).init, jax.random.key(0), rows)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _about(config: ConfigDict) -> str:
    languages = f"{len(config.data.languages)} languages" if config.data.languages else "all languages there"
    source = text.SOURCES[config.data.name].about(config.data)
    return f"data.name={config.data.name}, {languages}{source}; {config.steps * config.batch_size:,} rows a run"


ENCODER_DECODER = ProblemPart(
    build=build,
    models=ENCODER_DECODERS,
    loss="eval/loss",
    columns=lambda config: ROUTER_COLUMNS | COLUMNS,
    shared_arrays=text_feed.shared_arrays,
    feed=text_feed.feed,
    feed_shape=text_feed.feed_shape,
    offline=offline,
    digest=lambda config: f"{config.data.name} {text_feed.corpus(config).digest}",
    about=_about,
    cost=lambda config: Cost(
        config.batch_size * (config.data.input_length + text.lengths(config.data)[1]),
        config.batch_size * flops_per_row(config),
        parameters=partial(_parameters, config),
    ),
    causal=True,
    watched=True,
    shareable=True,
    settings={
        "losses.logits_z": Setting(0.0, "coefficient: mean squared log-partition of the logits", at_least(0)),
    },
    uses=("model",),
    reads=tuple(f"data.{name}" for name in text.SHARED),
)
