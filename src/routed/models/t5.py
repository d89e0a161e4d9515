"""A T5 encoder-decoder (Raffel et al. 2020), sparse or one of its dense twins."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from routed.contracts import TextBatch
from routed.models.language_model import context_of, language_model, parts_of
from routed.models.model import Read, Site
from routed.models.transformer import Plan, Stack, embedded, logits
from routed.models.transformer_sizes import check_t5

#: The id that the decoder reads before the first target: the padding id.
START = 0


def shifted(targets: Int[Array | np.ndarray, "B M"]) -> Int[Array, "B M"]:
    """Returns the decoder's input: the targets, shifted by one position."""
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)


class T5(nn.Module):
    """Computes float32 logits [B, M, V] of each target token, and the decisions of the routers."""

    plan: Plan

    @nn.compact
    def __call__(self, batch: TextBatch, step: Any = 0) -> tuple[Float[Array, "B M V"], dict[str, Site | None]]:
        transformer, vocabulary = self.plan.config.transformer, self.plan.config.data.vocabulary
        embedding = self.param("embedding", nn.initializers.normal(1.0), (vocabulary, transformer.dim))
        ids, before = batch.inputs, shifted(batch.targets)
        # One lookup for both stacks: the embedding then has one gradient, which devices that share a run sum once.
        x = embedded(embedding, jnp.concatenate((ids, before), 1))
        source, encoder = Stack(self.plan, "encoder", name="encoder")(
            x[:, : ids.shape[1]], context_of(self.plan.config, ids, batch, step)
        )
        y, decoder = Stack(self.plan, "decoder", name="decoder")(
            x[:, ids.shape[1] :], context_of(self.plan.config, before, batch, step), source
        )
        return logits(self.plan, y, embedding), {"encoder": encoder, "decoder": decoder}


#: The ids that each stack of a T5 reads.
READ: Read = {"encoder": lambda batch: batch.inputs, "decoder": lambda batch: shifted(batch.targets)}

#: Builds the T5 of a config. The sites and the stacks are `encoder` and `decoder`.
t5 = partial(language_model, T5, READ)

#: name -> model, for text in and text out.
ENCODER_DECODERS = parts_of(t5, check_t5)
