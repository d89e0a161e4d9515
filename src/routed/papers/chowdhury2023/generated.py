"""Data of a theory of patches: one of two patterns decides the class (Chowdhury et al. 2023, 4.2).

A sample has one patch o1 (y = 1) or o2 (y = -1), unit vectors with <o1, o2> = delta_d, at a random position among
patches from p sets of irrelevant unit vectors, which have the same law in both classes. All irrelevant patches q have
|<o1, q>| = |<o2, q>| = delta_r, and only the signs differ: a quarter of the sets leans to o1 (+, -), a quarter to o2
(-, +), half of the sets are neutral (+, + and -, -). A leaning patch has |<o1 - o2, q>| = 2 delta_r, above the theory's
bound (1 - delta_d) / 2, and a neutral patch has 0. So `data.confusing_patches`, the number of leaning patches of every
sample, is exactly l* - 1 (Definitions D.2 and D.3).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from ml_collections import ConfigDict

from routed.contracts import FROM_MINUS_1_TO_1, Batch, Column
from routed.settings.setting import Allowed, Setting, at_least, between, refuse
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of

#: Kinds of sets, by the signs of <o1, q> and <o2, q>: (+, -), (-, +), (+, +), (-, -); set j is of kind j % 4.
KINDS = 4


class Axes(NamedTuple):
    """Orthonormal axes. `mean` and `apart` span the plane of o1 and o2.

    Set j lies around the sum of a vector in the plane and of row j of `sets`.
    """

    mean: Float[Array, " D"]
    apart: Float[Array, " D"]
    sets: Float[Array, "p D"]


def fixed(keys: Key[Array, " n"], data) -> Axes:
    """Draws Gaussian vectors and makes the vectors orthonormal."""
    basis, _ = jnp.linalg.qr(jax.random.normal(keys[0], (data.dim, 2 + data.pattern_sets)))
    return Axes(basis[:, 0], basis[:, 1], basis[:, 2:].T)


def discriminative(axes: Axes, data) -> Float[Array, "2 D"]:
    """Returns o1 and o2: sqrt((1 + delta_d) / 2) `mean` + and - sqrt((1 - delta_d) / 2) `apart`."""
    a, b = jnp.sqrt((1 + data.delta_d) / 2), jnp.sqrt((1 - data.delta_d) / 2)
    return jnp.stack([a * axes.mean + b * axes.apart, a * axes.mean - b * axes.apart])


def in_plane(axes: Axes, data) -> Float[Array, "p D"]:
    """Returns each set's part in the plane of o1 and o2: +- delta_r / b `apart`, or +- delta_r / a `mean`."""
    a, b = jnp.sqrt((1 + data.delta_d) / 2), jnp.sqrt((1 - data.delta_d) / 2)
    kinds = data.delta_r * jnp.stack([axes.apart / b, -axes.apart / b, axes.mean / a, -axes.mean / a])
    return jnp.tile(kinds, (data.pattern_sets // KINDS, 1))


def draw(fixed: Axes, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Batch:
    """Draws whole samples.

    Clusters of patches: 0 is o1, 1 is o2, 2 + j is set j; all leaning sets are equally likely, and all neutral sets.

    The axis e_j of a pattern of set j is `turned` by half the diameter spread sqrt((1 - delta_r^2) / (d p^2)) at most.
    So the set lies in a ball of that diameter, and products with o1 and o2 are exact.
    """
    keys, irrelevant_count, axes = jax.random.split(noise_key, 4), data.positions - 1, fixed
    which = clusters_of(cluster_key, (size,), 2)
    pick = jax.random.randint(keys[0], (size, irrelevant_count), 0, data.pattern_sets // 2)
    neutral = jnp.arange(irrelevant_count)[None] >= data.confusing_patches
    set_index = pick // 2 * KINDS + pick % 2 + 2 * neutral

    basis = jnp.concatenate([axes.mean[None], axes.apart[None], axes.sets])
    part = in_plane(axes, data)
    rest = jnp.sqrt(1 - (part**2).sum(-1, keepdims=True))
    towards, length = turned(keys[1:3], axes.sets[set_index], basis, data)
    irrelevant = part[set_index] + rest[set_index] * towards / length
    patches = jnp.concatenate([discriminative(axes, data)[which][:, None], irrelevant], 1)
    label = jnp.concatenate([which[:, None], 2 + set_index], 1)
    return shuffled(keys[3], patches, label, (1.0 - 2.0 * which)[:, None])


def turned(
    keys: Key[Array, " 2"], axis: Float[Array, "B n D"], basis: Float[Array, "A D"], data
) -> tuple[Array, Array]:
    """Turns the axes of sets to random directions outside of all axes, by a tangent of at most half a diameter.

    Returns vectors [B, n, D] and their lengths [B, n, 1].
    """
    around = jax.random.normal(keys[0], axis.shape)
    around -= (around @ basis.T) @ basis
    diameter = data.spread * jnp.sqrt((1 - data.delta_r**2) / (data.dim * data.pattern_sets**2))
    tangent = jax.random.uniform(keys[1], (*axis.shape[:2], 1)) * diameter / 2
    around *= tangent / jnp.maximum(jnp.linalg.norm(around, axis=-1, keepdims=True), 1e-9)
    return axis + around, jnp.sqrt(1 + tangent**2)


def shuffled(key: PRNGKeyArray, patches: Float[Array, "B n D"], label: Int[Array, "B n"], y: Array) -> Batch:
    """Returns samples with their patches in random order."""
    order = jax.random.uniform(key, label.shape).argsort(1)
    return Batch(jnp.take_along_axis(patches, order[:, :, None], 1), y, jnp.take_along_axis(label, order, 1))


def watch(params, world: World, test: Batch, key: PRNGKeyArray) -> dict[str, Array]:
    """Compares the first two router rows with o1 - o2 (Lemmas E.1 and D.4), for routers whose rows are patches.

    direction: the cosine of w_1 - w_2 with o1 - o2. growth: <w_1 - w_2, o1 - o2> / |o1 - o2|^2, which is rate x steps
    in expectation if the router is trained by its own loss. margin: the smaller of (<w_1, o1> - max <w_1, q>) / |w_1|
    and (<w_2, o2> - max <w_2, q>) / |w_2| over the neutral patches q of the test samples; if the margin is above 0,
    experts take the deciding patch before any neutral patch. The key is not used.
    """
    rows, tokens = params["router"].get("kernel", jnp.zeros((1, 1))), test.tokens
    if rows.shape[0] != tokens.shape[1] or rows.shape[1] < 2:
        return {}
    patterns = tokens[jnp.stack([(test.label == which).argmax() for which in (0, 1)])]
    apart, between = patterns[0] - patterns[1], rows[:, 0] - rows[:, 1]
    lengths = jnp.linalg.norm(rows[:, :2], axis=0)
    neutral = (test.label >= 2) & ((test.label - 2) % KINDS >= 2)
    best_neutral = jnp.where(neutral[:, None], tokens @ rows[:, :2], -jnp.inf).max(0)
    product = between @ apart
    return {
        "theory/direction": product / jnp.maximum(jnp.linalg.norm(between) * jnp.linalg.norm(apart), 1e-12),
        "theory/growth": product / (apart @ apart),
        "theory/margin": ((jnp.diag(patterns @ rows[:, :2]) - best_neutral) / jnp.maximum(lengths, 1e-12)).min(),
    }


#: Columns of `watch`.
COLUMNS = {
    "theory/direction": Column(
        "cosine of w1 - w2 and o1 - o2",
        "Cosine of the difference of the router's rows and that of the two patterns that decide (Lemma E.1): 1 "
        "where it points from one to the other.",
        FROM_MINUS_1_TO_1,
        higher_is_better=True,
    ),
    "theory/growth": Column(
        "length of w1 - w2 along o1 - o2,\nin units of |o1 - o2|",
        "Product of w1 - w2 with the unit vector along o1 - o2, over |o1 - o2| (Lemma E.1).",
    ),
    "theory/margin": Column(
        "margin of the pattern over neutral patches,\nover the length of the row",
        "How much higher a row scores the pattern that decides than the best irrelevant patch, over the length of "
        "the row (Lemma D.4); below 0 it is not picked.",
        higher_is_better=True,
    ),
}


def _check(config: ConfigDict) -> None:
    data = config.data
    if data.pattern_sets + 3 > data.dim:
        refuse(
            "data.dim",
            data.dim,
            f"2 + data.pattern_sets={data.pattern_sets} axes, and one direction more, need {data.pattern_sets + 3}",
        )
    if data.delta_r > (most := math.sqrt((1 - abs(data.delta_d)) / 2)):
        refuse("data.delta_r", data.delta_r, f"must be at most sqrt((1 - |data.delta_d|) / 2) = {most:.4g}")
    if not data.confusing_patches:
        return
    if data.confusing_patches >= data.positions:
        refuse("data.confusing_patches", data.confusing_patches, f"must be below data.positions={data.positions}")
    if data.delta_r <= (least := (1 - data.delta_d) / 4):
        refuse("data.delta_r", data.delta_r, f"patches confuse only above (1 - data.delta_d) / 4 = {least:.4g}")


TASK = Task(
    tokens="rows",
    targets={"sign": "sign"},
    fixed=fixed,
    draw=draw,
    labels=lambda data: 2 + data.pattern_sets,
    positions=lambda data: data.positions,
    decisive=2,
    watch=watch,
    columns=COLUMNS,
    reads=("dim", "positions"),
    settings={
        "delta_d": Setting(0.0, "<o1, o2> of the patterns that decide the class", between(-1, 1), traced=True),
        "delta_r": Setting(0.5, "|<o1, q>| and |<o2, q>| of all irrelevant patterns q", at_least(0), traced=True),
        "pattern_sets": Setting(
            8,
            "sets of irrelevant patterns",
            Allowed(lambda v: v >= KINDS and v % KINDS == 0, lambda: "must be a multiple of 4"),
        ),
        "confusing_patches": Setting(
            0,
            "l* - 1: irrelevant patches of a sample that are nearer to one of o1 and o2 than to the other",
            at_least(0),
            traced=True,
        ),
        "spread": Setting(
            1.0, "times the diameter sqrt((1 - delta_r^2) / (dim sets^2)) of a set", at_least(0), traced=True
        ),
    },
    check=_check,
)
