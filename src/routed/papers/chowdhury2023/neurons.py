"""An expert of hidden neurons, each with an output weight."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.experts.activations import ACTIVATIONS
from routed.experts.expert import Expert
from routed.kernels.matmul import dense_layer
from routed.settings.setting import Setting, at_least

#: The module of the output weights.
READOUT = "readout"


class Neurons(nn.Module):
    """f_o(x) = sum_r a_ro s(<w_r, x>), without biases; w ~ N(0, std^2), a ~ N(0, 1) (Chowdhury et al. 2023, Section 3,
    s = ReLU).

    With `largest` = l the tokens of a sample are one input [B, n, D] with one output [B, O]: each neuron gives the mean
    of its l largest responses.
    """

    outputs: int
    width: int
    std: float
    activation: str = "relu"
    largest: int = 0

    @nn.compact
    def __call__(self, x: Float[Array, "T *n D"]) -> Float[Array, "T O"]:
        hidden = dense_layer(self.width, use_bias=False, kernel_init=nn.initializers.normal(self.std), name="hidden")
        readout = dense_layer(self.outputs, use_bias=False, kernel_init=nn.initializers.normal(1.0), name=READOUT)
        responses = ACTIVATIONS[self.activation](hidden(x))
        if self.largest:  # a mask, as choosing by index costs more than the product; equal responses of ReLU are 0
            least = jax.lax.stop_gradient(jnp.sort(responses, axis=1)[:, -self.largest])
            responses = jnp.where(responses >= least[:, None], responses, 0.0).sum(1) / self.largest
        return readout(responses)


NEURONS = Expert(
    lambda node, outputs: Neurons(
        outputs, node.width, node.init_std or 1 / math.sqrt(node.count * node.width), node.activation
    ),
    tokens=("rows",),
    settings={
        "init_std": Setting(0.0, "of the hidden weights; 0: 1 / sqrt(neurons of all experts) (theory)", at_least(0))
    },
    reads=("count", "width", "activation"),
    readout=READOUT,
)
