"""An expert that is a learned vector."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float


class Constant(nn.Module):
    """A learned vector, whatever the token (Dikkala et al. 2023, 3.1); starts at N(0, 1/O)."""

    outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "#T O"]:
        del x
        # One row stands for all tokens: dispatch broadcasts it, so the mixture is a [T, E] x [E, O] product.
        return self.param("value", nn.initializers.normal(self.outputs**-0.5), (1, self.outputs))
