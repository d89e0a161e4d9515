"""The problems of text as parts: what the engine asks of any kind, and the kinds of T5 and of a decoder."""

from __future__ import annotations

import functools
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, AT_LEAST_1, KIND, SHARE, Column, TextBatch
from routed.models import decoder, t5
from routed.models.router_layers import check_layers
from routed.models.transformer_sizes import flops_of_decoder_row, flops_per_row, is_sparse, work_of_token
from routed.routers import ROUTERS
from routed.settings.setting import COEFFICIENT, Setting, one_of
from routed.settings.tree import override
from routed.tasks.text import CONTINUED, DOCUMENTS, SHARED, SOURCES, SPANS, STREAM, Corpus, bigram_loss, ngram_loss
from routed.training import fitting, probes, text_problem
from routed.training.optimiser import refuse_factored_experts
from routed.training.phases import mean_so_far_of
from routed.training.problem import Cost, ProblemPart
from routed.training.sample_checks import warn_of_tuning
from routed.training.text_gates import traced
from routed.training.text_problem import TextKind, TextProblem, build, corpus, held_out

#: Batches in which token ids are counted for a table of experts.
COUNTED = 64


def about(kind: TextKind, config: ConfigDict) -> str:
    """Returns the sentence about the data in a report."""
    languages = ""
    if "languages" in kind.reads:
        languages = f", {len(config.data.languages)} languages" if config.data.languages else ", all languages there"
    source = kind.sources[config.data.name].about(config.data)
    return f"data.name={config.data.name}{languages}{source}; {config.steps * config.batch_size:,} rows a run"


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
    ungrouped = {"selection.group_size": 0} if kind.models[config.model].routed else {}
    small = override(config, {"batch_size": 1} | ungrouped)
    rows = TextBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((1, 1), (1, 1), (1,))))
    params, _ = jax.eval_shape(kind.models[config.model].build(small, None).init, jax.random.key(0), rows)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def shared_arrays(kind: TextKind, config: ConfigDict) -> dict[str, Any]:
    """Returns the held-out rows, their `references`, and each stack's `table` of each kind of router by token id."""
    shared: dict[str, Any] = held_out(kind.form, config) | {
        "references": _references(kind, text_problem.key_of(config))
    }
    if not kind.models[config.model].routed:
        return shared
    kinds = [kind for kind, _ in fitting.kinds_of(config)]
    makers = [ROUTERS[kind.router.name].from_counts for kind in kinds]
    if fitting.fit_step(config) is not None:
        batches = text_problem.feed(kind.form, config, text_problem.COUNTING)
        fewest = config.batch_size * min(kind.form.lengths(config.data))  # tokens of a batch in a stack
        shared["fitted_on"] = batches(0, -(-fitting.TOKENS // fewest))
    if any(makers):
        batches = text_problem.feed(kind.form, config, text_problem.COUNTING)
        rows = [jax.tree.map(lambda a: a[0], batches(step, 1)) for step in range(COUNTED)]
        shared["table"] = {}
        for stack, read in kind.read.items():
            ids = np.concatenate([np.asarray(read(batch)).reshape(-1) for batch in rows])
            counts = np.bincount(ids, minlength=config.data.vocabulary), config.experts.count
            shared["table"][stack] = {
                f"{KIND}{i}": make(*counts, of_kind.router.experts_per_id, of_kind.router.table_seed)
                for i, (make, of_kind) in enumerate(zip(makers, kinds, strict=True))
                if make is not None
            }
    return shared


@functools.lru_cache(maxsize=4)
def _references(kind: TextKind, key: str) -> dict[str, np.float32]:
    """Returns losses on the validation rows that need no network, in float32."""
    config = ConfigDict(json.loads(key) | {"batch_size": 64})
    losses = kind.references(corpus(kind.form, config), config, held_out(kind.form, config)["validation"])
    return {name: np.float32(loss) for name, loss in losses.items()}


def check(kind: TextKind, config: ConfigDict) -> None:
    """Refuses optimisers that mix experts up, and layers and fits of a router that are not possible."""
    if kind.models[config.model].counts_experts:
        refuse_factored_experts(config)
    if kind.models[config.model].routed:
        check_layers(config)
        fitting.check_fit(config)
    if config.rates == "tuned" and not kind.form.tested:  # the validation rows are those that are reported
        warn_of_tuning(config.data.name)


def language_part(kind: TextKind) -> ProblemPart:
    """Returns the problem of a kind of text as a part."""
    return ProblemPart(
        build=partial(build, kind),
        data=kind.sources,
        models=kind.models,
        loss="eval/loss",
        compared=kind.compared,
        columns=lambda config: probes.columns_of(TextProblem) | dict(kind.columns),
        shared_arrays=partial(shared_arrays, kind),
        feed=partial(text_problem.feed, kind.form),
        feed_shape=partial(text_problem.feed_shape, kind.form),
        offline=lambda config, history: probes.finish(build(kind, config, 0), history) | kind.finished(history),
        traced=partial(traced, kind),
        pieces=lambda config: corpus(kind.form, config).tokenizer.model,
        digest=lambda config: f"{config.data.name} {corpus(kind.form, config).digest}",
        about=partial(about, kind),
        cost=partial(cost, kind),
        causal=True,
        watched=True,
        shareable=True,
        settings={
            "losses.logits_z": Setting(0.0, "coefficient: mean squared log-partition of the logits", COEFFICIENT),
            **kind.settings,
        },
        uses=("model",),
        reads=tuple(f"data.{name}" for name in kind.reads),
        check=partial(check, kind),
    )


def bigram_and_floors(corpus: Corpus, config: ConfigDict, rows: TextBatch) -> dict[str, float]:
    """Returns the loss of a bigram model, and the least losses that are possible where the source declares them."""
    floors = SOURCES[config.data.name].floors
    return {"bigram": bigram_loss(corpus, config), **({} if floors is None else floors(config.data, rows))}


#: Text in, text out: an encoder-decoder fills in the spans that were cut out of rows.
ENCODER_DECODER = language_part(
    TextKind(
        SPANS,
        t5.READ,
        t5.ENCODER_DECODERS,
        flops_per_row,
        reads=tuple(SHARED),
        references=bigram_and_floors,
        columns={
            "eval/bigram": Column(
                "loss of a bigram model (nats per token)",
                "Loss of a smoothed model of the token before: an arm must be better to need a network.",
                AT_LEAST_0,
            ),
            "eval/floor": Column(
                "least loss that is possible (nats per token)",
                "Entropy of the language that generated the text: no model does better on average.",
                AT_LEAST_0,
            ),
            "eval/floor_blind": Column(
                "least loss without the dialect (nats per token)",
                "The least loss of a model that is not told which dialect a row is in.",
                AT_LEAST_0,
            ),
        },
    )
)


def at_best(history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns bits and perplexity per test token of the model with the lowest validation loss so far.

    One value for each evaluation. Bits are nats / ln 2, perplexity is exp of nats; a token is a character, or a byte.
    """
    losses = np.where(np.isfinite(history["eval/loss"]), history["eval/loss"], np.inf)
    best = [int(losses[: last + 1].argmin()) for last in range(len(losses))]
    nats = history["test/loss"][best].astype(float)
    return {"test/bits": nats / np.log(2), "test/perplexity": np.exp(nats)}


def five_gram(corpus: Corpus, config: ConfigDict, rows: TextBatch) -> dict[str, float]:
    """Returns the loss of an interpolated 5-gram model of the training text."""
    texts = [cut[:, :-1].reshape(-1) for cut in corpus.train]
    weights = text_problem.counted_of(CONTINUED, config, rows.inputs)
    counted = None if weights is None else np.asarray(weights, bool)
    loss = ngram_loss(texts, np.asarray(rows.inputs), np.asarray(rows.targets), corpus.vocabulary, counted=counted)
    return {"ngram": loss}


#: Text that is continued: a decoder alone predicts every token of a row from the tokens before it, without spans.
DECODER = language_part(
    TextKind(
        CONTINUED,
        decoder.READ,
        decoder.DECODERS,
        flops_of_decoder_row,
        reads=tuple(name for name in SHARED if name not in ("noise_density", "mean_span")),
        references=five_gram,
        columns={
            "eval/ngram": Column(
                "loss of an interpolated 5-gram model (nats per token)",
                "Loss on the held-out rows of a 5-gram model of the training text (of 17 million of its tokens"
                " at most), interpolated by Witten and Bell: an arm that is not better needs no network.",
                AT_LEAST_0,
            ),
            "test/loss": Column(
                "test loss (nats per token)", "Cross-entropy on the test rows, in nats for each token.", AT_LEAST_0
            ),
            "test/accuracy": Column(
                "test token accuracy", "Share of test tokens that the model ranks first.", SHARE, higher_is_better=True
            ),
            "test/bits": Column(
                "bits per token, test,\nat the best validation so far",
                "Test cross-entropy in bits, at the evaluation with the lowest validation loss so far.",
                AT_LEAST_0,
            ),
            "test/perplexity": Column(
                "perplexity, test,\nat the best validation so far",
                "exp of the test cross-entropy in nats, at the evaluation with the lowest validation loss so far.",
                AT_LEAST_1,
                log=True,
            ),
        },
        finished=at_best,
        settings={
            "data.packing": Setting(
                STREAM,
                "stream: a decoder's rows are one text; documents: each ends with END, no token sees another"
                " document's, and none is predicted across",
                one_of((STREAM, DOCUMENTS)),
                omit_default_from_identity=True,
            )
        },
    )
)
