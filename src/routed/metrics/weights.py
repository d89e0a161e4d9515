"""Norms of a router's weights."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar


def norm_ratio(kernel: Float[Array, "D E"]) -> Scalar:
    """Returns E_e|w_e|^2 / (E_e|w_e|)^2 over the experts' router weights: 1 for equal norms, E for one non-zero norm.

    Dikkala et al. (2023), C.1. A fresh Gaussian router in D dimensions already has 1 + 1/(2 D) or so.
    """
    norms = jnp.linalg.norm(kernel, axis=0)
    return (norms**2).mean() / norms.mean() ** 2


def first_layer(params) -> Float[Array, "D H"] | None:
    """Returns the weights of a router's first layer, hidden or of scores; None: the router has no such weights."""
    hidden = params.get("features", {})
    for weights in (hidden.get("Dense_0", {}), hidden, {} if hidden else params):
        if "kernel" in weights:
            return weights["kernel"]
    return None


def signal_share(kernel: Float[Array, "D E"], signal: int) -> Scalar:
    """Returns the share of the squared norm on the first `signal` input dimensions (Dikkala et al. 2023, 3.1)."""
    return (kernel[:signal] ** 2).sum() / (kernel**2).sum()
