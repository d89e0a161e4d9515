"""Collages: squares of labelled digits, of which a single digit decides the class (Chowdhury et al. 2023, 5.1).

A sample has one digit of either discriminative class (the first: y = 1), at a random position, among digits of the
irrelevant classes. Training samples consist of training images, test samples of test images, so no digit is in both.
The paper does not say how irrelevant digits and positions are drawn, or how pixels are scaled. Here classes are equally
likely, images of a class too, and settings choose the rest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer, PRNGKeyArray, UInt8
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.settings.setting import FRACTION, Allowed, Setting, one_of, refuse
from routed.tasks import images
from routed.tasks.image_files import Images, load
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of


class Draws(NamedTuple):
    """Numbers of digits (training digits by class first, then test digits by class), and indices of their `classes`."""

    digit: Int[Array, "B n"]
    cluster: Int[Array, "B n"]


def classes(data) -> tuple[int, ...]:
    """Returns the class of each cluster: discriminative classes first, then irrelevant, then misleading classes."""
    misleading = data.misleading if data.spurious_fraction else ()
    return (*data.discriminative, *(digit for digit in data.irrelevant if digit not in misleading), *misleading)


def source(data) -> Images:
    """Returns the images that `data.images` and `data.directory` name.

    Raises:
      UserError: missing or damaged files, images that are not square, unknown classes.
    """
    loaded = load(data.images, data.directory)
    images.check_square(loaded, data)
    count = int(loaded.train_y.max()) + 1
    for key in ("discriminative", "irrelevant", *(("misleading",) if data.spurious_fraction else ())):
        if missing := [label for label in data[key] if label >= count]:
            reason = f"the images have no class {missing[0]}, only 0 to {count - 1}; leave it out"
            refuse(f"data.{key}", data[key], reason)
    return loaded


def by_class(loaded: Images) -> tuple[Integer[np.ndarray, "2 K"], Integer[np.ndarray, "2 K"]]:
    """Returns the first number and the count of the digits of each class, in training digits and in test digits."""
    counts = np.stack([np.bincount(labels) for labels in (loaded.train_y, loaded.test_y)])
    return (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape), counts


def shared_arrays(data) -> UInt8[np.ndarray, "N D"]:
    """Returns all digits as rows: training digits by class first, then test digits by class."""
    loaded = source(data)
    parts = (loaded.train_x, loaded.train_y), (loaded.test_x, loaded.test_y)
    return np.concatenate([x.reshape(len(x), -1)[np.argsort(y, kind="stable")] for x, y in parts])


def draw(fixed: tuple[()], cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Draws samples of both classes in turn, so that any even number is balanced (as in the released data)."""
    starts, counts = by_class(source(data))
    part, every = int(cluster_key is None), np.array(classes(data))
    place_key, class_key, digit_key, other_key, wrong_key = jax.random.split(noise_key, 5)
    inner, misleading = int(data.places == "inner"), 2 if data.spurious_fraction else 0
    allowed = data.positions - 2 * inner
    decisive = jax.random.randint(place_key, (size, 1), 0, allowed)
    at, label = jnp.arange(data.positions)[None] - inner, clusters_of(None, (size,), 2)[:, None]
    cluster = jax.random.randint(class_key, (size, data.positions), 2, len(every) - misleading)
    cluster = jnp.where(at == decisive, label, cluster)
    if misleading:
        misled = (decisive + jax.random.randint(other_key, (size, 1), 1, allowed)) % allowed
        wrong = jax.random.uniform(wrong_key, (size, 1)) < (
            data.spurious_fraction if part else 1 - data.spurious_fraction
        )
        cluster = jnp.where(at == misled, len(every) - 2 + (label + wrong) % 2, cluster)
    first, number = (jnp.asarray(table[part][every])[cluster] for table in (starts, counts))
    return Draws(first + jax.random.randint(digit_key, cluster.shape, 0, number), cluster)


def batch(world: World, draws: Draws, data) -> Batch:
    """Returns x = the pixels in [0, 1], or scaled to length 1; y = 1 for the first discriminative class, else -1."""
    x = jnp.asarray(world.shared)[draws.digit].astype(jnp.float32) / 255
    if data.scaling == "unit":
        x /= jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-9)  # a digit may be black
    return Batch(x=x, y=jnp.where((draws.cluster == 0).any(1), 1.0, -1.0)[:, None], cluster=draws.cluster)


def _check(config: ConfigDict) -> None:
    # Checks settings only: `source` checks classes and shapes when the files are read.
    images.check_directory(config)
    data, side = config.data, math.isqrt(config.data.positions)
    if side**2 != data.positions:
        refuse(
            "data.positions", data.positions, f"a collage is a square of patches; use {side**2} or {(side + 1) ** 2}"
        )
    if data.places == "inner" and data.positions < 3:
        refuse("data.places", data.places, f"no place of data.positions={data.positions} is left; use 'any'")
    if data.spurious_fraction and data.positions < 2:
        refuse(
            "data.spurious_fraction",
            data.spurious_fraction,
            "a digit that misleads needs a place of its own; use data.positions=4 or more",
        )
    for key in (*(("misleading",) if data.spurious_fraction else ()), "irrelevant"):
        if twice := sorted(set(data.discriminative) & set(data[key])):
            refuse(f"data.{key}", data[key], f"class {twice[0]} is in data.discriminative too; leave it out of one")
    if data.spurious_fraction and not set(data.irrelevant) - set(data.misleading):
        refuse("data.irrelevant", data.irrelevant, "all of them are in data.misleading; add one that is not")


_CLASSES = "different classes, from 0 on"

TASK = Task(
    tokens="rows",
    targets={"sign": "sign"},
    draw=draw,
    batch=batch,
    dims=lambda data: math.prod(source(data).train_x.shape[1:]),
    labels=lambda data: len(classes(data)),
    positions=lambda data: data.positions,
    decisive=2,
    shared=shared_arrays,
    digest=lambda data: images.digest_of_files(data.images, data.directory),
    about=lambda data: f"data.images={data.images}, put together by the task's own file",
    reads=("directory", "positions", "data.images"),
    settings={
        "discriminative": Setting(
            (1, 0),
            "classes of the digits that decide: of samples with label 1, and with label -1",
            Allowed(lambda v: len(set(v)) == len(v) == 2 and min(v) >= 0, lambda: f"must be two {_CLASSES}"),
        ),
        "irrelevant": Setting(
            (2, 3, 4, 5, 6, 7, 8, 9),
            "classes of all other digits",
            Allowed(lambda v: len(set(v)) == len(v) > 0 and min(v) >= 0, lambda: f"must be {_CLASSES}, at least one"),
        ),
        "spurious_fraction": Setting(
            0.0,
            "share of training samples with a digit that goes with their label, and of test samples with the other "
            "label's; 0: no such digit",
            FRACTION,
        ),
        "misleading": Setting(
            (2, 3),
            "where spurious > 0, classes of the digit that goes with label 1, and with label -1; no other digit is of "
            "them",
            Allowed(lambda v: len(set(v)) == len(v) == 2 and min(v) >= 0, lambda: f"must be two {_CLASSES}"),
        ),
        "places": Setting(
            "any",
            "where a digit that decides may be; inner: not in the first and last place (released)",
            one_of(("any", "inner")),
        ),
        "scaling": Setting(
            "pixels",
            "pixels: in [0, 1] (released); unit: every patch has length 1 (theory)",
            one_of(("pixels", "unit")),
        ),
    },
    check=_check,
)
