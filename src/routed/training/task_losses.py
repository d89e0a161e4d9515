"""What the outputs of a sample cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from routed.settings.setting import Allowed, Setting, accept


class Value(Protocol):
    """The loss of each sample."""

    def __call__(self, prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]: ...


class TaskLoss(NamedTuple):
    """A loss of samples: `fits` are the kinds of targets (vector, input, sign, class, density) that it can be computed for.

    A `labelled` one is in nats, and its samples are right or wrong; others are reported over the variance of the target. One
    `of_scores` is a router's: its prediction is the difference of the summed scores of experts in turn (`apart`).
    """

    value: Value
    fits: tuple[str, ...]
    labelled: bool = True
    of_scores: bool = False
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


def squared(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """|prediction - y|^2."""
    return ((prediction - y) ** 2).sum(-1)


def logistic(prediction: Float[Array, "B 1"], y: Float[Array, "B 1"]) -> Float[Array, " B"]:
    """log(1 + exp(-y f)) of labels -1 and 1, in nats: log 2 for f = 0."""
    return jax.nn.softplus(-y * prediction)[:, 0]


def cross_entropy(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """-log softmax(f)_y in nats; y is one-hot."""
    return -(y * jax.nn.log_softmax(prediction)).sum(-1)


def softmax_cross_entropy(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """The cross entropy of softmax(softmax(f)), at least log(1 + 1/e) = .3133 for two classes (the released code of Chen et al. 2022)."""
    return cross_entropy(jax.nn.softmax(prediction), y)


def linear(prediction: Float[Array, "B 1"], y: Float[Array, "B 1"]) -> Float[Array, " B"]:
    """-y f: without a bound, so it is for directions only. Of scores, the loss of a router that is trained before its experts.

    l_r = -y <w_1 - w_2, sum_j x_j> (Chowdhury et al. 2023, Section 4.1).
    """
    return -(y * prediction)[:, 0]


def apart(scores: Float[Array, "T E"], samples: int) -> Float[Array, "B 1"]:
    """sum_j <w_1 - w_2 + w_3 - ..., x_j> of each sample: what its patches score with the first expert, minus the second, and so on."""
    signs = 1.0 - 2.0 * (jnp.arange(scores.shape[1]) % 2)
    return (scores @ signs).reshape(samples, -1).sum(1, keepdims=True)


def given(prediction: Float[Array, "B S"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """Mean of what a model says is the loss of a sample: of one that predicts -log p(y), a column a start."""
    del y
    return prediction.mean(-1)


#: What says whether a sample of one output is right.
THRESHOLD = {
    "threshold": Setting(
        0.0,
        "output above which a sample counts as of label 1: 0, or .5 (Keras's accuracy, given logits)",
        Allowed(math.isfinite, lambda: "must be finite"),
    )
}

#: name -> loss.
TASK_LOSSES: dict[str, TaskLoss] = {
    "likelihood": TaskLoss(given, fits=("density",), labelled=False),
    "squared": TaskLoss(squared, fits=("vector", "input"), labelled=False),
    "logistic": TaskLoss(logistic, fits=("sign",), settings=THRESHOLD),
    "scores": TaskLoss(linear, fits=("sign",), of_scores=True, settings=THRESHOLD),
    "cross_entropy": TaskLoss(cross_entropy, fits=("class",)),
    "softmax_cross_entropy": TaskLoss(softmax_cross_entropy, fits=("class",)),
}


def correct(prediction: Float[Array, "B O"], y: Float[Array, "B O"], threshold: float = 0.0) -> Bool[Array, " B"]:
    """Is the class right? One output: on which side of the threshold it lies; several: the largest. On it is never right."""
    if y.shape[1] == 1:
        return ((prediction - threshold) * y > 0)[:, 0]
    return prediction.argmax(1) == y.argmax(1)
