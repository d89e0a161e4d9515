"""Pairs of an image and a random vector, with a linear function of the vector for each class (Dikkala et al. 2023, 3.4)."""

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

#: Images that scenes are made of, and nothing else: they have attributes.
FACES = "celeba"
#: Training images whose pixels are summed at once.
BLOCK = 1000


class Shared(NamedTuple):
    """All images, shared by all runs: those for training, then those for tests, with class i % C at place i of these."""

    pixels: UInt8[np.ndarray, "N H W C"]
    label: Int32[np.ndarray, " N"]
    mean: Float32[np.ndarray, " C"]
    std: Float32[np.ndarray, " C"]


class Draws(NamedTuple):
    """Which image, counted through both parts, and the vector beside it."""

    image: Int[Array, " T"]
    vector: Float[Array, "T V"]


def source(data) -> Images:
    """The images that `data.images` and `data.directory` name.

    Raises:
      UserError: missing or damaged files, or another number of classes than data.clusters.
    """
    images = load(data.images, data.directory)
    classes = int(images.train_y.max()) + 1
    if classes != data.clusters:
        raise UserError(
            f"config key data.clusters={data.clusters}: the images (data.images={data.images!r}) have {classes} "
            f"classes; set"
            f" data.clusters={classes}"
        )
    return images


def digest_of(data) -> str:
    """Equal digests, equal images."""
    source(data)
    return digest_of_files(data.images, data.directory)


def shared_arrays(data) -> Shared:
    """The images with the mean and standard deviation of each channel (in [0, 1]) over the training images."""
    source(data)
    return _shared(data.images, data.directory)


@functools.lru_cache(maxsize=2)
def digest_of_files(name: str, directory: str) -> str:
    """Equal digests, equal images, hashed once."""
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
    """Indices with class i % C at place i, until a class has no further image."""
    counts = np.bincount(labels)
    order = np.argsort(labels, kind="stable").astype(np.int64)
    starts = np.cumsum(counts) - counts
    return order[starts[None] + np.arange(counts.min())[:, None]].reshape(-1)


def moments(pixels: UInt8[np.ndarray, "N H W C"]) -> tuple[Float32[np.ndarray, " C"], Float32[np.ndarray, " C"]]:
    """Mean and standard deviation of each channel, pixels in [0, 1]; a channel that is the same everywhere has 1."""
    channels = pixels.shape[-1]
    sums = np.zeros((2, channels))
    for block in np.array_split(pixels, math.ceil(len(pixels) / BLOCK)):
        values = block.reshape(-1, channels) / 255
        sums += values.sum(0), (values**2).sum(0)
    mean, square = sums / (pixels.size // channels)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return mean.astype(np.float32), np.where(std > 1e-6, std, 1).astype(np.float32)


def fixed(keys: Key[Array, " n"], data) -> Float[Array, "C V"]:
    """N(0, I/V) weights for each class, so that y has variance |w|^2 ~ 1."""
    return jax.random.normal(keys[1], (data.clusters, data.dim)) / jnp.sqrt(data.dim)


def draw(
    fixed: Float[Array, "C V"], cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data
) -> Draws:
    """Images, each with an N(0, I) vector: test images in turn; training images in random order, again and again.

    Fresh samples are any training images with vectors that nobody has seen.
    """
    del fixed
    images = source(data)
    train, tests, place = len(images.train_y), data.clusters * np.bincount(images.test_y).min(), jnp.arange(size)
    if cluster_key is None:
        image = train + place % tests
    elif data.fresh:
        image = jax.random.randint(cluster_key, (size,), 0, train)
    else:
        image = jax.random.permutation(cluster_key, train)[place % train]
    return Draws(image, jax.random.normal(noise_key, (size, data.dim)))


def batch(world: World, draws: Draws, data) -> Batch:
    """x = the image, each channel with mean 0 and variance 1 over the training images; y = w_class^T vector."""
    pixels, labels, mean, std = world.shared
    image, label = jnp.asarray(pixels)[draws.image].astype(jnp.float32) / 255, jnp.asarray(labels)[draws.image]
    y = (world.fixed[label] * draws.vector).sum(-1, keepdims=True)
    return Batch(x=(image - mean[None, None, None]) / std[None, None, None], y=y, cluster=label, side=draws.vector)


def bayes(world: World, batch: Batch, data) -> Float[Array, "T O"]:
    """y itself: the class of an image is no chance, however hard to see."""
    return batch.y


def variance(world: World, data) -> Scalar:
    """mean_c |w_c|^2, as y = w_c^T v has mean 0."""
    return (world.fixed**2).sum(-1).mean()


def _dims(data) -> int:
    return math.prod(source(data).train_x.shape[1:]) + data.dim


def check_directory(config: ConfigDict, faces: bool = False) -> None:
    """Settings only: classes and shapes are looked at when the files are read.

    `faces`: a task of attributes, which need no class.
    """
    if config.data.images == FACES and not faces:
        refuse("data.images", FACES, "faces have attributes and no class; use data.name=scenes")
    made = config.data.images in SETS and not SETS[config.data.images].files
    if not made and not config.data.directory:
        raise UserError(
            f"config key data.directory is empty: name the folder with the files of data.images={config.data.images!r}"
        )


#: The setting `data.side` of tasks that reduce their images.
SIDE = Setting(32, "pixels of a side to which scenes are reduced", at_least(4))


def shrunk(x: Float[Array, "B H W C"], times: int) -> Float[Array, "B h w C"]:
    """Means of squares of so many pixels a side."""
    samples, height, width, channels = x.shape
    return x.reshape(samples, height // times, times, width // times, times, channels).mean((2, 4))


TASK = Task(
    tokens="images",
    targets={"linear": "vector"},
    fixed=fixed,
    draw=draw,
    batch=batch,
    bayes=bayes,
    dims=_dims,
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
            "the image set: idx (MNIST, Fashion-MNIST), cifar10, cifar100, tfds:NAME, celeba (of scenes), or "
            "artificial patterns",
            Allowed(
                lambda v: v in (*image_files.SETS, FACES) or (v.startswith("tfds:") and v != "tfds:"),
                lambda: f"must be one of {', '.join(image_files.SETS)}, tfds:NAME",
            ),
        )
    },
    check=check_directory,
)
