"""A T5 encoder-decoder (Raffel et al. 2020), sparse or one of its dense twins."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed.contracts import TextBatch
from routed.models.language_model import Read, context_of, language_model
from routed.models.model import Site
from routed.models.transformer import Plan, Stack, embedded, logits

#: What the decoder reads before the first target: the id that pads.
START = 0


def shifted(targets: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """The decoder's input: the targets, one place later."""
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)


class T5(nn.Module):
    """Logits [B, M, V], float32, of every target token from the tokens before it; and what the routers did."""

    plan: Plan

    @nn.compact
    def __call__(self, batch: TextBatch, step: Any = 0) -> tuple[Float[Array, "B M V"], dict[str, Site | None]]:
        transformer, vocabulary = self.plan.config.transformer, self.plan.config.data.vocabulary
        embedding = self.param("embedding", nn.initializers.normal(1.0), (vocabulary, transformer.dim))
        ids, before = batch.inputs, shifted(batch.targets)
        # Both stacks at once: the embedding has one gradient, which devices that share a run sum once.
        x = embedded(embedding, jnp.concatenate((ids, before), 1))
        source, encoder = Stack(self.plan, "encoder", name="encoder")(
            x[:, : ids.shape[1]], context_of(self.plan.config, ids, batch, step)
        )
        y, decoder = Stack(self.plan, "decoder", name="decoder")(
            x[:, ids.shape[1] :], context_of(self.plan.config, before, batch, step), source
        )
        return logits(self.plan, y, embedding), {"encoder": encoder, "decoder": decoder}


#: What the stacks of a T5 read.
READ: Read = {"encoder": lambda batch: batch.inputs, "decoder": lambda batch: shifted(batch.targets)}

#: The T5 of a config: sites and stacks `encoder` and `decoder`.
t5 = partial(language_model, T5, READ)
