"""Labelled images with random changes: the tasks `rotated` and `augmented` (Chen et al. 2022, A.3).

rotated: the label says if the image is turned by 30 degrees. Turned and unturned images are cropped to the middle 3/4
of a side, so that no corner tells the label, then enlarged and blurred. augmented: the label is the class of the image;
training images are flipped and moved at random. The changes are part of the draws of a sample: with data.fresh=true
every batch draws new changes, a pure function of seed and step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from routed.contracts import FROM_MINUS_1_TO_1, Batch, Column
from routed.settings.setting import Setting, one_of
from routed.tasks import images
from routed.tasks.images import shrunk
from routed.tasks.task import Task, World

#: Degrees by which an image is turned, counter-clockwise; share of a side that the crop keeps.
ANGLE, CROP = 30.0, 3 / 4
#: Rows and columns of the blur, and the bounds of its standard deviation in pixels (released code).
ROWS, COLUMNS, SIGMA = 7, 3, (1.1, 2.2)
#: Standard deviation of a blur that does not change an image.
SHARP = 1e-3
#: Largest shift of an image, as a share of a side: 4 of 32 pixels.
MOVED = 1 / 8


class Turned(NamedTuple):
    """Numbers of images (training images first, then test images), flags of turned images, and blurs."""

    image: Int[Array, " B"]
    turned: Bool[Array, " B"]
    sigma: Float[Array, " B"]


class Moved(NamedTuple):
    """Numbers of images, flags of flipped images, and shifts down and right in pixels."""

    image: Int[Array, " B"]
    flipped: Bool[Array, " B"]
    shift: Int[Array, "B 2"]


def counts(data) -> tuple[int, int]:
    """Returns the numbers of training images and test images; each class has the same number of test images.

    Raises:
      UserError: images that are not square or too small, or a data.image_side that does not divide their side.
    """
    loaded = images.source(data)
    images.check_square(loaded, data, 8, data.image_side, "squares of a multiple of 8 are turned and cropped")
    return len(loaded.train_y), data.clusters * int(np.bincount(loaded.test_y).min())


def draw_turned(fixed: tuple[()], cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Turned:
    """Draws training images, half of them turned; test images in turn, each unturned and then turned."""
    train, tests = counts(data)
    sigma = jax.random.uniform(jax.random.fold_in(noise_key, 0), (size,), minval=SIGMA[0], maxval=SIGMA[1])
    if cluster_key is None:
        index = jnp.arange(size)
        sharp = jnp.full(size, SHARP)
        return Turned(train + index // 2 % tests, index % 2 == 1, sigma if data.blur == "all" else sharp)
    image = jax.random.randint(cluster_key, (size,), 0, train)
    turned = jax.random.bernoulli(jax.random.fold_in(noise_key, 1), shape=(size,))
    return Turned(image, turned, sigma if data.blur != "none" else jnp.full(size, SHARP))


def draw_moved(fixed: tuple[()], cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Moved:
    """Draws training images, half of them flipped, moved by up to 1/8 of a side; test images in turn, unchanged."""
    train, tests = counts(data)
    if cluster_key is None:
        return Moved(train + jnp.arange(size) % tests, jnp.zeros(size, bool), jnp.zeros((size, 2), int))
    flip_key, shift_key = jax.random.split(noise_key)
    most = round(MOVED * images.source(data).train_x.shape[1])
    return Moved(
        image=jax.random.randint(cluster_key, (size,), 0, train),
        flipped=jax.random.bernoulli(flip_key, shape=(size,)),
        shift=jax.random.randint(shift_key, (size, 2), -most, most + 1),
    )


def batch_of_turned(world: World, draws: Turned, data) -> Batch:
    """Returns x = the image, `standardised`; y = [unturned, turned], one-hot; cluster = 2 class + turned."""
    image, label = _images(world, draws)
    x = blurred(turned_and_cropped(image, draws.turned), draws.sigma)
    y = jax.nn.one_hot(draws.turned.astype(int), 2)
    return Batch(x=standardised(x, world, data), y=y, cluster=2 * label + draws.turned)


def batch_of_moved(world: World, draws: Moved, data) -> Batch:
    """Returns x = the image, `standardised`; y = the class, one-hot; cluster = the class."""
    image, label = _images(world, draws)
    x = moved(jnp.where(draws.flipped[:, None, None, None], image[:, :, ::-1], image), draws.shift)
    return Batch(x=standardised(x, world, data), y=jax.nn.one_hot(label, data.clusters), cluster=label)


def _images(world: World, draws: Any) -> tuple[Float[Array, "B H W C"], Int[Array, " B"]]:
    pixels, label = jnp.asarray(world.shared.pixels), jnp.asarray(world.shared.label)
    return pixels[draws.image].astype(jnp.float32) / 255, label[draws.image]


def standardised(x: Float[Array, "B H W C"], world: World, data) -> Float[Array, "B h w C"]:
    """Standardises each channel over the training images, then reduces images to `data.image_side` pixels."""
    mean, std = (jnp.asarray(a)[None, None, None] for a in (world.shared.mean, world.shared.std))
    return shrunk((x - mean) / std, x.shape[1] // data.image_side)


@functools.lru_cache(maxsize=4)
def crop_pixels(side: int) -> Integer[np.ndarray, "2 P"]:
    """Returns the source pixel of each pixel of the crop, counted by rows: for unturned and for turned images.

    The source is the pixel nearest to the position before the turn around the middle. From 56 pixels a side on, a
    corner's source lies outside of the image and is clipped.
    """
    cropped = round(CROP * side)
    rows, columns = np.mgrid[:cropped, :cropped] + 0.5 - cropped / 2
    pixels = []
    for angle in (0.0, math.radians(ANGLE)):
        x = math.cos(angle) * columns - math.sin(angle) * rows + side / 2
        y = math.sin(angle) * columns + math.cos(angle) * rows + side / 2
        x, y = (np.clip(np.floor(a + 1e-9), 0, side - 1).astype(int) for a in (x, y))
        pixels.append((y * side + x).reshape(-1))
    return np.stack(pixels)


def turned_and_cropped(x: Float[Array, "B H W C"], turned: Bool[Array, " B"]) -> Float[Array, "B H W C"]:
    """Crops the middle of each image, turned or not, and enlarges the crop to the image's size (bilinear)."""
    samples, side, _, channels = x.shape
    cropped = round(CROP * side)
    crop = jnp.asarray(crop_pixels(side))[turned.astype(int)]
    x = jnp.take_along_axis(x.reshape(samples, side**2, channels), crop[:, :, None], 1)
    return enlarged(x.reshape(samples, cropped, cropped, channels), side)


def enlarged(x: Float[Array, "B h h C"], side: int) -> Float[Array, "B H H C"]:
    """Enlarges images to `side` pixels a side by bilinear interpolation.

    Equal to `jax.image.resize`, but without matrix products: XLA 0.10.2 finds no tiles for these products on a GPU.
    """
    source = np.clip((np.arange(side) + 0.5) * x.shape[1] / side - 0.5, 0, x.shape[1] - 1)
    low = np.minimum(source.astype(int), x.shape[1] - 2)
    after = (source - low).astype(np.float32)
    for axis in (1, 2):
        part = np.expand_dims(after, [other_axis for other_axis in range(4) if other_axis != axis])
        x = jnp.take(x, low, axis) * (1 - part) + jnp.take(x, low + 1, axis) * part
    return x


def blurred(x: Float[Array, "B H W C"], sigma: Float[Array, " B"]) -> Float[Array, "B H W C"]:
    """Blurs images by Gaussian means over 7 rows and 3 columns; an image is mirrored beyond its edges."""
    for axis, size in ((1, ROWS), (2, COLUMNS)):
        half, length = size // 2, x.shape[axis]
        distance = jnp.arange(-half, half + 1)
        weight = jnp.exp(-0.5 * (distance[None] / sigma[:, None]) ** 2)
        weight /= weight.sum(1, keepdims=True)
        padded = jnp.pad(x, [(half, half) if i == axis else (0, 0) for i in range(4)], mode="reflect")
        shifted = (jax.lax.slice_in_dim(padded, i, i + length, axis=axis) for i in range(size))
        x = sum((neighbour * weight[:, i, None, None, None] for i, neighbour in enumerate(shifted)), jnp.zeros_like(x))
    return x


def moved(x: Float[Array, "B H W C"], shift: Int[Array, "B 2"]) -> Float[Array, "B H W C"]:
    """Moves each image down and right by its shift in pixels; new pixels are black."""
    most = round(MOVED * x.shape[1])
    padded = jnp.pad(x, [(0, 0), (most, most), (most, most), (0, 0)])
    cut = lambda image, at: jax.lax.dynamic_slice(image, (most - at[0], most - at[1], 0), x.shape[1:])  # noqa: E731
    return jax.vmap(cut)(padded, shift)


def groupings(world: World, data) -> dict[str, Float[Array, "labels groups"]]:
    """Returns the groups of clusters by class, and by turn."""
    label = jnp.arange(2 * data.clusters)
    return {"class": jax.nn.one_hot(label // 2, data.clusters), "turned": jax.nn.one_hot(label % 2, 2)}


def _task(draw: Callable, batch: Callable, settings: Mapping[str, Setting] = {}, **fields: Any) -> Task:
    return Task(
        tokens="images",
        targets={"class": "class"},
        draw=draw,
        batch=batch,
        dims=lambda data: data.image_side**2 * images.source(data).train_x.shape[-1],
        pixels=lambda data: data.image_side,
        shared=images.shared_arrays,
        same_tests=True,
        digest=images.digest_of,
        about=lambda data: f"data.images={data.images}, changed by the task's own file",
        reads=("clusters", "directory", "data.images"),
        settings={"image_side": images.SIDE, **settings},
        check=images.check_directory,  # `counts` checks the images when their files are read
        **fields,
    )


_AMI = "Adjusted mutual information of experts and {}: 0 is chance, 1 each tells the other."

ROTATED = _task(
    draw_turned,
    batch_of_turned,
    outputs=lambda data: 2,
    labels=lambda data: 2 * data.clusters,
    groupings=groupings,
    columns={
        "router/ami_by_class": Column(
            "AMI of experts and classes", _AMI.format("classes of images"), FROM_MINUS_1_TO_1
        ),
        "router/ami_by_turned": Column(
            "AMI of experts and turns", _AMI.format("the turns, which are the label"), FROM_MINUS_1_TO_1
        ),
    },
    settings={
        "blur": Setting(
            "all",
            "images of rotated that are blurred: all (paper), training (released code) or none",
            one_of(("all", "training", "none")),
        )
    },
)

AUGMENTED = _task(draw_moved, batch_of_moved, outputs=lambda data: data.clusters)
