"""Pairs of an image and a random vector, with a linear function per class (Dikkala et al. 2023, 3.4)."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, Integer, Key, PRNGKeyArray, Scalar, UInt8
from ml_collections import ConfigDict

from routed.contracts import Batch, UserError
from routed.settings.setting import Allowed, Setting, at_least, refuse
from routed.tasks import image_files
from routed.tasks.image_files import SETS, Images, digest, load
from routed.tasks.task import Task, World

#: Images of faces, which have attributes and no class: for scenes only.
FACES = "celeba"
#: Training images whose pixels are summed at once.
BLOCK = 1000


class Shared(NamedTuple):
    """All images, shared by all runs: training images, then test images, whose i-th has class i % C."""

    pixels: UInt8[np.ndarray, "N H W C"]
    label: Int32[np.ndarray, " N"]
    mean: Float32[np.ndarray, " C"]
    std: Float32[np.ndarray, " C"]


class Draws(NamedTuple):
    """The number of an image, counted through both parts, and the vector beside the image."""

    image: Int[Array, " T"]
    vector: Float[Array, "T V"]


def source(data) -> Images:
    """Returns the images that `data.images` and `data.directory` name.

    Raises:
      UserError: missing or damaged files, or another number of classes than data.clusters.
    """
    images = load(data.images, data.directory)
    classes = int(images.train_y.max()) + 1
    if classes != data.clusters:
        raise UserError(
            f"config key data.clusters={data.clusters}: the images (data.images={data.images!r}) have {classes}"
            f" classes; set data.clusters={classes}"
        )
    return images


def digest_of(data) -> str:
    """Returns a digest of the images: equal digests mean equal images."""
    source(data)
    return digest_of_files(data.images, data.directory)


def shared_arrays(data) -> Shared:
    """Returns the images with the mean and standard deviation of each channel (in [0, 1]) over the training images."""
    source(data)
    return _shared(data.images, data.directory)


@functools.lru_cache(maxsize=2)
def digest_of_files(name: str, directory: str) -> str:
    """Returns a digest of the images, which are hashed once in a process."""
    return f"images {name} {digest(load(name, directory))}"


@functools.lru_cache(maxsize=2)
def _shared(name: str, directory: str) -> Shared:
    images = load(name, directory)
    tests = in_turn(images.test_y)
    mean, std = moments(images.train_x)
    return Shared(
        pixels=np.concatenate([images.train_x, images.test_x[tests]]),
        label=np.concatenate([images.train_y, images.test_y[tests]]),
        mean=mean,
        std=std,
    )


def in_turn(labels: Int32[np.ndarray, " N"]) -> Integer[np.ndarray, " M"]:
    """Returns indices such that the i-th has class i % C, until a class has no further image."""
    counts = np.bincount(labels)
    order = np.argsort(labels, kind="stable").astype(np.int64)
    starts = np.cumsum(counts) - counts
    return order[starts[None] + np.arange(counts.min())[:, None]].reshape(-1)


def moments(pixels: UInt8[np.ndarray, "N H W C"]) -> tuple[Float32[np.ndarray, " C"], Float32[np.ndarray, " C"]]:
    """Computes mean and standard deviation of each channel, pixels in [0, 1]; a constant channel has deviation 1."""
    channels = pixels.shape[-1]
    sums = np.zeros((2, channels))
    for block in np.array_split(pixels, math.ceil(len(pixels) / BLOCK)):
        values = block.reshape(-1, channels) / 255
        sums += values.sum(0), (values**2).sum(0)
    mean, square = sums / (pixels.size // channels)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return mean.astype(np.float32), np.where(std > 1e-6, std, 1).astype(np.float32)


def fixed(keys: Key[Array, " n"], data) -> Float[Array, "C V"]:
    """Draws N(0, I / V) weights for each class, so that y has variance |w|^2, about 1."""
    return jax.random.normal(keys[1], (data.clusters, data.dim)) / jnp.sqrt(data.dim)


def draw(
    fixed: Float[Array, "C V"], cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data
) -> Draws:
    """Draws images, each with an N(0, I) vector: test images in turn, training images in repeated random order.

    Fresh samples are random training images with new vectors.
    """
    images = source(data)
    train, tests, number = len(images.train_y), data.clusters * np.bincount(images.test_y).min(), jnp.arange(size)
    if cluster_key is None:
        image = train + number % tests
    elif data.fresh:
        image = jax.random.randint(cluster_key, (size,), 0, train)
    else:
        image = jax.random.permutation(cluster_key, train)[number % train]
    return Draws(image, jax.random.normal(noise_key, (size, data.dim)))


def batch(world: World, draws: Draws, data) -> Batch:
    """Computes x, the image with standardised channels over the training images, and y = w_class^T vector."""
    pixels, labels, mean, std = world.shared
    image, label = jnp.asarray(pixels)[draws.image].astype(jnp.float32) / 255, jnp.asarray(labels)[draws.image]
    y = (world.fixed[label] * draws.vector).sum(-1, keepdims=True)
    return Batch(x=(image - mean[None, None, None]) / std[None, None, None], y=y, cluster=label, side=draws.vector)


def bayes(world: World, batch: Batch, data) -> Float[Array, "T O"]:
    """Returns y: the class of an image is not random, however difficult it is to see."""
    return batch.y


def variance(world: World, data) -> Scalar:
    """Computes mean_c |w_c|^2, since y = w_c^T v has mean 0."""
    return (world.fixed**2).sum(-1).mean()


def check_square(images: Images, data, multiple: int = 1, reduced: int = 1, needs: str = "patches are square") -> None:
    """Refuses images that are not square, or whose side is no multiple of two numbers.

    Raises:
      UserError: says what `needs` squares of a `multiple`; `reduced` is data.image_side.
    """
    height, width = images.train_x.shape[1:3]
    if height != width or height % multiple:
        raise UserError(
            f"config key data.images={data.images!r}: its images are {height} x {width} pixels, and {needs}; use others"
        )
    if height % reduced:
        reason = f"must divide the {height} pixels of a side of an image; use {height} or {height // 2}"
        refuse("data.image_side", reduced, reason)


def check_directory(config: ConfigDict, faces: bool = False) -> None:
    """Raises UserError if no folder is named, or if faces are asked for by a task that needs classes.

    Only settings are checked here: classes and shapes are checked when the files are read. `faces`: the task needs no
    class.
    """
    if config.data.images == FACES and not faces:
        refuse("data.images", FACES, "faces have attributes and no class; use data.name=scenes")
    artificial = config.data.images in SETS and not SETS[config.data.images].files
    if not artificial and not config.data.directory:
        raise UserError(
            f"config key data.directory is empty: name the folder with the files of data.images={config.data.images!r}"
        )


#: The setting `data.image_side` of tasks that reduce their images.
SIDE = Setting(32, "pixels of a side to which scenes are reduced", at_least(4))


def shrunk(x: Float[Array, "B H W C"], times: int) -> Float[Array, "B h w C"]:
    """Averages squares of `times` pixels a side."""
    samples, height, width, channels = x.shape
    return x.reshape(samples, height // times, times, width // times, times, channels).mean((2, 4))


TASK = Task(
    tokens="images",
    targets={"linear": "vector"},
    fixed=fixed,
    draw=draw,
    batch=batch,
    bayes=bayes,
    same_tests=True,
    dims=lambda data: math.prod(source(data).train_x.shape[1:]) + data.dim,
    signal=lambda data: data.dim,
    side=lambda data: data.dim,
    variance=variance,
    shared=shared_arrays,
    digest=digest_of,
    about=lambda data: f"data.images={data.images}, with a generated function per class",
    reads=("clusters", "dim", "directory"),
    settings={
        "images": Setting(
            "patterns",
            "image set: idx (MNIST, Fashion-MNIST), cifar10, cifar100, tfds:NAME, celeba (of scenes), or patterns",
            Allowed(
                lambda v: v in (*image_files.SETS, FACES) or (v.startswith("tfds:") and v != "tfds:"),
                lambda: f"must be one of {', '.join(image_files.SETS)}, tfds:NAME",
            ),
        )
    },
    check=check_directory,
)
