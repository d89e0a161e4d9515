"""Experts: ONE expert each, on tokens; the layer maps them. The dense twins are the same modules, wider or deeper."""

from __future__ import annotations

import itertools

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


class Mlp(nn.Module):
    """`depth` weight layers with biases, ReLU between them; lecun-normal weights, zero biases."""

    outputs: int
    depth: int
    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        for _ in range(self.depth - 1):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.outputs)(x)


class Linear(nn.Module):
    """w^T x + b."""

    outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        return nn.Dense(self.outputs)(x)


EXPERTS = {
    "constant": lambda config, outputs: Constant(outputs),
    "linear": lambda config, outputs: Linear(outputs),
    "mlp": lambda config, outputs: Mlp(outputs, config.depth, config.width),
}


def mlp_parameters(inputs: int, outputs: int, depth: int, width: int) -> int:
    """Weights and biases of an Mlp."""
    sizes = [inputs] + [width] * (depth - 1) + [outputs]
    return sum((a + 1) * b for a, b in itertools.pairwise(sizes))


def width_for(parameters: int, inputs: int, outputs: int, depth: int) -> int:
    """The width whose Mlp of `depth` has the number of parameters closest to `parameters`."""
    low, high = 1, max(2, parameters)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if mlp_parameters(inputs, outputs, depth, middle) <= parameters else (low, middle)
    return min((low, high), key=lambda w: abs(mlp_parameters(inputs, outputs, depth, w) - parameters))
