"""Problems of text: language models on rows that the host feeds.

Validation is paired: every arm and seed sees the same rows, with the same spans cut out where spans are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed.contracts import Column, TextBatch
from routed.metrics.router import COLUMNS as ROUTER_COLUMNS
from routed.models.language_model import Read
from routed.models.model import ModelPart
from routed.models.transformer_sizes import is_sparse, work_of_token
from routed.settings.setting import Setting, at_least
from routed.settings.tree import override
from routed.tasks import text
from routed.tasks.text import Form
from routed.training import text_feed
from routed.training.language_columns import COLUMNS
from routed.training.language_evaluation import at, evaluate
from routed.training.phases import mean_so_far_of
from routed.training.problem import Cost, Inputs, Problem, ProblemPart
from routed.training.text_history import offline, traced

#: FLOPs of training on a row of a config, of which so many experts compute a token (None: as its selection says).
Flops = Callable[..., Any]


def build(
    form: Form,
    models: Mapping[str, ModelPart],
    flops: Flops,
    config: ConfigDict,
    pool: int,
    mesh: Mesh | None = None,
) -> Problem:
    """The problem of a config; with a mesh of axes `data` and `expert`, its devices share the run."""
    del pool
    model, languages = models[config.model].build(config, mesh), len(text_feed.corpus(form, config).languages)

    def init(inputs: Inputs):
        rows = jax.tree.map(lambda a: a[:1], inputs.shared["validation"])
        params, state = model.init(inputs.keys["init"], rows)
        if "table" in inputs.shared:
            table = inputs.shared["table"]
            spread = lambda own: jax.tree.map(lambda a: jnp.broadcast_to(table, a.shape), own)  # noqa: E731
            stacks = {name: one | {"router": spread(one["router"])} for name, one in params["router"].items()}
            params = params | {"router": stacks}
        return params, state

    def task_loss(phase: Any, outputs, batch: TextBatch):
        logits = outputs.prediction
        partition = jax.nn.logsumexp(logits, axis=-1)
        nats = partition - at(logits, batch.targets)
        counted = text_feed.counted_of(config, batch.inputs)
        nats = nats.mean() if counted is None else (nats * counted).sum() / counted.sum()
        if not phase.losses.logits_z:
            return nats, nats
        square = (partition**2).mean() if counted is None else (partition**2 * counted).sum() / counted.sum()
        return nats + phase.losses.logits_z * square, nats

    return Problem(
        model=model,
        draw_world=lambda keys, run: (),
        init=init,
        batch=lambda inputs, feed, step: jax.tree.map(lambda a: a[step % len(a)], feed),
        task_loss=task_loss,
        evaluate=lambda inputs, params, state, step, memory: evaluate(
            config, model, flops, languages, form.padded, mesh, inputs, params, state, step, memory
        ),
        remember=lambda params, state: (params["router"], state),
    )


def _about(sources: Mapping[str, Any], reads: tuple[str, ...], config: ConfigDict) -> str:
    languages = ""
    if "languages" in reads:
        languages = f", {len(config.data.languages)} languages" if config.data.languages else ", all languages there"
    source = sources[config.data.name].about(config.data)
    return f"data.name={config.data.name}{languages}{source}; {config.steps * config.batch_size:,} rows a run"


def parameters(models: Mapping[str, ModelPart], config: ConfigDict) -> int:
    """Parameters of the model, whatever the batch and the text."""
    small = override(config, {"batch_size": 1, "selection.group_size": 0})
    rows = TextBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((1, 1), (1, 1), (1,))))
    params, _ = jax.eval_shape(models[config.model].build(small, None).init, jax.random.key(0), rows)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def language_part(
    form: Form,
    read: Read,
    models: Mapping[str, ModelPart],
    columns: Mapping[str, Column],
    flops: Flops,
    reads: tuple[str, ...],
    finished: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda history: {},
    sources: Mapping[str, Any] = text.SOURCES,
    settings: Mapping[str, Setting] = MappingProxyType({}),
    compared: str = "",
) -> ProblemPart:
    """The problem of rows of a `form`, for models whose stacks `read` them.

    `flops` are a row's, `finished` adds columns to a history; `sources` is the table of `data.name`, there may be further settings, and reports
    compare arms by the column `compared` (default: the validation loss).
    """
    return ProblemPart(
        build=partial(build, form, models, flops),
        data=sources,
        models=models,
        loss="eval/loss",
        compared=compared,
        columns=lambda config: ROUTER_COLUMNS | COLUMNS | dict(columns),
        shared_arrays=partial(text_feed.shared_arrays, form),
        feed=partial(text_feed.feed, form),
        feed_shape=partial(text_feed.feed_shape, form),
        offline=lambda config, history: offline(form, read, config, history) | finished(history),
        traced=lambda config: traced(form, read, config),
        pieces=lambda config: text_feed.corpus(form, config).tokenizer.model,
        digest=lambda config: f"{config.data.name} {text_feed.corpus(form, config).digest}",
        about=partial(_about, sources, reads),
        cost=lambda config: Cost(
            config.batch_size * form.tokens(config.data),
            config.batch_size
            * flops(
                config,
                float(mean_so_far_of(work_of_token, config, config, config.steps)) if is_sparse(config) else None,
            ),
            parameters=partial(parameters, models, config),
        ),
        causal=True,
        watched=True,
        shareable=True,
        settings={
            "losses.logits_z": Setting(0.0, "coefficient: mean squared log-partition of the logits", at_least(0)),
            **settings,
        },
        uses=("model",),
        reads=tuple(f"data.{name}" for name in reads),
    )
