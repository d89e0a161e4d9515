"""Kinds of text problems as parts: what the engine asks of each."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from routed.contracts import Column, TextBatch
from routed.models.transformer_sizes import is_sparse, work_of_token
from routed.settings.setting import Setting, at_least
from routed.settings.tree import override
from routed.training import probes, text_feed
from routed.training.optimiser import refuse_factored_experts
from routed.training.phases import mean_so_far_of
from routed.training.problem import Cost, ProblemPart
from routed.training.text_gates import traced
from routed.training.text_problem import TextKind, TextProblem, build
from routed.training.text_shared import shared_arrays


def columns_of(kind: TextKind, config: ConfigDict) -> dict[str, Column]:
    """Returns the columns of all probes, and the kind's own."""
    del config
    return probes.columns_of(TextProblem) | dict(kind.columns)


def offline(kind: TextKind, config: ConfigDict, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the columns of a run that need its whole history, or the host."""
    return probes.finish(build(kind, config, 0), history) | kind.finished(history)


def about(kind: TextKind, config: ConfigDict) -> str:
    """Returns the sentence about the data in a report."""
    languages = ""
    if "languages" in kind.reads:
        languages = f", {len(config.data.languages)} languages" if config.data.languages else ", all languages there"
    source = kind.sources[config.data.name].about(config.data)
    return f"data.name={config.data.name}{languages}{source}; {config.steps * config.batch_size:,} rows a run"


def digest(kind: TextKind, config: ConfigDict) -> str:
    """Returns the digest of the text."""
    return f"{config.data.name} {text_feed.corpus(kind.form, config).digest}"


def pieces(kind: TextKind, config: ConfigDict) -> bytes:
    """Returns the SentencePiece model of the tokens; empty for bytes and characters."""
    return text_feed.corpus(kind.form, config).tokenizer.model


def cost(kind: TextKind, config: ConfigDict) -> Cost:
    """Returns the cost of a step, the mean over the steps where phases select in different ways."""
    learning = float(mean_so_far_of(work_of_token, config, config, config.steps)) if is_sparse(config) else None
    return Cost(
        config.batch_size * kind.form.tokens(config.data),
        config.batch_size * kind.flops(config, learning),
        parameters=partial(parameters, kind, config),
    )


def parameters(kind: TextKind, config: ConfigDict) -> int:
    """Counts the parameters of the model, for any batch and text."""
    small = override(config, {"batch_size": 1, "selection.group_size": 0})
    rows = TextBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((1, 1), (1, 1), (1,))))
    params, _ = jax.eval_shape(kind.models[config.model].build(small, None).init, jax.random.key(0), rows)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def check(kind: TextKind, config: ConfigDict) -> None:
    """Raises if the optimiser does not fit the model."""
    refuse_factored_experts(kind.models[config.model], config)


def language_part(kind: TextKind) -> ProblemPart:
    """Returns the problem of a kind of text as a part."""
    return ProblemPart(
        build=partial(build, kind),
        data=kind.sources,
        models=kind.models,
        loss="eval/loss",
        compared=kind.compared,
        columns=partial(columns_of, kind),
        shared_arrays=partial(shared_arrays, kind),
        feed=partial(text_feed.feed, kind.form),
        feed_shape=partial(text_feed.feed_shape, kind.form),
        offline=partial(offline, kind),
        traced=partial(traced, kind),
        pieces=partial(pieces, kind),
        digest=partial(digest, kind),
        about=partial(about, kind),
        cost=partial(cost, kind),
        causal=True,
        watched=True,
        shareable=True,
        settings={
            "losses.logits_z": Setting(0.0, "coefficient: mean squared log-partition of the logits", at_least(0)),
            **kind.settings,
        },
        uses=("model",),
        reads=tuple(f"data.{name}" for name in kind.reads),
        check=partial(check, kind),
    )
