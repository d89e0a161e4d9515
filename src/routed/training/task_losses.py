"""What the outputs of a sample cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from routed.settings.setting import Setting, accept


class Value(Protocol):
    """The loss of each sample."""

    def __call__(self, prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]: ...


class TaskLoss(NamedTuple):
    """A loss of samples: `fits` are the kinds of targets (vector, input, sign, class) that it can be computed for.

    A `labelled` one is in nats, and its samples are right or wrong; others are reported over the variance of the target.
    """

    value: Value
    fits: tuple[str, ...]
    labelled: bool = True
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


#: name -> loss.
TASK_LOSSES: dict[str, TaskLoss] = {
    "squared": TaskLoss(squared, fits=("vector", "input"), labelled=False),
    "logistic": TaskLoss(logistic, fits=("sign",)),
    "cross_entropy": TaskLoss(cross_entropy, fits=("class",)),
    "softmax_cross_entropy": TaskLoss(softmax_cross_entropy, fits=("class",)),
}


def correct(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Bool[Array, " B"]:
    """Is the class right? One output: its sign; several: the largest. An output of 0 is never right."""
    if y.shape[1] == 1:
        return (prediction * y > 0)[:, 0]
    return prediction.argmax(1) == y.argmax(1)
