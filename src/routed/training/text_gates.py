"""Probes of the routers of each layer of a language model, on the validation rows."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts import SHARE, Column, TextBatch
from routed.layer.dispatch.parallel import parallel_select
from routed.layer.layer_rules import select_in_layer, texts_by_layer
from routed.layer.selection import SELECTIONS, groupless, select
from routed.metrics import agreement, entropies, load, router
from routed.metrics.agreement import mean_cosine
from routed.models.model import Site
from routed.tasks.text import tokenizers
from routed.training.probes import Block, Evaluation, Probe
from routed.training.text_problem import TextKind, TextProblem, corpus, held_out

#: Tokens of a block of rows on which the outputs of all experts are compared.
ALIKE = 256
#: Tokens of the first validation row (of text behind pads, the last ones) whose routing probabilities are kept one by
#: one.
SAMPLE = 64
#: Draws of the null in `agreement.information`.
DRAWS = 4


def _stack_in_block(evaluation: Evaluation, stack: str, site: Site, block: Block) -> dict[str, Array]:
    """Returns sums over tokens, choices, and samples of the layers [S] of a stack; pads count nowhere."""
    problem, rows, real = evaluation.problem, len(block.batch.language), evaluation.problem.real(block.batch)
    tokens = site.features.shape[1]
    row, language = tokens // rows, jnp.repeat(block.batch.language, tokens // rows)
    probs = jax.nn.softmax(site.routing.scores)
    choices, stale = _choices(evaluation, stack, site, block)
    sampled = slice(max(row - SAMPLE, 0), row) if real is not None else slice(min(SAMPLE, row))
    sample, entropy = probs[:, sampled], entropies.entropy(probs)
    first = slice(ALIKE) if real is None else jnp.argsort(jnp.logical_not(real))[:ALIKE]
    if real is not None:
        probs, entropy = probs * real[None, :, None], entropy * real[None]
        choices, stale = (jnp.where(real[None, :, None], values, -1) for values in (choices, stale))
    dropped = jax.vmap(partial(load.dropped, mask=real))(site.routing)
    cosine = partial(mean_cosine, real=None if real is None else real[first])
    return {
        "probs": jax.vmap(lambda p: entropies.cluster_sums(p, language, problem.languages))(probs),
        "token": entropy.sum(1),
        "sample": sample,
        "dropped": dropped * (tokens if real is None else real.sum()),
        "choices": choices.astype(jnp.int16),
        "stale": stale.astype(jnp.int16),
        "alike": jax.vmap(cosine)(problem.model.responses(evaluation.params, stack, site.features[:, first])),
    }


def _choices(
    evaluation: Evaluation, stack: str, site: Site, block: Block
) -> tuple[Int[Array, "S T k"], Int[Array, "S T k"]]:
    """Returns the experts of each token, and the choices of the routers of the evaluation before on the same features.

    Where outputs choose, nothing keeps the experts of the evaluation before: the latter are -1.
    """
    if SELECTIONS[block.rule.name].forward is not None:
        choices = jax.vmap(router.chosen)(site.routing)
        return choices, jnp.full_like(choices, -1)
    params, (routers, state) = evaluation.params, evaluation.memory
    stale = _choose(evaluation, params | {"router": routers}, state, stack, site.features, block.batch)
    return _choose(evaluation, params, evaluation.state, stack, site.features, block.batch), stale


def _choose(
    evaluation: Evaluation, params, state, stack: str, features: Float[Array, "S T D"], batch: TextBatch
) -> Int[Array, "S T k"]:
    """Returns the experts that a stack's routers, and their balancing bias, choose on given features."""
    problem: TextProblem = evaluation.problem
    assert problem.model.scores is not None
    scores = problem.model.scores(params, state, stack, features, batch, evaluation.step)
    biases = jax.tree.leaves(state.get("balance", {}).get(stack, {}))
    bias = biases[0] if biases else jnp.zeros((len(scores), problem.config.experts.count))
    rule = problem.evaluation_rule()[0]._replace(capacity_factor=0.0, group_size=0)
    pick: Any = select
    if problem.mesh is not None and groupless(rule):  # every device for its own tokens
        rule = rule._replace(group_size=features.shape[1] // problem.mesh.size)
        pick = lambda rule, scores, **given: parallel_select(rule, problem.mesh, scores, **given)  # noqa: E731

    rules = None if problem.model.layers is None else problem.model.layers.rules

    def choose(scores, bias, layer=None):
        by = lambda rule: pick(rule, scores, preference=scores, bias=bias)  # noqa: E731
        return router.chosen(by(rule) if rules is None else select_in_layer(rules, rule, layer, by))

    return jax.vmap(choose)(scores, bias, *(() if rules is None else (jnp.arange(len(scores)),)))


def _evaluate(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the metrics of each stack, [layers], and the arrays that figures show."""
    real = evaluation.problem.real(evaluation.batch)
    metrics: dict[str, Array] = {}
    for stack, blocks in evaluation.blocks.items():
        values = summary(blocks, None if real is None else real.sum())
        metrics |= {f"{stack}/{name}": value for name, value in values.items()}
    return metrics


def summary(blocks: dict[str, Array], text: Int[Array, ""] | None = None) -> dict[str, Array]:
    """Returns the metrics of a stack's layers from its blocks of rows; `text` counts the tokens without pads."""
    count, layers, size, _ = blocks["choices"].shape
    choices = jnp.moveaxis(blocks["choices"], 0, 1).reshape(layers, count * size, -1)
    tokens = count * size if text is None else text
    sums, experts = blocks["probs"].sum(0), blocks["probs"].shape[-1]
    shares = jax.vmap(lambda c: load.load(c, experts))(choices)
    columns = jax.vmap(partial(router.layer_columns, tokens=tokens))(
        sums, blocks["token"].sum(0) / tokens, choices, shares
    )
    return columns | {
        "alike": blocks["alike"].mean(0),
        "maps": sums / jnp.maximum(sums.sum(-1, keepdims=True), 1e-9),
        "sample": blocks["sample"][0],
        "load": shares,
        "dropped": blocks["dropped"].sum(0) / tokens,
        "choices": choices,
        "stale": jnp.moveaxis(blocks["stale"], 0, 1).reshape(choices.shape),
    }


class Tokens(NamedTuple):
    """A stack's validation tokens [T]: row of text, token id (of a decoder's input), and language (an index)."""

    row: Int[np.ndarray, " T"]
    token: Int[np.ndarray, " T"]
    language: Int[np.ndarray, " T"]


def tokens_of(kind: TextKind, config: ConfigDict) -> dict[str, Tokens]:
    """Returns the tokens that each stack routes at an evaluation, in their order."""
    rows, tokens = jax.tree.map(jnp.asarray, held_out(kind.form, config)["validation"]), {}
    for stack, ids_of in kind.read.items():
        ids = np.asarray(ids_of(rows))
        row = np.repeat(np.arange(len(ids)), ids.shape[1])
        tokens[stack] = Tokens(row, ids.reshape(-1), np.asarray(rows.language)[row])
    return tokens


def layer_of(config: ConfigDict, sparse: int) -> int:
    """Returns the layer of a stack that holds the sparse layer number `sparse`."""
    return (sparse + 1) * (config.transformer.layers // max(config.transformer.sparse_layers, 1)) - 1


def traced(kind: TextKind, config: ConfigDict) -> dict[str, dict[str, Any]]:
    """Returns rows, ids, words and languages of the tokens of the arrays of choices (`ProblemPart.traced`)."""
    text, arrays = corpus(kind.form, config), {}
    names, vocabulary = np.asarray(text.languages), tokenizers.words(text.tokenizer)
    for stack, (row, token, language) in tokens_of(kind, config).items():
        layers = [f"{stack}_{layer_of(config, sparse)}" for sparse in range(config.transformer.sparse_layers)]
        if config.router.layers:
            texts = texts_by_layer(config)
            layers = [" ".join([name, *map("=".join, of.items())]) for name, of in zip(layers, texts, strict=True)]
        of_tokens = {"sequence": row, "token_ids": token, "labels": {"language": names[language]}}
        arrays[f"{stack}/choices"] = of_tokens | {"vocabulary": vocabulary, "layers": layers}
    return arrays


def column_of(metric: str) -> str:
    """Returns the column of a stack's metric: `router/METRIC`, or the name in the table METRICS."""
    return metric if metric in router.METRICS else f"router/{metric}"


def offline(problem: TextProblem, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a column of each layer, `router/load_max/encoder_1`, and their mean over layers, `router/load_max`."""
    columns: dict[str, np.ndarray] = {}
    layers: dict[str, list[np.ndarray]] = {}
    for stack, tokens in tokens_of(problem.kind, problem.config).items():
        for sparse in range(problem.config.transformer.sparse_layers):
            suffix = f"{stack}_{layer_of(problem.config, sparse)}"
            for metric, values in _layer(history, stack, sparse, tokens).items():
                columns[f"{column_of(metric)}/{suffix}"] = values
                layers.setdefault(column_of(metric), []).append(values)
    return columns | {column: np.mean(values, axis=0) for column, values in layers.items()}


def _layer(history: dict[str, np.ndarray], stack: str, sparse: int, tokens: Tokens) -> dict[str, np.ndarray]:
    """Returns the metrics of one layer at every evaluation: those of the program, churn, and information."""
    prefix = f"{stack}/"
    metrics = {
        name.removeprefix(prefix): values[:, sparse]
        for name, values in history.items()
        if name.startswith(prefix) and values.ndim == 2
    }
    choices, stale = history[f"{stack}/choices"][:, sparse], history[f"{stack}/stale"][:, sparse]
    metrics |= agreement.churns(choices)
    if (stale >= 0).any():  # -1 where outputs choose, not scores
        by_router = [agreement.churn(new, old) for new, old in zip(choices[1:], stale[1:], strict=True)]
        by_features = [agreement.churn(old, before) for old, before in zip(stale[1:], choices[:-1], strict=True)]
        metrics |= {"churn_router": np.array([np.nan, *by_router]), "churn_features": np.array([np.nan, *by_features])}
    moments = [agreement.information(now, tokens.language, tokens.row, tokens.token, DRAWS) for now in choices]
    return metrics | {name: np.array([moment[name] for moment in moments]) for name in moments[0]}


GATES = Probe(
    TextProblem,
    applies=lambda problem: problem.model.scores is not None,
    in_block=lambda evaluation, block: {
        stack: _stack_in_block(evaluation, stack, site, block) for stack, site in block.outputs.sites.items()
    },
    evaluate=_evaluate,
    offline=offline,
    columns={
        "router/mi_language": Column(
            "I(expert; language) (nats)",
            "Mutual information of the chosen expert and the language of the row, less its mean by chance:"
            " about 0 where routing ignores language.",
        ),
        "router/mi_language_given_token": Column(
            "I(expert; language | token id) (nats)",
            "Mutual information of expert and language among occurrences of the same token id, less its mean by chance:"
            " what routing knows of the language beyond which words it has.",
        ),
        "router/mi_token": Column(
            "I(expert; token id) (nats)",
            "Mutual information of the chosen expert and the id of the token, beyond what permuted ids have: about 0"
            " where routing ignores which token it is. Comparable between runs of one vocabulary and as many tokens.",
        ),
        "router/alike": Column(
            "mean cosine of\ntwo experts' outputs",
            "Mean cosine of the outputs of pairs of experts on held-out tokens: 1 where all say the same.",
            (-1.0, 1.0),
        ),
        "router/churn_router": Column(
            "churn by the router in the last interval",
            "Share of probe tokens whose experts change when the router of now replaces that of the last"
            " evaluation, on the features of now.",
            SHARE,
        ),
        "router/churn_features": Column(
            "churn by its features in the last interval",
            "Share of probe tokens whose experts change as features move, by the router of the last evaluation.",
            SHARE,
        ),
    },
)
