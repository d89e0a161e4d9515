"""A decoder-only transformer, sparse or a dense twin: predicts each token from the tokens before it in its row."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from routed.contracts import TextBatch
from routed.models.language_model import context_of, language_model, parts_of
from routed.models.model import Model, Read, Site
from routed.models.transformer import CAUSAL, Plan, Stack, embedded, logits
from routed.models.transformer_sizes import DECODER, TRANSFORMER, check_decoder
from routed.tasks.text.spans import END
from routed.tasks.text.stream import DOCUMENTS


class Decoder(nn.Module):
    """Computes float32 logits [B, L, V] of the token after each input token, and the decisions of the routers.

    With as many sparse layers as layers, the blocks are those of a Switch transformer; with half as many, those of GLaM
    (dense and sparse layers alternate).
    """

    plan: Plan

    @nn.compact
    def __call__(self, batch: TextBatch, step: Any = 0) -> tuple[Float[Array, "B L V"], dict[str, Site | None]]:
        config = self.plan.config
        embedding = self.param(
            "embedding", nn.initializers.normal(1.0), (config.data.vocabulary, config.transformer.dim)
        )
        ids, packed = batch.inputs, config.data.packing == DOCUMENTS
        y, sites = Stack(self.plan, CAUSAL, name=CAUSAL)(
            embedded(embedding, ids),
            context_of(self.plan.config, ids, batch, step),
            mask=same_document(ids) if packed else None,
        )
        return logits(self.plan, y, embedding), {CAUSAL: sites}


def same_document(ids: Int[Array, "B L"]) -> Bool[Array, "B L L"]:
    """Returns a mask of token pairs of the same document; the END token ends a document."""
    ends = ids == END
    document = jnp.cumsum(ends, 1) - ends
    return document[:, :, None] == document[:, None, :]


#: The ids that the only stack reads.
READ: Read = {CAUSAL: lambda batch: batch.inputs}


def decoder(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds the decoder of a config. The site and the stack are `decoder`."""
    form = {"positions": config.transformer.positions, "norm": config.transformer.norm}
    return language_model(lambda plan: Decoder(plan._replace(**form)), READ, config, mesh)


#: name -> model, for next-token prediction.
DECODERS = parts_of(
    decoder, check_decoder, ("decoder", "decoder_active", "decoder_total"), settings=(*TRANSFORMER, *DECODER)
)
