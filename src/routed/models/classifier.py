"""A decoder that was trained on text, and in place of its logits a head: the class of a row, read at its last token."""

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

#: The submodule that is the group `head` of parameters.
HEAD = "classes"


class Head(nn.Module):
    """Two layers with tanh between them (Pham et al. 2024, released code), float32."""

    classes: int

    @nn.compact
    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B C"]:
        x = jnp.tanh(nn.Dense(x.shape[-1], name="hidden")(x.astype(jnp.float32)))
        return nn.Dense(self.classes, name="out")(x)


class Classifier(nn.Module):
    """Logits [B, 1, C], float32, of the class of each row; and what the routers did.

    The parameters of stack and embedding are those of a `Decoder`, by the same names.
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
    """The classifier of a config; its site and its stack are `decoder`."""
    form = {"positions": config.transformer.positions, "norm": config.transformer.norm}
    return language_model(lambda plan: Classifier(plan._replace(**form)), READ, config, mesh, head=HEAD)
