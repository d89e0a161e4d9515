"""Faces with attributes: CelebA as prepared by TFDS, cut and reduced to 64 x 64 pixels (Chowdhury et al. 2023, 5.2).

Classes are combinations of attributes. With a share s > 0, hair colour is spurious for the first attribute. A share s
of the training images with the attribute has black hair, a share s of the training images without the attribute has
blond hair, and the rest have the other colour; in test images the share is 1 - s. Faces with neither or both colours
are then left out. The paper does not say how faces are cut or which images are used; here: the middle square, and the
first images of each split.
"""

from __future__ import annotations

import functools
import itertools
import pathlib

import numpy as np

from routed.contracts import UserError
from routed.tasks.image_files import Images
from routed.tasks.prepared import newest

#: Name of the image set, its name in TFDS, and pixels of a side; most images of a split; attributes of hair.
NAME, PREPARED, SIDE = "celeba", "celeb_a", 64
MOST = {"train": 60_000, "test": 20_000}
HAIR = ("Black_Hair", "Blond_Hair")


@functools.lru_cache(maxsize=2)
def load(directory: str, attributes: tuple[str, ...], spurious: float) -> Images:
    """Reads faces and their classes, sum_i 2^i [attribute i], once in a process.

    Raises:
      UserError: unprepared or damaged data, unknown attributes, a class without faces.
    """
    builder, path = newest(directory, PREPARED)
    attributes_of_set = dict(builder.info.features.items()).get("attributes", {})
    if missing := [name for name in attributes if name not in attributes_of_set]:
        raise UserError(
            f"config key data.attributes={attributes}: {path} has no attribute {missing[0]}; it has "
            f"{', '.join(attributes_of_set) or 'none'}"
        )
    arrays = []
    for split, sign in (("train", 1), ("test", -1)):
        x, present, hair = _part(builder, path, split, attributes)
        y = (present << np.arange(len(attributes))[None]).sum(1)
        if spurious:
            keep = misled(present[:, 0], hair, spurious if sign > 0 else 1 - spurious)
            x, y = x[keep], y[keep]
        if empty := sorted(set(range(2 ** len(attributes))) - set(y.tolist())):
            raise UserError(
                f"{path}: split {split} has no face of class {empty[0]} of data.attributes={attributes}; prepare "
                "celeb_a again, or name other attributes"
            )
        arrays += [x, y.astype(np.int32)]
    return Images(*arrays)


def misled(present: np.ndarray, hair: np.ndarray, share: float) -> np.ndarray:
    """Returns the indices of the largest subset, in order, in which each class has its hair colour in this share.

    The hair colour of faces with the attribute is black, of faces without the attribute blond.
    """
    keep = []
    for has in (0, 1):
        agrees, differs = (
            np.flatnonzero((present == has) & (hair[:, a] == 1) & (hair[:, 1 - a] == 0)) for a in (1 - has, has)
        )
        whole = (
            min(len(agrees) / share, len(differs) / (1 - share)) if 0 < share < 1 else max(len(agrees), len(differs))
        )
        keep += [agrees[: round(share * whole)], differs[: round((1 - share) * whole)]]
    return np.sort(np.concatenate(keep))


def _part(builder, path: pathlib.Path, split: str, attributes: tuple[str, ...]):
    if split not in builder.info.splits:
        raise UserError(f"{path}: has no split {split}; prepare {PREPARED} again")
    faces, present, hair = [], [], []
    try:
        for record in itertools.islice(iter(builder.as_data_source(split=split)), MOST[split]):
            faces.append(cut(record["image"]))
            present.append([bool(record["attributes"][name]) for name in attributes])
            hair.append([bool(record["attributes"][name]) for name in HAIR])
    except (RuntimeError, ValueError, OSError, KeyError) as error:  # a wrong checksum, a damaged image, no hair
        raise UserError(f"{path}: split {split} cannot be read ({error}); prepare {PREPARED} again") from error
    return np.stack(faces), np.array(present, np.int64), np.array(hair, np.int64)


def cut(face: np.ndarray) -> np.ndarray:
    """Cuts the middle square and reduces the square to 64 x 64 pixels, each the mean of a cell of the square."""
    height, width = face.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = face[top : top + side, left : left + side].astype(np.float64)
    edges = np.round(np.arange(SIDE) * side / SIDE).astype(int)
    sums = np.add.reduceat(np.add.reduceat(square, edges, 0), edges, 1)
    each = np.diff([*edges, side])
    return np.round(sums / (each[:, None] * each[None])[..., None]).astype(np.uint8)
