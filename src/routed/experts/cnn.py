"""An expert on patches."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.experts.activations import ACTIVATIONS, identity
from routed.kernels.matmul import dense_layer


class Cnn(nn.Module):
    """Two-layer CNN over patches whose second layer is fixed at 1: f_o(x) = sum_j sum_p s(<w_oj, x^(p)> + b_oj).

    A token is [patches, dim]. Chen et al. (2022): one output, `width` filters, no biases, s(z) = z^3 or z; their
    released code has two outputs and biases, and starts both uniformly on +- init_scale / sqrt(dim), as PyTorch does.
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

        filters = dense_layer(self.outputs * self.width, use_bias=self.bias, kernel_init=start, bias_init=start)
        if ACTIVATIONS[self.activation] is identity:  # the same function, for one product a token
            responses = patches * filters(x.mean(1))
        else:
            responses = ACTIVATIONS[self.activation](filters(x)).sum(1)
        # Not reshaped to [T, O, W]: a TPU would lay out the gradient of the sum with O, which is 2, in place of 128
        # lanes.
        return jnp.stack([part.sum(-1) for part in jnp.split(responses, self.outputs, -1)], -1)
