"""Labelled images from well-known file formats, decoded and checked: MNIST's IDX, CIFAR's binary version, TFDS."""

from __future__ import annotations

import functools
import gzip
import hashlib
import math
import pathlib
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

from routed.contracts import UserError
from routed.system import files
from routed.tasks.prepared import newest

#: Artificial images: classes, training and test images of each class, and the shape of an image.
CLASSES, TRAIN, TEST, SHAPE = 10, 200, 50, (16, 16, 3)


class Images(NamedTuple):
    """Training and test images with classes 0 to K - 1, each of which has an image."""

    train_x: UInt8[np.ndarray, "N H W C"]
    train_y: Int32[np.ndarray, " N"]
    test_x: UInt8[np.ndarray, "M H W C"]
    test_y: Int32[np.ndarray, " M"]


class Split(NamedTuple):
    """One split of the files."""

    x: np.ndarray
    y: np.ndarray
    labels: str  # their source, for error messages


class ImageSet(NamedTuple):
    """Images in files of their own format."""

    read: Callable[[pathlib.Path], tuple[Split, Split, int]]  # of a folder -> training part, test part, classes
    files: str = ""  # for a user who has to fetch them; empty if the set reads no file


@functools.lru_cache(maxsize=2)
def load(name: str, directory: str) -> Images:
    """Reads the images of `name` (idx, cifar10, cifar100, tfds:NAME, patterns) in `directory`, once in a process.

    Raises:
      UserError: a file is missing or damaged, labels are out of range, a class has no image.
    """
    folder = files.home(directory)
    if name.startswith("tfds:"):
        train, test, classes = _tfds(name.removeprefix("tfds:"), directory)
    else:
        train, test, classes = SETS[name].read(folder)
    for part in (train, test):
        _refuse_labels(part, classes, _again(name))
        if part.x.dtype != np.uint8:
            raise UserError(f"{part.labels}: pixels of type {part.x.dtype}, expected uint8, from 0 to 255")
    if train.x.shape[1:] != test.x.shape[1:]:
        raise UserError(
            f"{test.labels}: the images beside it are {test.x.shape[1:]}, those of {train.labels} are"
            f" {train.x.shape[1:]}; {_again(name)}"
        )
    return Images(train.x, train.y.astype(np.int32), test.x, test.y.astype(np.int32))


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Hashes decoded arrays: equal digests mean equal data in equal order, whatever the file format."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(f"{array.dtype} {array.shape} ".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()[:24]


def _again(name: str) -> str:
    return f"fetch again {SETS[name].files}" if name in SETS else "prepare the data set again"


def _refuse_labels(part: Split, classes: int, mend: str) -> None:
    """Raises UserError unless the classes are 0 to `classes` - 1 and each has an image."""
    present = set(np.unique(part.y).tolist())
    if wrong := present - set(range(classes)):
        raise UserError(f"{part.labels}: label {max(wrong)}, expected 0 to {classes - 1}; {mend}")
    if missing := sorted(set(range(classes)) - present):
        raise UserError(
            f"{part.labels}: no image of class {missing[0]}, expected images of all {classes} classes"
            f" ({len(missing)} have none); {mend}"
        )


def _find(folder: pathlib.Path, names: list[str], image_set: str) -> pathlib.Path:
    """Returns the first of `names` that is a file in the folder."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"data.directory={folder}: no file {names[0]} in it; put {SETS[image_set].files} there, or name their folder"
    )


def _content(path: pathlib.Path, name: str) -> bytes:
    """Returns the bytes of a file; gzip is decompressed, whatever the file's name."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged gzip, expected a whole one ({error}); {_again(name)}") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}), expected a readable file; {_again(name)}"
        ) from error


def _idx(folder: pathlib.Path) -> tuple[Split, Split, int]:
    train, test = _idx_part(folder, "train"), _idx_part(folder, "t10k")
    return train, test, int(train.y.max(initial=0)) + 1


def _idx_part(folder: pathlib.Path, split: str) -> Split:
    (x, images), (y, labels) = (_idx_array(folder, split, *what) for what in (("images", 3), ("labels", 1)))
    if len(x) != len(y):
        raise UserError(f"{labels}: {len(y)} labels, expected {len(x)} as {images} has images; {_again('idx')}")
    return Split(x[..., None], y, str(labels))


def _idx_array(folder: pathlib.Path, split: str, what: str, axes: int) -> tuple[np.ndarray, pathlib.Path]:
    """Decodes an IDX file: magic number (0, 0, type 8 for bytes, number of axes), a uint32 for each axis, the bytes."""
    names = [f"{split}-{what}{dot}idx{axes}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    path = _find(folder, names, "idx")
    data, header, magic = _content(path, "idx"), 4 + 4 * axes, bytes((0, 0, 8, axes))
    if data[:4] != magic or len(data) < header:
        raise UserError(
            f"{path}: starts with {data[:4].hex() or 'nothing'}, expected {magic.hex()} (IDX, bytes, {axes} axes);"
            f" {_again('idx')}"
        )
    shape = tuple(np.frombuffer(data, ">u4", axes, offset=4).tolist())
    if len(data) != header + math.prod(shape):
        raise UserError(
            f"{path}: {len(data)} bytes, expected {header + math.prod(shape)} as its header says {shape}; "
            f"{_again('idx')}"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape), path


def _cifar(folder: pathlib.Path, image_set: str) -> tuple[Split, Split, int]:
    if image_set == "cifar100":
        return _records(folder, ["train.bin"], image_set, 2), _records(folder, ["test.bin"], image_set, 2), 100
    train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    return _records(folder, train, image_set, 1), _records(folder, ["test_batch.bin"], image_set, 1), 10


def _records(folder: pathlib.Path, names: list[str], image_set: str, labels: int) -> Split:
    """Decodes records of `labels` bytes, whose last byte is the class, and an image: red, green, then blue rows."""
    nested = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}[image_set]
    size, pieces = labels + 3072, []
    for name in names:
        path = _find(folder, [name, f"{nested}/{name}"], image_set)
        data = _content(path, image_set)
        if not data or len(data) % size:
            raise UserError(
                f"{path}: {len(data)} bytes, expected a multiple of {size}, an image each; {_again(image_set)}"
            )
        pieces.append(np.frombuffer(data, np.uint8).reshape(-1, size))
    rows = np.concatenate(pieces)
    x = np.ascontiguousarray(rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Split(x, rows[:, labels - 1], str(path) if len(names) == 1 else f"{path.parent}/{names[0]} to {names[-1]}")


def _tfds(name: str, directory: str) -> tuple[Split, Split, int]:
    """Reads the newest version that TFDS prepared below its data_dir, without TensorFlow."""
    import tensorflow_datasets as tfds  # imported here, since the import takes half a second

    builder, path = newest(directory, name)
    features = builder.info.features
    if not {"image", "label"} <= set(features) or not isinstance(features["label"], tfds.features.ClassLabel):
        raise UserError(
            f"{path}: has {', '.join(features)}, expected image and label; name another data set in data.images"
        )
    classes = features["label"].num_classes
    return _tfds_part(builder, path, "train"), _tfds_part(builder, path, "test"), classes


def _tfds_part(builder: Any, path: pathlib.Path, split: str) -> Split:
    splits = builder.info.splits
    if split not in splits:
        raise UserError(
            f"{path}: has the splits {', '.join(splits)}, expected train and test; name another data set in data.images"
        )
    missing = [file for file in map(pathlib.Path, splits[split].filepaths) if not file.exists()]
    if missing:
        raise UserError(
            f"{path}: {len(missing)} shards of {split} missing, expected all, first {missing[0]}; {_again('tfds')}"
        )
    try:
        records = list(builder.as_data_source(split=split))
        x, y = (np.stack([record[field] for record in records]) for field in ("image", "label"))
    except (RuntimeError, ValueError, OSError) as error:  # a wrong checksum, sizes that differ, a damaged image
        raise UserError(f"{path}: split {split} cannot be read ({error}); {_again('tfds')}") from error
    return Split(x, y, f"{path}, split {split}")


def _patterns(folder: pathlib.Path) -> tuple[Split, Split, int]:
    """Makes a smooth random pattern for each class; an image is a pattern with noise, shifted by up to 2 pixels."""
    rng = np.random.default_rng(0)
    spectrum = np.fft.fft2(rng.normal(size=(CLASSES, *SHAPE)), axes=(1, 2))
    low = abs(np.fft.fftfreq(SHAPE[0], 1 / SHAPE[0])) <= 2
    patterns = np.fft.ifft2(spectrum * (low[:, None] & low)[None, :, :, None], axes=(1, 2)).real
    patterns /= patterns.std((1, 2, 3), keepdims=True)

    def part(each: int, name: str) -> Split:
        y = np.arange(each * CLASSES) % CLASSES
        x = np.stack([np.roll(patterns[c], rng.integers(-2, 3, 2), (0, 1)) for c in y])
        x = 128 + 40 * x + 20 * rng.normal(size=x.shape)
        return Split(np.clip(x, 0, 255).astype(np.uint8), y, name)

    return part(TRAIN, "artificial training images"), part(TEST, "artificial test images"), CLASSES


#: name -> image set; others are `tfds:NAME`. A user's file adds to it.
SETS: dict[str, ImageSet] = {
    "idx": ImageSet(
        _idx,
        "the four IDX files of MNIST or Fashion-MNIST (train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of"
        " t10k, gzipped or not)",
    ),
    **{
        f"cifar{classes}": ImageSet(
            functools.partial(_cifar, image_set=f"cifar{classes}"),
            f"the binary version of CIFAR-{classes} (cifar-{classes}-binary.tar.gz of"
            " www.cs.toronto.edu/~kriz/cifar.html, unpacked)",
        )
        for classes in (10, 100)
    },
    "patterns": ImageSet(_patterns),
}
