"""Experts: ONE expert each, on tokens; the layer maps them. The dense twins are the same modules, wider or deeper."""

from __future__ import annotations

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

#: Fewer rows than this make a product with transposed weights slow on a CPU.
FEW = 96


@jax.custom_vjp
def matmul(x: Float[Array, "T D"], weights: Float[Array, "D H"]) -> Float[Array, "T H"]:
    """x W, with a derivative for few rows on a CPU: W g^T, turned afterwards, in place of g W^T.

    XLA:CPU reads transposed weights 2 to 3 times slower (512 experts of 128 x 256 with 10 rows each: 21 ms against 9.5). The
    barrier keeps it from joining the two again.
    """
    return x @ weights


def _save(x, weights):
    return x @ weights, (x, weights)


def _backward(saved, cotangent):
    x, weights = saved
    if jax.default_backend() == "cpu" and len(x) < FEW:
        return jax.lax.optimization_barrier(weights @ cotangent.T).T, x.T @ cotangent
    return cotangent @ weights.T, x.T @ cotangent


matmul.defvjp(_save, _backward)


def _dense(outputs: int, **options) -> nn.Dense:
    """nn.Dense through `matmul`; further axes of its input (patches) are rows too."""

    def dot_general(x, weights, dimensions, precision=None):
        del dimensions, precision  # of a Dense: the last axis of x, the first of the weights
        return matmul(x.reshape(-1, x.shape[-1]), weights).reshape(*x.shape[:-1], -1)

    return nn.Dense(outputs, dot_general=dot_general, **options)


class Constant(nn.Module):
    """A learned vector, whatever the token (Dikkala et al. 2023, 3.1); starts at N(0, 1/O)."""

    outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "#T O"]:
        del x
        # One row stands for all tokens: dispatch broadcasts it, so the mixture is a [T, E] x [E, O] product.
        return self.param("value", nn.initializers.normal(self.outputs**-0.5), (1, self.outputs))


class Linear(nn.Module):
    """w^T x + b."""

    outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        return _dense(self.outputs)(x)


class Mlp(nn.Module):
    """`depth` weight layers with biases and the activation between them; lecun-normal weights, zero biases."""

    outputs: int
    depth: int
    width: int
    activation: str = "relu"

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        for _ in range(self.depth - 1):
            x = ACTIVATIONS[self.activation](_dense(self.width)(x))
        return _dense(self.outputs)(x)


class Cnn(nn.Module):
    """Two-layer CNN over patches whose second layer is fixed at 1: f_o(x) = sum_j sum_p s(<w_oj, x^(p)> + b_oj).

    A token is [patches, dim]. Chen et al. (2022): one output, `width` filters, no biases, s(z) = z^3 or z; their released code
    has two outputs and biases, and starts both uniformly on +- init_scale / sqrt(dim), as PyTorch does.
    """

    outputs: int
    width: int
    activation: str = "cubic"
    bias: bool = False
    initial: str = "lecun"
    init_scale: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "T P D"]) -> Float[Array, "T O"]:
        patches, dim = x.shape[1:]

        def start(key, shape, dtype=jnp.float32):
            if self.initial == "uniform":
                return self.init_scale * jax.random.uniform(key, shape, dtype, -1, 1) / jnp.sqrt(dim)
            normal = self.init_scale * jax.random.normal(key, shape, dtype) / jnp.sqrt(dim)
            return normal if len(shape) > 1 else jnp.zeros(shape)  # biases are 0

        filters = _dense(self.outputs * self.width, use_bias=self.bias, kernel_init=start, bias_init=start)
        if self.activation == "linear":  # the same function, for one product a token
            responses = patches * filters(x.mean(1))
        else:
            responses = ACTIVATIONS[self.activation](filters(x)).sum(1)
        return responses.reshape(len(x), self.outputs, self.width).sum(-1)


class Ffn(nn.Module):
    """The feed-forward layer of a transformer, without biases: s(x W_in) W_out; gated: (s(x W_gate) x W_in) W_out (GLU)."""

    outputs: int
    width: int
    activation: str = "relu"
    gated: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        hidden = _dense(self.width, use_bias=False, name="in")(x)
        if self.gated:
            hidden *= ACTIVATIONS[self.activation](_dense(self.width, use_bias=False, name="gate")(x))
        else:
            hidden = ACTIVATIONS[self.activation](hidden)
        return _dense(self.outputs, use_bias=False, name="out")(hidden)


ACTIVATIONS = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "celu": nn.celu,
    "tanh": nn.tanh,
    "cubic": lambda z: z**3,
    "linear": lambda z: z,
}

#: name -> ONE expert for a config node `experts` and a number of outputs.
EXPERTS = {
    "constant": lambda experts, outputs: Constant(outputs),
    "linear": lambda experts, outputs: Linear(outputs),
    "mlp": lambda experts, outputs: Mlp(outputs, experts.depth, experts.width, experts.activation),
    "cnn": lambda experts, outputs: Cnn(
        outputs, experts.width, experts.activation, experts.bias, experts.init, experts.init_scale
    ),
    "ffn": lambda experts, outputs: Ffn(outputs, experts.width, experts.activation),
    "gated_ffn": lambda experts, outputs: Ffn(outputs, experts.width, experts.activation, gated=True),
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
