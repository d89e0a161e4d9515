"""The problem of text: language models on rows that the host feeds.

Validation is paired: every arm and seed sees the same rows, with the same spans cut out where spans are.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging as log
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Scalar
from ml_collections import ConfigDict

from routed.contracts import KIND, Column, TextBatch
from routed.layer.dispatch.parallel import devices_of_run
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import group_of
from routed.models.model import ModelPart, Read
from routed.settings.setting import Setting, refuse
from routed.tasks.text import stream
from routed.tasks.text.corpus import Corpus
from routed.tasks.text.sources import SOURCES
from routed.tasks.text.spans import END, PAD
from routed.tasks.text.stream import DOCUMENTS, Form
from routed.training import fitting
from routed.training.probes import Block, Evaluation, look, measure
from routed.training.problem import Inputs, Problem

#: FLOPs of training on a row of a config; the second argument is the number of experts that compute a token (None: by
#: the selection).
Flops = Callable[..., Any]


#: The seed of the batches in which token ids are counted, which shares no stream with a run.
COUNTING = 2**31 - 1


@functools.lru_cache(maxsize=4)
def _corpus(form: Form, key: str) -> Corpus:
    return form.load(ConfigDict(json.loads(key)).data)


def corpus(form: Form, config: ConfigDict) -> Corpus:
    """Returns the corpus of a config, loaded once in a process."""
    return _corpus(form, key_of(config))


def key_of(config: ConfigDict) -> str:
    """Returns the settings of the data as a text, the key of caches."""
    return json.dumps({"data": dict(config.data)}, sort_keys=True, default=list)


def held_out(form: Form, config: ConfigDict) -> dict[str, TextBatch]:
    """Returns the rows that a run is evaluated on: `validation`, and `test` of a form that is tested."""
    if not form.tested:
        return {"validation": stream.validation(corpus(form, config), config)}
    return dict(zip(("validation", "test"), stream.held_out(form, corpus(form, config), config), strict=True))


def feed(form: Form, config: ConfigDict, seed: int, rows: slice = slice(None)) -> Callable[[int, int], TextBatch]:
    """Returns (first, steps) -> `rows` of the batches of these steps, [steps, ...]; a pure function."""
    source = config.seed if "order" in config.shared_streams and seed != COUNTING else seed
    make = stream.batch_function(form, corpus(form, config), config, source, rows)

    def batches(first: int, steps: int) -> TextBatch:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *(make(step) for step in range(first, first + steps)))

    return batches


def feed_shape(form: Form, config: ConfigDict, steps: int) -> TextBatch:
    """Returns the shapes of the batches of `steps` steps."""
    inputs, targets = form.lengths(config.data)
    shapes = (config.batch_size, inputs), (config.batch_size, targets), (config.batch_size,)
    return TextBatch(*(jax.ShapeDtypeStruct((steps, *s), np.int32) for s in shapes))  # type: ignore[arg-type]


def counted_of(
    form: Form, config: Any, inputs: Int[Array | np.ndarray, "B L"]
) -> Float[Array | np.ndarray, "B L"] | None:
    """Returns 1 for each target that counts; None: all count.

    0 for the first target behind a document's end (`data.packing`), which no token of its document predicts.
    """
    if not form.packed or config.data.packing != DOCUMENTS:
        return None
    return (inputs != END).astype(jnp.float32)


@dataclass(frozen=True, eq=False)
class TextKind:
    """A kind of text problem: the form of its rows, the ids that each stack reads, and the models for them."""

    form: Form
    read: Read
    models: Mapping[str, ModelPart]
    flops: Flops
    #: Shared settings of the node `data`.
    reads: tuple[str, ...]
    #: Losses on the validation rows that need no network, by name: the columns `eval/NAME`.
    references: Callable[[Corpus, ConfigDict, TextBatch], Mapping[str, float]]
    columns: Mapping[str, Column] = field(default_factory=dict)
    #: Columns of this kind that need the whole history of a run.
    finished: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda history: {}
    #: The table of `data.name`.
    sources: Mapping[str, Any] = field(default_factory=lambda: SOURCES)
    settings: Mapping[str, Setting] = field(default_factory=dict)
    #: The column by which reports compare arms; empty: the validation loss.
    compared: str = ""


@dataclass(frozen=True, eq=False)
class TextProblem(Problem):
    """A language model on rows of a kind; with a mesh of axes `data` and `expert`, its devices share the run."""

    kind: TextKind
    mesh: Mesh | None
    languages: int

    def draw_world(self, keys, config) -> Any:
        return ()

    def init(self, inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns fresh parameters; a router by token id gets its table of experts."""
        rows = jax.tree.map(lambda a: a[:1], inputs.shared["validation"])
        params, state = self.model.init(inputs.keys["init"], rows)

        def fill(path, leaf: Array) -> Array:
            tables = inputs.shared.get("table", {}).get(path[0].key, {})
            kind = path[2].key if path[2].key.startswith(KIND) else f"{KIND}0"
            is_table = path[1].key == "router" and kind in tables
            return jnp.broadcast_to(tables[kind], leaf.shape) if is_table else leaf

        return params | {"router": jax.tree_util.tree_map_with_path(fill, params["router"])}, state

    def batch(self, inputs: Inputs, feed, step) -> TextBatch:
        return jax.tree.map(lambda a: a[step % len(a)], feed)

    def task_loss(self, config, outputs, batch: TextBatch) -> tuple[Scalar, Scalar]:
        logits = outputs.prediction
        partition = jax.nn.logsumexp(logits, axis=-1)
        nats = partition - target_logits(logits, batch.targets)
        counted = self.counted(batch)
        nats = nats.mean() if counted is None else (nats * counted).sum() / counted.sum()
        if not config.losses.logits_z:
            return nats, nats
        square = (partition**2).mean() if counted is None else (partition**2 * counted).sum() / counted.sum()
        return nats + config.losses.logits_z * square, nats

    def remember(self, params, state) -> Any:
        """Returns the routers, and the state, with which the next evaluation routes again for its churn."""
        return params["router"], state

    def evaluate(self, inputs: Inputs, params, state, step, memory) -> dict[str, Array]:
        """Returns all metrics; rows pass in blocks of at most a batch.

        Raises:
          UserError: devices that share a run cannot share these blocks.
        """
        rows = inputs.shared["validation"]
        evaluation = Evaluation(self, inputs, params, state, step, memory, rows)
        rule, dispatch = self.evaluation_rule()

        def forward(block: TextBatch):
            outputs = self.model.apply(params, state, block, rule, dispatch, step=step)
            return look(evaluation, Block(block, rule, outputs))

        return measure(evaluation, jax.lax.map(forward, in_blocks(self.config, rows, "validation")))

    @property
    def fit_step(self) -> int | None:
        return fitting.fit_step(self.config) if self.model.scores is not None else None

    def fit(self, inputs: Inputs, params, state, step, teacher) -> Any:
        return fitting.fitted(self, inputs, params, state, step, teacher)

    def teacher(self, inputs: Inputs, params, state) -> Any:
        if self.fit_step is None or all(c.router.fit != fitting.DISTILLED for c, _ in fitting.kinds_of(self.config)):
            return {}
        shapes = jax.eval_shape(partial(fitting.scores_on, self), params, state, inputs.shared["fitted_on"])
        return jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), shapes)

    def evaluation_rule(self) -> tuple[SelectionRule, str]:
        """Returns the rule and the dispatch of evaluation; defaults for a dense twin, which reads neither."""
        if not self.part.routed:
            return SelectionRule(), "dense"
        return selection_rule(self.config.selection, evaluation=True), self.config.dispatch

    def counted(self, batch: TextBatch) -> Float[Array | np.ndarray, "B L"] | None:
        """Returns 1 for each target that counts, 0 for others; None: all count."""
        return counted_of(self.kind.form, self.config, batch.inputs)

    def real(self, batch: TextBatch) -> Bool[Array, " T"] | None:
        """Returns True for tokens that are text, False for pads; None: all are text."""
        return (batch.inputs != PAD).reshape(-1) if self.kind.form.padded else None


def build(kind: TextKind, config: ConfigDict, pool: int, mesh: Mesh | None = None) -> TextProblem:
    """Returns the problem of a config."""
    part, languages = kind.models[config.model], len(corpus(kind.form, config).languages)
    return TextProblem(config, part, part.build(config, mesh), kind, mesh, languages)


@functools.cache
def warn_of_blocks(split: str, rows: int, size: int, fits: int) -> None:
    """Warns once that an evaluation takes few rows at a time, as a batch does not divide them."""
    log.warning(
        "the %s text gives %d rows, evaluated in blocks of %d; data.eval_rows=%d is faster", split, rows, size, fits
    )


def in_blocks(config: ConfigDict, rows: TextBatch, split: str) -> TextBatch:
    """Returns the rows of a split in blocks of at most a batch, [blocks, size, ...]; warns of many small blocks.

    Raises:
      UserError: devices that share a run cannot share these blocks.
    """
    count = len(rows.inputs)
    size = group_of(config.batch_size, count)
    if size % (devices := devices_of_run(config)):
        fits = max(1, count // devices) * devices
        refuse(
            "data.eval_rows",
            config.data.eval_rows,
            f"the {split} text gives {count} rows, of which {devices} devices cannot share blocks of {size}; use"
            f" {fits}",
        )
    if 4 * size <= min(config.batch_size, count):
        warn_of_blocks(split, count, size, count - count % config.batch_size)
    return jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), rows)


def target_logits(logits: Float[Array, "B M V"], targets: Int[Array, "B M"]) -> Float[Array, "B M"]:
    """Returns the logit of each target."""
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
