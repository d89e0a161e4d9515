"""Scenes with an object whose class is the label, after the wide ResNets' data of Chowdhury et al. (2023, 5.2 and A).

plain: the image is the scene. backgrounds: the image at half its size, at a random position of a background (paper:
plants of ImageNet; here: another image of the set with tiles in random order, so that the background has colours and
edges of images but no object). vehicles: the image at half its size in a random quadrant, and images of other classes
in the remaining quadrants. `data.spurious_fraction`: every class has a colour, which the background takes in this share
of the training samples; in an equal share of the test samples the background has another class's colour (paper: hair
colour and smiling). `data.images=celeba`: see `celeba.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, PRNGKeyArray, UInt8, UInt32
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.papers.chowdhury2023 import celeba
from routed.settings.setting import FRACTION, Allowed, Setting, one_of, refuse
from routed.tasks import images
from routed.tasks.image_files import Images, load
from routed.tasks.images import shrunk
from routed.tasks.task import Task, World

#: Side of a tile of a background in pixels; largest change of a channel by a colour, as a share of the range.
TILE, TINT = 4, 0.25


class Shared(NamedTuple):
    """All images, training images first; numbers of objects and of filling images, in the same order."""

    pixels: UInt8[np.ndarray, "N H W C"]
    label: Int32[np.ndarray, " N"]
    objects: Int32[np.ndarray, " O"]
    fills: Int32[np.ndarray, " F"]
    mean: Float32[np.ndarray, " C"]
    std: Float32[np.ndarray, " C"]


class Draws(NamedTuple):
    """Random parts of scenes.

    object, fill: numbers of the object and of the images that fill the scene. position: of the object, in half sizes.
    colour: steps from the class's colour to the scene's colour. order: seed of the order of tiles.
    """

    object: Int[Array, " B"]
    fill: Int[Array, "B 4"]
    position: Float[Array, "B 2"]
    colour: Int[Array, " B"]
    order: UInt32[Array, " B"]


class Part(NamedTuple):
    """Numbers of objects, classes of objects, and numbers of filling images; the i-th test object has class i % K."""

    objects: Int32[np.ndarray, " O"]
    label: Int32[np.ndarray, " O"]
    fills: Int32[np.ndarray, " F"]


def source(data) -> Images:
    """Returns the images that `data` names.

    Raises:
      UserError: missing or damaged files, images that cannot be halved or reduced, or a number of classes that differs
        from data.clusters.
    """
    if data.images == celeba.NAME:
        loaded = celeba.load(data.directory, tuple(data.attributes), data.spurious_fraction)
    else:
        loaded = load(data.images, data.directory)
    needs = f"scenes are made of squares of a multiple of {TILE}"
    images.check_square(loaded, data, TILE, data.image_side, needs)
    available = int(loaded.train_y.max()) + 1
    count = len(data.objects) if data.scene == "vehicles" else available
    if count != data.clusters:
        refuse("data.clusters", data.clusters, f"there are {count} classes to tell; set data.clusters={count}")
    if data.scene == "vehicles":
        if wrong := [label for label in data.objects if label >= available]:
            reason = f"the images have no class {wrong[0]}, only 0 to {available - 1}; leave it out"
            refuse("data.objects", data.objects, reason)
        if count == available:
            refuse("data.objects", data.objects, "no class is left to fill the other quadrants; leave one out")
    return loaded


def parts(loaded: Images, data) -> tuple[Part, Part]:
    """Returns the training part and the test part of the images."""
    classes = np.array(data.objects if data.scene == "vehicles" else range(data.clusters))
    number = np.full(int(loaded.train_y.max()) + 1, -1, np.int32)
    number[classes] = np.arange(len(classes))
    split, first = [], 0
    for y, tests in ((loaded.train_y, False), (loaded.test_y, True)):
        label = number[y]
        objects = np.flatnonzero(label >= 0)
        objects = objects[images.in_turn(label[objects])] if tests else objects
        fills = np.flatnonzero(label < 0) if data.scene == "vehicles" else np.arange(len(y))
        split.append(Part((objects + first).astype(np.int32), label[objects], (fills + first).astype(np.int32)))
        first += len(y)
    return split[0], split[1]


def shared_arrays(data) -> Shared:
    """Returns all images, with mean and standard deviation of each channel (in [0, 1]) over the training images."""
    loaded = source(data)
    train, test = parts(loaded, data)
    label = np.full(len(loaded.train_y) + len(loaded.test_y), -1, np.int32)
    for part in (train, test):
        label[part.objects] = part.label
    mean, std = _moments(data.images, data.directory) if data.images != celeba.NAME else images.moments(loaded.train_x)
    return Shared(
        pixels=np.concatenate([loaded.train_x, loaded.test_x]),
        label=label,
        objects=np.concatenate([train.objects, test.objects]),
        fills=np.concatenate([train.fills, test.fills]),
        mean=mean,
        std=std,
    )


@functools.lru_cache(maxsize=2)
def _moments(name: str, directory: str):
    return images.moments(load(name, directory).train_x)


def draw(fixed: tuple[()], cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Draws scenes: training objects in repeated random order, test objects in turn with test images as fills."""
    train, test = parts(source(data), data)
    tests, index = cluster_key is None, jnp.arange(size)
    fill_key, place_key, odd_key, other_key, order_key = jax.random.split(noise_key, 5)
    if cluster_key is None:
        number = len(train.objects) + index % len(test.objects)
    else:
        number = jax.random.permutation(cluster_key, len(train.objects))[index % len(train.objects)]
    part = test if tests else train
    first = len(train.fills) if tests else 0
    # The share of samples whose background has another class's colour.
    odd = jax.random.uniform(odd_key, (size,)) < (data.spurious_fraction if tests else 1 - data.spurious_fraction)
    return Draws(
        object=number,
        fill=first + jax.random.randint(fill_key, (size, 4), 0, len(part.fills)),
        position=jax.random.uniform(place_key, (size, 2)),
        colour=jnp.where(odd, jax.random.randint(other_key, (size,), 1, max(data.clusters, 2)), 0),
        order=jax.random.bits(order_key, (size,)),
    )


def batch(world: World, draws: Draws, data) -> Batch:
    """Returns x = the scene, standardised and reduced to `data.image_side` pixels; y = the class, one-hot."""
    shared = jax.tree.map(jnp.asarray, world.shared)
    chosen = shared.objects[draws.object]
    label, object = shared.label[chosen], shared.pixels[chosen].astype(jnp.float32) / 255
    fills = shared.fills[draws.fill] if data.scene != "plain" else None
    tint = jnp.zeros((len(label), 3))
    if data.spurious_fraction > 0 and data.images != celeba.NAME:
        tint = _tints(data.clusters)[(label + draws.colour) % data.clusters]
    x = SCENES[data.scene](object, shared.pixels, fills, draws, tint[:, None, None])
    x = (jnp.clip(x, 0, 1) - shared.mean[None, None, None]) / shared.std[None, None, None]
    return Batch(x=shrunk(x, x.shape[1] // data.image_side), y=jax.nn.one_hot(label, data.clusters), cluster=label)


def _tints(classes: int) -> Float[Array, "K 3"]:
    """Returns colours, equally spaced on the circle of hues."""
    angle = 2 * jnp.pi * (jnp.arange(classes)[:, None] / classes + jnp.arange(3)[None] / 3)
    return TINT * jnp.cos(angle)


def plain(object, pixels, fills, draws: Draws, tint):
    """Returns the whole image, coloured."""
    return object + tint


def backgrounds(object, pixels, fills, draws: Draws, tint):
    """Puts the image at half size on the coloured, shuffled tiles of another image."""
    filler = pixels[fills[:, 0]].astype(jnp.float32) / 255
    samples, side, _, channels = filler.shape
    each = side // TILE
    tiles = filler.reshape(samples, each, TILE, each, TILE, channels).swapaxes(2, 3).reshape(samples, each**2, -1)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), draws.order)
    order = jax.vmap(lambda key: jax.random.permutation(key, each**2))(keys)
    tiles = jnp.take_along_axis(tiles, order[:, :, None], 1).reshape(samples, each, each, TILE, TILE, channels)
    scene = tiles.swapaxes(2, 3).reshape(filler.shape)
    return _put(scene + tint, object, jnp.floor(draws.position * (side // 2 + 1)).astype(int))


def vehicles(object, pixels, fills, draws: Draws, tint):
    """Puts the image at half size in a quadrant; coloured images of other classes fill the remaining quadrants."""
    four = shrunk(pixels[fills].astype(jnp.float32).reshape(-1, *object.shape[1:]) / 255, 2)
    four = four.reshape(len(object), 2, 2, *four.shape[1:])
    scene = four.swapaxes(2, 3).reshape(object.shape)
    return _put(scene + tint, object, jnp.floor(2 * draws.position).astype(int) * (object.shape[1] // 2))


def _put(scene, object, corner):
    """Puts each object at half size into its scene, with the object's corner at `corner`."""
    put = lambda scene, object, at: jax.lax.dynamic_update_slice(scene, object, (at[0], at[1], 0))  # noqa: E731
    return jax.vmap(put)(scene, shrunk(object, 2), corner)


#: name -> scene.
SCENES = {"plain": plain, "backgrounds": backgrounds, "vehicles": vehicles}


def _digest(data) -> str:
    if data.images == celeba.NAME:
        return f"celeba {images.digest(source(data))}"
    return images.digest_of_files(data.images, data.directory)


def _check(config: ConfigDict) -> None:
    images.check_directory(config, faces=True)
    data = config.data
    if data.images == celeba.NAME and data.scene != "plain":
        refuse("data.scene", data.scene, "faces are scenes already; use 'plain'")


TASK = Task(
    tokens="images",
    targets={"class": "class"},
    draw=draw,
    batch=batch,
    dims=lambda data: data.image_side**2 * source(data).train_x.shape[-1],
    outputs=lambda data: data.clusters,
    pixels=lambda data: data.image_side,
    shared=shared_arrays,
    same_tests=True,
    digest=_digest,
    about=lambda data: f"data.images={data.images}, scenes ({data.scene}) put together by the task's own file",
    reads=("clusters", "directory", "data.images"),
    settings={
        "scene": Setting("plain", "what an image is part of", one_of(SCENES)),
        "image_side": images.SIDE,
        "objects": Setting(
            (0, 1, 8, 9),
            "of scene vehicles: classes that are told apart (CIFAR-10: airplane, automobile, ship, truck); others fill "
            "the scene",
            Allowed(
                lambda v: len(set(v)) == len(v) > 1 and min(v) >= 0, lambda: "must be different classes, at least two"
            ),
        ),
        "spurious_fraction": Setting(
            0.0,
            "share of training samples with their class's colour, and of test samples with another's; 0: no colours "
            "(celeba: of hair)",
            FRACTION,
        ),
        "attributes": Setting(
            ("Smiling",),
            "of celeba: what is told, each yes or no, so 2^n classes",
            Allowed(lambda v: 0 < len(set(v)) == len(v) <= 3, lambda: "must be one to three different attributes"),
        ),
    },
    check=_check,
)
