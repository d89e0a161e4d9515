"""An expert of hidden neurons, each with an output weight."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float

from routed.experts.activations import ACTIVATIONS
from routed.routers.matmul import dense_layer

#: The module of the output weights.
READOUT = "readout"


class Neurons(nn.Module):
    """f_o(x) = sum_r a_ro s(<w_r, x>), without biases; w ~ N(0, std^2), a ~ N(0, 1) (Chowdhury et al. 2023, Section 3, s = ReLU)."""

    outputs: int
    width: int
    std: float
    activation: str = "relu"

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        hidden = dense_layer(self.width, use_bias=False, kernel_init=nn.initializers.normal(self.std), name="hidden")
        readout = dense_layer(self.outputs, use_bias=False, kernel_init=nn.initializers.normal(1.0), name=READOUT)
        return readout(ACTIVATIONS[self.activation](hidden(x)))
