"""The feed-forward layer of a transformer."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float

from routed.experts.activations import ACTIVATIONS
from routed.kernels.matmul import dense_layer


class Ffn(nn.Module):
    """The feed-forward layer of a transformer, without biases: s(x W_in) W_out; gated: (s(x W_gate) x W_in) W_out
    (GLU).
    """

    outputs: int
    width: int
    activation: str = "relu"
    gated: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        hidden = dense_layer(self.width, use_bias=False, name="in")(x)
        if self.gated:
            hidden *= ACTIVATIONS[self.activation](dense_layer(self.width, use_bias=False, name="gate")(x))
        else:
            hidden = ACTIVATIONS[self.activation](hidden)
        return dense_layer(self.outputs, use_bias=False, name="out")(hidden)
