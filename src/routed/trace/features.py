"""What a router saw: the features of some tokens and the router's weights, with which other routers can be asked about the same tokens."""

from __future__ import annotations

import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.system import files
from routed.trace.arrays import Arrays, as_array, half, refuse

NUMBERED = "features_{:02d}.npz"
#: Tokens whose features are kept by a capture, about.
KEPT = 4096


class Features(NamedTuple):
    """Of the tokens `where` [F] (rows of the trace, ascending): by layer the features [F, D], kernels [D, E] and offsets [E] or None.

    The scores of a router are features @ kernel + offset; a layer whose router is no such function has no place here.
    """

    where: Arrays
    values: Sequence[Arrays]
    kernels: Sequence[Arrays]
    offsets: Sequence[Arrays] | None = None


def store(folder: pathlib.Path, features: Features, layers: int, tokens: int, experts: int) -> None:
    """Writes a file a layer: token, features (float16, or float32 where they need it), kernel, offset.

    Raises:
      UserError: shapes that do not agree with each other or with the trace; features that are not finite.
    """
    where = as_array(features.where)
    if where.ndim != 1 or len(where) == 0 or where.min() < 0 or where.max() >= tokens or (np.diff(where) <= 0).any():
        refuse(f"features.where must name tokens of the trace, 0 to {tokens - 1}, in ascending order")
    for name, of in (("values", features.values), ("kernels", features.kernels), ("offsets", features.offsets)):
        if of is not None and len(of) != layers:
            refuse(f"features.{name} has {len(of)} layers, the trace has {layers}")
    for layer in range(layers):
        values, kernel = as_array(features.values[layer]), as_array(features.kernels[layer])
        offset = as_array(features.offsets[layer]) if features.offsets is not None else np.zeros(experts, np.float32)
        if values.shape != (len(where), len(kernel)) or kernel.shape[1:] != (experts,) or offset.shape != (experts,):
            refuse(
                f"features of layer {layer}: values {list(values.shape)}, kernel {list(kernel.shape)}, offset {list(offset.shape)} must be"
                f" [{len(where)}, D], [D, {experts}] and [{experts}]"
            )
        if not np.isfinite(values).all():
            refuse(f"features of layer {layer} are not finite: leave such tokens out of features.where")
        _write(folder / NUMBERED.format(layer), where, values, kernel, offset)


def load(folder: pathlib.Path, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [F], features [F, D], kernel [D, E], offset [E]) of a layer, float32.

    Raises:
      UserError: the file is missing or damaged.
    """
    path = folder / NUMBERED.format(layer)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            return held["token"], held["features"].astype(np.float32), held["kernel"], held["offset"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is missing or damaged ({type(error).__name__}): write the trace again") from error


def join(parts: Sequence[tuple[pathlib.Path, int]], out: pathlib.Path, layers: int) -> None:
    """The features of parts (folder, its first token) in one folder."""
    for layer in range(layers):
        found = [load(folder, layer) for folder, _ in parts]
        where = np.concatenate([begin + one[0] for one, (_, begin) in zip(found, parts, strict=True)])
        values = np.concatenate([one[1] for one in found])
        _write(out / NUMBERED.format(layer), where, values, found[0][2], found[0][3])


def _write(path: pathlib.Path, where, values, kernel, offset) -> None:
    held: dict[str, Any] = {
        "token": where.astype(np.int64),
        "features": values.astype(half(values)),
        "kernel": kernel.astype(np.float32),
        "offset": offset.astype(np.float32),
    }

    def write(beside: pathlib.Path) -> None:
        with open(beside, "wb") as file:
            np.savez(file, allow_pickle=False, **held)

    files.write(path, write)
