"""Data of several classes (Chowdhury et al. 2023, Appendix M), and the loss of pairwise router training.

A sample has one of c patterns o_1 ... o_c, unit vectors with <o_i, o_j> = delta_d, at a random position among patches
from p sets of irrelevant unit vectors. All irrelevant patches q have |<o_i, q>| = delta_r, of one sign for all i, so
<o_i - o_j, q> = 0: no patch confuses two classes (l* = 1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PRNGKeyArray
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.papers.chowdhury2023.generated import TASK as TWO_CLASSES
from routed.papers.chowdhury2023.generated import shuffled, turned
from routed.settings.setting import refuse
from routed.tasks.task import Task
from routed.tasks.worlds import clusters_of
from routed.training.task_losses import TaskLoss

#: c, the classes: as many as in the paper's Figure 19.
CLASSES = 4


class Axes(NamedTuple):
    """Orthonormal axes: `classes` span the patterns, set j lies around row j of `sets` and a part along their mean."""

    classes: Float[Array, "c D"]
    sets: Float[Array, "p D"]


def fixed(keys: Key[Array, " n"], data) -> Axes:
    """Draws Gaussian vectors and makes them orthonormal."""
    basis, _ = jnp.linalg.qr(jax.random.normal(keys[0], (data.dim, CLASSES + data.pattern_sets)))
    return Axes(basis[:, :CLASSES].T, basis[:, CLASSES:].T)


def patterns(axes: Axes, data) -> Float[Array, "c D"]:
    """Returns o_i = a e_i + b sum_j e_j, a = sqrt(1 - delta_d), b = (sqrt(1 + (c - 1) delta_d) - a) / c."""
    a = jnp.sqrt(1 - data.delta_d)
    b = (jnp.sqrt(1 + (CLASSES - 1) * data.delta_d) - a) / CLASSES
    return a * axes.classes + b * axes.classes.sum(0, keepdims=True)


def along_mean(data) -> Float[Array, ""]:
    """Returns the length of q along sum_i e_i / sqrt(c): delta_r sqrt(c / (1 + (c - 1) delta_d))."""
    return data.delta_r * jnp.sqrt(CLASSES / (1 + (CLASSES - 1) * data.delta_d))


def draw(fixed: Axes, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Batch:
    """Draws whole samples.

    Clusters of patches: i < c is o_i, c + j is set j, whose part along the mean of the patterns has the sign (-1)^j.
    A set has the diameter spread sqrt((1 - delta_r^2) / (d p^2)), as in data of two classes.
    """
    keys, axes = jax.random.split(noise_key, 4), fixed
    which = clusters_of(cluster_key, (size,), CLASSES)
    index = jax.random.randint(keys[0], (size, data.positions - 1), 0, data.pattern_sets)
    basis = jnp.concatenate([axes.classes, axes.sets])
    mean, length = axes.classes.sum(0)[None, None] / math.sqrt(CLASSES), along_mean(data)
    towards, norm = turned(keys[1:3], axes.sets[index], basis, data)
    drawn = (1 - 2 * (index[:, :, None] % 2)) * length * mean + jnp.sqrt(1 - length**2) * (towards / norm)
    patches = jnp.concatenate([patterns(axes, data)[which][:, None], drawn], 1)
    label = jnp.concatenate([which[:, None], CLASSES + index], 1)
    return shuffled(keys[3], patches, label, jax.nn.one_hot(which, CLASSES))


def _check(config: ConfigDict) -> None:
    data = config.data
    if data.pattern_sets + CLASSES + 1 > data.dim:
        axes = f"{CLASSES} + data.pattern_sets={data.pattern_sets} axes, and one direction more"
        refuse("data.dim", data.dim, f"{axes}, need {data.pattern_sets + CLASSES + 1}")
    if data.delta_d <= (least := -1 / (CLASSES - 1)):
        refuse("data.delta_d", data.delta_d, f"of {CLASSES} unit vectors must be above {least:.4g}")
    if data.delta_r > (most := math.sqrt((1 + (CLASSES - 1) * data.delta_d) / CLASSES)):
        refuse("data.delta_r", data.delta_r, f"must be at most sqrt((1 + (c - 1) data.delta_d) / c) = {most:.4g}")


def summed(scores: Float[Array, "T E"], samples: int) -> Float[Array, "B E"]:
    """Returns sum_j <w_e, x_j> of each sample and expert."""
    return scores.reshape(samples, -1, scores.shape[1]).sum(1)


def pairwise(prediction: Float[Array, "B E"], y: Float[Array, "B c"]) -> Float[Array, " B"]:
    """Returns <w_b - w_a, sum_j x_j> of a sample of class a, where b is the other class of its pair (1, 2), (3, 4), ...

    The appendix trains one pair after the other, on the samples of its two classes, with y = 1 and -1 in l_r of
    separate training. That loss is linear and pairs share no row. So one training on all classes ends at the same rows,
    if each sample comes as often and counts as much (rate over batch size).
    """
    label = y.argmax(1)
    partner = label + 1 - 2 * (label % 2)
    rows = jnp.arange(len(label))
    return prediction[rows, partner] - prediction[rows, label]


def _check_pairs(config: ConfigDict) -> None:
    """Refuses other numbers of experts than one for each class, and an odd number of classes."""
    classes = config.data.target_dim
    if classes % 2 or config.experts.count != classes:
        reason = f"loss='pairs' has a row for each of an even number of classes; use {classes + classes % 2}"
        refuse("experts.count", config.experts.count, reason)


PAIRS = TaskLoss(pairwise, fits=("class",), of_scores=summed, check=_check_pairs)
TASK = Task(
    tokens="rows",
    targets={"class": "class"},
    fixed=fixed,
    draw=draw,
    outputs=lambda data: CLASSES,
    labels=lambda data: CLASSES + data.pattern_sets,
    positions=lambda data: data.positions,
    decisive=CLASSES,
    reads=("dim", "positions"),
    settings={name: TWO_CLASSES.settings[name] for name in ("delta_d", "delta_r", "pattern_sets", "spread")},
    check=_check,
)
