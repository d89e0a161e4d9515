"""Parts of the released code of Chen et al. (2022) which the paper does not state: a gate, and a loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.contracts import Routing
from routed.contracts.ties import highest
from routed.layer.rule import QUEUES, Selection, SelectionRule
from routed.layer.selection import queued
from routed.training.task_losses import TaskLoss, cross_entropy


def raw(rule: SelectionRule, scores, preference, bias, mask) -> Routing:
    """Returns the k most preferred experts, weighted by their scores as they are."""
    expert = highest(preference + bias[None], rule.k)
    weight = jnp.take_along_axis(scores, expert, axis=1)
    return queued(rule, scores, expert, weight, mask, weight)


def softmax_cross_entropy(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """Returns the cross entropy of softmax(softmax(f)), which is at least log(1 + 1/e) = .3133 for two classes."""
    return cross_entropy(jax.nn.softmax(prediction), y)


RAW = Selection(raw, biased=True, reads=("k", *QUEUES))
SOFTMAX_CROSS_ENTROPY = TaskLoss(softmax_cross_entropy, fits=("class",))
