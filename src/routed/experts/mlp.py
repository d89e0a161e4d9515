"""Experts on rows: a linear map, a multi-layer perceptron, and the sizes of its dense twins."""

from __future__ import annotations

import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.experts.activations import ACTIVATIONS
from routed.kernels.matmul import dense_layer


class Linear(nn.Module):
    """w^T x + b."""

    outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        return dense_layer(self.outputs)(x)


class Mlp(nn.Module):
    """`depth` weight layers with biases and the activation between them.

    `initial`: lecun (normal, variance 1 / D, biases 0); uniform (on +- 1 / sqrt(D), biases too: PyTorch's Linear);
    stacked (on +- 1 / sqrt(D O), biases 0: what PyTorch's rule gives a stack of matrices, as in the released code of
    Pham et al. 2024).
    """

    outputs: int
    depth: int
    width: int
    activation: str = "relu"
    initial: str = "lecun"

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        for _ in range(self.depth - 1):
            x = ACTIVATIONS[self.activation](self._layer(x, self.width))
        return self._layer(x, self.outputs)

    def _layer(self, x: Float[Array, "T D"], outputs: int) -> Float[Array, "T O"]:
        if self.initial == "lecun":
            return dense_layer(outputs)(x)
        inputs = x.shape[-1]
        bound = 1 / math.sqrt(inputs * outputs if self.initial == "stacked" else inputs)

        def start(key, shape, dtype=jnp.float32):
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        return dense_layer(
            outputs, kernel_init=start, bias_init=start if self.initial == "uniform" else nn.initializers.zeros
        )(x)


def mlp_parameters(inputs: int, outputs: int, depth: int, width: int) -> int:
    """Returns the number of weights and biases of an Mlp."""
    sizes = [inputs] + [width] * (depth - 1) + [outputs]
    return sum((a + 1) * b for a, b in itertools.pairwise(sizes))


def width_for(parameters: int, inputs: int, outputs: int, depth: int) -> int:
    """Returns the width whose Mlp of `depth` has the number of parameters closest to `parameters`."""
    low, high = 1, max(2, parameters)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if mlp_parameters(inputs, outputs, depth, middle) <= parameters else (low, middle)
    return min((low, high), key=lambda w: abs(mlp_parameters(inputs, outputs, depth, w) - parameters))
