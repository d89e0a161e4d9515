"""Losses of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from routed.settings.setting import Allowed, Setting, accept


class TaskLoss(NamedTuple):
    """A loss of each sample, `value(prediction [B, O], y [B, O])` -> [B].

    `fits` are the kinds of targets that it fits: vector, input, sign, class, density. A `labelled` loss is in nats, and
    its samples are right or wrong; other losses are reported over the variance of the target. A loss `of_scores` trains
    a router: that function makes predictions [B, 1] of all scores [T, E] and the number of samples. `constant` computes
    the loss of the best predictor that ignores its input, from the number of equally likely classes; None: there is no
    best.
    """

    value: Callable[[Array, Array], Array]
    fits: tuple[str, ...]
    labelled: bool = True
    of_scores: Callable[[Float[Array, "T E"], int], Float[Array, "B 1"]] | None = None
    constant: Callable[[int], float] | None = None
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


def squared(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """Returns |prediction - y|^2."""
    return ((prediction - y) ** 2).sum(-1)


def logistic(prediction: Float[Array, "B 1"], y: Float[Array, "B 1"]) -> Float[Array, " B"]:
    """Returns log(1 + exp(-y f)) of labels -1 and 1, in nats: log 2 for f = 0."""
    return jax.nn.softplus(-y * prediction)[:, 0]


def cross_entropy(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """Returns -log softmax(f)_y in nats; y is one-hot."""
    return -(y * jax.nn.log_softmax(prediction)).sum(-1)


#: The setting that separates the labels of one output.
THRESHOLD = {
    "threshold": Setting(
        0.0,
        "output above which a sample counts as of label 1: 0, or .5 (Keras's accuracy, given logits)",
        Allowed(math.isfinite, lambda: "must be finite"),
    )
}

#: name -> loss.
TASK_LOSSES: dict[str, TaskLoss] = {
    "squared": TaskLoss(squared, fits=("vector", "input"), labelled=False, constant=lambda classes: 1.0),
    "logistic": TaskLoss(logistic, fits=("sign",), constant=math.log, settings=THRESHOLD),
    "cross_entropy": TaskLoss(cross_entropy, fits=("class",), constant=math.log),
}


def correct(prediction: Float[Array, "B O"], y: Float[Array, "B O"], threshold: float = 0.0) -> Bool[Array, " B"]:
    """Returns True for rightly predicted classes: the side of the threshold for one output, else the largest output.

    An output on the threshold is wrong.
    """
    if y.shape[1] == 1:
        return ((prediction - threshold) * y > 0)[:, 0]
    return prediction.argmax(1) == y.argmax(1)
