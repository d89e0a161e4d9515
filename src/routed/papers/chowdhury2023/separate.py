"""The loss of separate training (Chowdhury et al. 2023, Section 4.1): a router is trained alone, before its experts."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.training.task_losses import THRESHOLD, TaskLoss


def apart(scores: Float[Array, "T E"], samples: int) -> Float[Array, "B 1"]:
    """Returns sum_j <w_1 - w_2 + w_3 - ..., x_j> of each sample: summed scores, with alternating signs of experts."""
    signs = 1.0 - 2.0 * (jnp.arange(scores.shape[1]) % 2)
    return (scores @ signs).reshape(samples, -1).sum(1, keepdims=True)


def linear(prediction: Float[Array, "B 1"], y: Float[Array, "B 1"]) -> Float[Array, " B"]:
    """Returns -y f, which has no bound, so that only its direction trains: l_r = -y <w_1 - w_2, sum_j x_j>."""
    return -(y * prediction)[:, 0]


SCORES = TaskLoss(linear, fits=("sign",), of_scores=apart, settings=THRESHOLD)
