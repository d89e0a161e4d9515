"""Texts with a class as a problem: a decoder, trained on text or not, learns the classes with a new head.

The head stands in place of the logits, and predicts the class of a row from the last token.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, SHARE, Column, TextBatch
from routed.models import DECODERS
from routed.models.decoder import READ
from routed.models.language_model import context_of, language_model
from routed.models.model import Model, Site
from routed.models.transformer import CAUSAL, Plan, Stack, embedded
from routed.models.transformer_sizes import attention_products, feed_of_token
from routed.papers.pham2024.labelled import CLASSIFIED, LABELLED
from routed.settings.setting import Setting
from routed.tasks.text import Corpus
from routed.training.language import language_part
from routed.training.text_problem import TextKind

COLUMNS = {
    "train/loss": Column(
        "training loss (nats per text)",
        "Mean cross-entropy of the training batches since the last evaluation, in nats for each text.",
        bounds=AT_LEAST_0,
    ),
    "eval/loss": Column(
        "validation loss (nats per text)",
        "Cross-entropy on held-out texts, in nats for each text; all arms are asked about the same texts.",
        bounds=AT_LEAST_0,
    ),
    "eval/accuracy": Column(
        "validation accuracy",
        "Share of held-out texts whose class the model ranks first.",
        bounds=SHARE,
        higher_is_better=True,
    ),
    "eval/prior": Column(
        "loss of the classes' shares (nats per text)",
        "Loss on the held-out texts of who knows only how often each class is in training.",
        bounds=AT_LEAST_0,
    ),
    "test/loss": Column(
        "test loss (nats per text),\nat the best validation so far",
        "Cross-entropy on the test texts, in nats for each text, of the model at the evaluation with the"
        " lowest validation loss so far.",
        bounds=AT_LEAST_0,
    ),
    "test/accuracy": Column(
        "test accuracy,\nat the best validation so far",
        "Share of the test texts whose class the model ranks first, at the evaluation with the lowest"
        " validation loss so far.",
        bounds=SHARE,
        higher_is_better=True,
    ),
}

#: The pretrained models of a run, which the engine loads.
SETTINGS = {
    "initial.workdir": Setting(
        "", "a finished workdir whose models (checkpoint.final=true) runs begin with, by arm and seed; empty: untrained"
    ),
    "initial.arm": Setting("", "the arm there; empty: that of the same name"),
}

#: Settings of `data` that texts with a class read.
READS = ("tokens", "vocabulary", "input_length", "eval_rows", "cache")


def at_best(history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the test metrics of the model with the lowest validation loss so far, for each evaluation."""
    losses = np.where(np.isfinite(history["eval/loss"]), history["eval/loss"], np.inf)
    best = [int(losses[: last + 1].argmin()) for last in range(len(losses))]
    return {name: history[name][best] for name in ("test/loss", "test/accuracy")}


def class_prior(corpus: Corpus, config: ConfigDict, rows: TextBatch) -> dict[str, float]:
    """Returns the loss of predicting each class as often as it occurs in training."""
    counts = np.bincount(corpus.train[0][:, 0], minlength=len(config.data.labels))
    return {"prior": -np.log(counts / counts.sum())[np.asarray(rows.targets)].mean()}


#: The name of the submodule whose parameters are the group `head`.
HEAD = "classes"


class Head(nn.Module):
    """Two float32 layers with tanh in between (Pham et al. 2024, released code)."""

    classes: int

    @nn.compact
    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B C"]:
        x = jnp.tanh(nn.Dense(x.shape[-1], name="hidden")(x.astype(jnp.float32)))
        return nn.Dense(self.classes, name="out")(x)


class Classifier(nn.Module):
    """Computes float32 logits [B, 1, C] of the class of each row, and the decisions of the routers.

    The parameters of the stack and the embedding have the names that they have in a `Decoder`.
    """

    plan: Plan

    @nn.compact
    def __call__(self, batch: TextBatch, step: Any = 0) -> tuple[Float[Array, "B 1 C"], dict[str, Site | None]]:
        data, transformer = self.plan.config.data, self.plan.config.transformer
        embedding = self.param("embedding", nn.initializers.normal(1.0), (data.vocabulary, transformer.dim))
        y, sites = Stack(self.plan, CAUSAL, name=CAUSAL)(
            embedded(embedding, batch.inputs), context_of(self.plan.config, batch.inputs, batch, step)
        )
        return Head(len(data.labels), name=HEAD)(y[:, -1])[:, None], {CAUSAL: sites}


def classifier(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds the classifier of a config. The site and the stack are `decoder`."""
    form = {"positions": config.transformer.positions, "norm": config.transformer.norm}
    return language_model(lambda plan: Classifier(plan._replace(**form)), READ, config, mesh, head=HEAD)


def flops_of_classifier_row(config: ConfigDict, experts: Any = None) -> Any:
    """Computes the model FLOPs of training a classifier on one row: a head of two layers reads the last token."""
    t, length = config.transformer, config.data.input_length
    products = t.layers * attention_products(config, length, length) + feed_of_token(config, experts) * length
    return 6.0 * (products + t.dim * (t.dim + len(config.data.labels)))


DECODER = DECODERS["decoder"]
MODEL = DECODER._replace(build=classifier, reads=tuple(key for key in DECODER.reads if key != "transformer.tied"))
CLASSIFIER = language_part(
    TextKind(
        CLASSIFIED,
        READ,
        {"classifier": MODEL},
        flops_of_classifier_row,
        reads=READS,
        references=class_prior,
        columns=COLUMNS,
        finished=at_best,
        sources={"labelled": LABELLED},
        settings=SETTINGS,
        # At the best validation: training soon overfits a small table, and the last validation compares how soon.
        compared="test/loss",
    )
)
