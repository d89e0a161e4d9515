"""The problem of text: language models on rows that the host feeds.

Validation is paired: every arm and seed sees the same rows, with the same spans cut out where spans are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging as log
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Scalar
from ml_collections import ConfigDict

from routed.contracts import Column, TextBatch
from routed.layer.rule import Rule, rule_of
from routed.layer.selection import group_of
from routed.models.language_model import Read
from routed.models.model import ModelPart
from routed.settings.setting import Setting, refuse
from routed.tasks import text
from routed.tasks.text import Corpus, Form
from routed.tasks.text.spans import PAD
from routed.training import text_feed
from routed.training.probes import Block, Evaluation, look, measure
from routed.training.problem import Inputs, Problem

#: FLOPs of training on a row of a config; the second argument is the number of experts that compute a token (None: by
#: the selection).
Flops = Callable[..., Any]


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
    sources: Mapping[str, Any] = field(default_factory=lambda: text.SOURCES)
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
        del keys, config
        return ()

    def init(self, inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns fresh parameters; a router by token id gets its table of experts."""
        rows = jax.tree.map(lambda a: a[:1], inputs.shared["validation"])
        params, state = self.model.init(inputs.keys["init"], rows)
        if (table := inputs.shared.get("table")) is None:
            return params, state
        filled = {
            stack: groups | {"router": jax.tree.map(lambda a: jnp.broadcast_to(table, a.shape), groups["router"])}
            for stack, groups in params["router"].items()
        }
        return params | {"router": filled}, state

    def batch(self, inputs: Inputs, feed, step) -> TextBatch:
        del inputs
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

    def evaluation_rule(self) -> tuple[Rule, str]:
        """Returns the rule and the dispatch of evaluation; defaults for a dense twin, which reads neither."""
        if not self.part.routed:
            return Rule(), "dense"
        return rule_of(self.config.selection, evaluation=True), self.config.dispatch

    def counted(self, batch: TextBatch) -> Float[Array | np.ndarray, "B L"] | None:
        """Returns 1 for each target that counts, 0 for others; None: all count."""
        return text_feed.counted_of(self.kind.form, self.config, batch.inputs)

    def real(self, batch: TextBatch) -> Bool[Array, " T"] | None:
        """Returns True for tokens that are text, False for pads; None: all are text."""
        return (batch.inputs != PAD).reshape(-1) if self.kind.form.padded else None


def build(kind: TextKind, config: ConfigDict, pool: int, mesh: Mesh | None = None) -> TextProblem:
    """Returns the problem of a config."""
    del pool
    part, languages = kind.models[config.model], len(text_feed.corpus(kind.form, config).languages)
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
    if size % (devices := config.mesh.data * config.mesh.expert):
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
