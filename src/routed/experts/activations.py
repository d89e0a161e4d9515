"""Activations by name."""

import flax.linen as nn


def identity(z):
    """Returns z."""
    return z


ACTIVATIONS = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "celu": nn.celu,
    "tanh": nn.tanh,
    "cubic": lambda z: z**3,
    "linear": identity,
}
