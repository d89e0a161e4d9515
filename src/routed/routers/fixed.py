"""Routers that decide without learning: the true cluster, or a hash of the raw input."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

#: Softmax of a gap this wide is exactly 0 and 1 in float32.
CERTAIN = 1e4


class OracleRouter(nn.Module):
    """Sends cluster c to expert c mod E: the ceiling of what any partition by cluster can do."""

    num_experts: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"], *, cluster: Int[Array, " T"], **context) -> Float[Array, "T E"]:
        del x, context
        return CERTAIN * jax.nn.one_hot(cluster % self.num_experts, self.num_experts)


class HashRouter(nn.Module):
    """Sends a token to the expert named by the signs of ceil(log2 E) fixed random projections, mod E.

    Locality-sensitive hashing by hyperplanes through the origin (Charikar 2002): equal inputs share an expert, but no
    weight was ever fitted and every expert is equally sharp.
    """

    num_experts: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"], **context) -> Float[Array, "T E"]:
        del context
        bits = max(1, math.ceil(math.log2(self.num_experts)))
        planes = self.param("planes", nn.initializers.normal(1.0), (x.shape[-1], bits))
        bucket = (x @ planes > 0).astype(jnp.int32) @ 2 ** jnp.arange(bits)
        return CERTAIN * jax.nn.one_hot(bucket % self.num_experts, self.num_experts)
