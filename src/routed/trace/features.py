"""Inputs of the routers for some tokens, with the routers' weights: other routers can be tried on the same tokens."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.system import files
from routed.trace.checks import Arrays, as_array, half, refuse

LAYER_FILE = "features_{:02d}.npz"
#: Tokens whose features a capture keeps, about.
MOST_TOKENS = 4096


class Features(NamedTuple):
    """Features of the tokens `where` [F]: per layer values [F, D], kernel [D, E], and offset [E] or None.

    `where` are rows of the trace, ascending. The scores of a router are features @ kernel + offset. All layers must
    have such a router.
    """

    where: Arrays
    values: Sequence[Arrays]
    kernels: Sequence[Arrays]
    offsets: Sequence[Arrays] | None = None


def store(folder: pathlib.Path, features: Features, layers: int, tokens: int, experts: int) -> None:
    """Writes a file per layer: token, features (float16, or float32 where they need it), kernel, offset.

    Raises:
      UserError: shapes do not agree with each other or with the trace, or features are not finite.
    """
    where = as_array(features.where)
    if where.ndim != 1 or len(where) == 0 or where.min() < 0 or where.max() >= tokens or (np.diff(where) <= 0).any():
        refuse(f"features.where must name tokens of the trace, 0 to {tokens - 1}, in ascending order")
    for name in ("values", "kernels", "offsets"):
        by_layer = getattr(features, name)
        if by_layer is not None and len(by_layer) != layers:
            refuse(f"features.{name} has {len(by_layer)} layers, the trace has {layers}")
    for layer in range(layers):
        values, kernel = as_array(features.values[layer]), as_array(features.kernels[layer])
        offset = as_array(features.offsets[layer]) if features.offsets is not None else np.zeros(experts, np.float32)
        if values.shape != (len(where), len(kernel)) or kernel.shape[1:] != (experts,) or offset.shape != (experts,):
            shapes = f"values {list(values.shape)}, kernel {list(kernel.shape)}, offset {list(offset.shape)}"
            refuse(f"features of layer {layer}: {shapes} must be [{len(where)}, D], [D, {experts}] and [{experts}]")
        if not np.isfinite(values).all():
            refuse(f"features of layer {layer} are not finite: leave such tokens out of features.where")
        if not (np.isfinite(kernel).all() and np.isfinite(offset).all()):
            refuse(f"features.kernels or features.offsets of layer {layer} are not finite: give the router's weights")
        _write(folder / LAYER_FILE.format(layer), where, values, kernel, offset)


def load(folder: pathlib.Path, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (tokens [F], features [F, D], kernel [D, E], offset [E]) of a layer, float32.

    Raises:
      UserError: the file is missing or damaged, or its arrays do not agree.
    """
    path = folder / LAYER_FILE.format(layer)
    try:
        arrays = read_npz(path)
        token, values, kernel, offset = (arrays[name] for name in ("token", "features", "kernel", "offset"))
    except Exception as error:  # a damaged archive raises errors of zipfile, zlib, struct and NumPy
        raise UserError(f"{path} is missing or damaged ({type(error).__name__}): write the trace again") from error
    axes = (token.ndim, values.ndim, kernel.ndim, offset.ndim) == (1, 2, 2, 1)
    shapes = axes and values.shape == (len(token), len(kernel)) and kernel.shape[1:] == offset.shape
    real = token.dtype.kind in "iu" and all(array.dtype.kind == "f" for array in (values, kernel, offset))
    if not shapes or not real or not all(np.isfinite(array).all() for array in (values, kernel, offset)):
        raise UserError(f"{path} has arrays that do not agree, or are not finite: write the trace again")
    if not len(token) or token[0] < 0 or (np.diff(token) <= 0).any():
        raise UserError(f"{path} names tokens that are not in ascending order: write the trace again")
    return token, values.astype(np.float32), kernel, offset


def check(folder: pathlib.Path, layer: int, tokens: int, experts: int) -> None:
    """Refuses features of a layer that are not those of a trace with so many tokens and experts."""
    token, _, _, offset = load(folder, layer)
    if token[-1] >= tokens or offset.shape != (experts,):
        raise UserError(
            f"{folder / LAYER_FILE.format(layer)} is of another trace: this one has {tokens:,} tokens and {experts}"
            " experts; write the trace again"
        )


def join(parts: Sequence[tuple[pathlib.Path, int]], out: pathlib.Path, layers: int) -> None:
    """Writes the features of parts (folder, number of its first token) into one folder."""
    for layer in range(layers):
        loaded = [load(folder, layer) for folder, _ in parts]
        where = np.concatenate([begin + tokens for (tokens, *_), (_, begin) in zip(loaded, parts, strict=True)])
        values = np.concatenate([values for _, values, _, _ in loaded])
        _write(out / LAYER_FILE.format(layer), where, values, *loaded[0][2:])


def _write(path: pathlib.Path, where, values, kernel, offset) -> None:
    arrays = {"token": where.astype(np.int64), "features": values.astype(half(values))}
    write_npz(path, arrays | {"kernel": kernel.astype(np.float32), "offset": offset.astype(np.float32)})


def write_npz(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays into an npz file, which appears complete or not at all."""

    def write(partial_file: pathlib.Path) -> None:
        with open(partial_file, "wb") as file:
            np.savez(file, allow_pickle=False, **dict(arrays))

    files.write(path, write)


def read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an npz file; its errors are those of NumPy."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)
