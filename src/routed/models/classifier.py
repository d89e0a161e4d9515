"""A pretrained decoder with a head in place of its logits: predicts the class of a row from the last token."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import TextBatch
from routed.models.decoder import READ
from routed.models.language_model import context_of, language_model
from routed.models.model import Model, Site
from routed.models.transformer import CAUSAL, Plan, Stack, embedded

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
