"""Routing in files of tensors, read as the arguments of `routed.trace.write`: router logits of HF models, and NumPy."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from routed.contracts import UserError
from routed.system import files
from routed.trace.checks import as_array, refuse
from routed.trace.features import write_npz
from routed.trace.format import LAYER_COLUMNS, Trace, label_names, stripes, token_column

#: Names in a NumPy archive, besides label_NAME.
_NAMES = {*LAYER_COLUMNS, "k", "num_experts", "token_ids", "sequence", "position", "layers", "model", "source", "step"}
#: Type of safetensors -> type of NumPy.
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": jnp.bfloat16, "I64": "<i8", "I32": "<i4", "I16": "<i2"}
_TYPES |= {"I8": "i1", "U8": "u1", "BOOL": "?"}


def read_hf(path: str | os.PathLike, k: int) -> dict[str, Any]:
    """Reads `router_logits` of a model of transformers: scores [batch * positions, E] of each layer.

    The file is of torch.save (a tuple, or a dict with router_logits) or of safetensors (layers by the number in their
    names). `input_ids` and `attention_mask` [batch, positions] may stand beside them: padding is left out. Layers
    that are None are left out. Experts are the k highest scores, which is wrong for models whose choice has a bias or
    groups: capture those.

    Raises:
      UserError: the file cannot be read, shapes do not agree, or rows are probabilities.
    """
    file = files.folder(path)
    stored = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
    beside = {name: as_array(stored.pop(name)) for name in ("input_ids", "attention_mask") if name in stored}
    layers = {name: as_array(value) for name, value in stored.items() if value is not None}
    if not layers:
        raise UserError(f"{file} has no router logits: run the model with output_router_logits=True")
    scores = {name: array.reshape(-1, array.shape[-1]) for name, array in layers.items() if array.ndim > 1}
    shape = next(iter(scores.values()), np.zeros((0, 0))).shape
    shapes = {name: list(array.shape) for name, array in layers.items()}
    if len(scores) < len(layers) or any(array.shape != shape for array in scores.values()):
        raise UserError(
            f"{file}: layers have shapes {shapes}: must be [tokens, experts], or [batch, positions, experts]"
        )
    for name, array in scores.items():
        if array.size and array.min() >= 0 and np.allclose(array.sum(1, dtype=np.float64), 1, atol=0.02):
            versions = "transformers 5.0 to 5.5 return probabilities as router_logits"
            raise UserError(f"{file}: rows of layer {name} sum to 1: give logits ({versions}; a newer one does not)")
    arguments: dict[str, Any] = {"k": k, "layers": list(scores), "source": file.name}
    where = np.ones(shape[0], bool)
    for name, array in beside.items():
        if array.ndim != 2 or array.size != shape[0]:
            raise UserError(
                f"{file}: {name} has shape {list(array.shape)}: must be [batch, positions], {shape[0]} in all"
            )
        if name == "attention_mask":
            where = array.reshape(-1) != 0
    if beside:
        rows, columns = next(iter(beside.values())).shape
        real = where.reshape(rows, columns)
        arguments["sequence"] = np.repeat(np.arange(rows), columns)[where]
        arguments["position"] = np.maximum(real.cumsum(1) - 1, 0).reshape(-1)[where]
    if "input_ids" in beside:
        arguments["token_ids"] = beside["input_ids"].reshape(-1)[where]
    return arguments | {"scores": [array[where] for array in scores.values()]}


def _read_torch(file: pathlib.Path) -> dict[str, Any]:
    """Returns layer -> scores, and what stands beside them, of a file of torch.save."""
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{file} is read with torch: pip install -e '.[torch]', or save it as safetensors") from error
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of zipfile, pickle and torch
        reason = (str(error).splitlines() or [""])[0][:120]
        saved = "save {'router_logits': tuple(out.router_logits), 'input_ids': ids}, which needs no code to load"
        raise UserError(f"{file} cannot be read as tensors ({type(error).__name__}: {reason}): {saved}") from error
    beside = {}
    if isinstance(stored, dict):
        beside = {name: stored[name] for name in ("input_ids", "attention_mask") if name in stored}
        stored = stored.get("router_logits")
    if hasattr(stored, "shape"):
        stored = list(stored) if len(stored.shape) > 2 else [stored]
    if not isinstance(stored, tuple | list) or not all(part is None or hasattr(part, "shape") for part in stored):
        raise UserError(f"{file} has no router_logits: a tuple of tensors, one for each layer")
    return {str(i): part for i, part in enumerate(stored)} | beside


def _read_safetensors(file: pathlib.Path) -> dict[str, Any]:
    """Returns name -> array: 8 bytes with the size of a header of JSON, the header, then the numbers."""
    try:
        with file.open("rb") as stream:
            size, whole = int.from_bytes(stream.read(8), "little"), os.fstat(stream.fileno()).st_size
            if size > whole:
                raise ValueError("the header is longer than the file")
            header, arrays = json.loads(stream.read(size)), dict[str, Any]()
            header.pop("__metadata__", None)
            for name, about in header.items():
                begin, end = about["data_offsets"]
                if not 0 <= begin <= end <= whole - 8 - size:
                    raise ValueError(f"{name} is beyond the file")
                stream.seek(8 + size + begin)
                values = np.frombuffer(stream.read(end - begin), _TYPES[about["dtype"]])
                arrays[name] = values.reshape(about["shape"])
    except OSError as error:
        raise UserError(f"{file} cannot be read ({(error.strerror or str(error)).lower()})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is no file of safetensors ({type(error).__name__}: {error})") from error

    def place(name: str) -> tuple[list[int], str]:
        return [int(number) for number in re.findall(r"\d+", name)], name

    return {name: arrays[name] for name in sorted(arrays, key=place)}


def read_npz(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a NumPy archive whose names are arguments of `routed.trace.write`, with label_NAME for a label.

    Raises:
      UserError: the archive cannot be read, or has another name.
    """
    file = files.folder(path)
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            stored = dict(archive)
    except Exception as error:  # of zipfile, zlib and NumPy
        raise UserError(f"{file} cannot be read as a NumPy archive ({type(error).__name__}: {error})") from error
    labels = {name.removeprefix("label_"): stored.pop(name) for name in list(stored) if name.startswith("label_")}
    if unknown := sorted(stored.keys() - _NAMES):
        names = ", ".join(sorted(_NAMES))
        raise UserError(f"{file}: unknown array {unknown[0]!r}; known are {names}, and label_NAME for a label")
    arguments: dict[str, Any] = {name: _plain(array) for name, array in stored.items()}
    return arguments | ({"labels": labels} if labels else {})


def _plain(array: np.ndarray) -> Any:
    return array if array.ndim > 1 or (array.dtype.kind in "iufb" and array.ndim) else array.tolist()


def export(trace: Trace, path: str | os.PathLike) -> None:
    """Writes a trace into a NumPy archive that `read_npz` reads: all but features and words, whole in memory."""
    file = files.folder(path)
    if file.suffix != ".npz":
        refuse(f"{file}: the name of a NumPy archive ends in .npz")
    arrays: dict[str, Any] = {
        name: np.stack(
            [np.concatenate([part for (part,) in stripes(trace, i, column)]) for i in range(len(trace.layers))]
        )
        for name, column in LAYER_COLUMNS.items()
        if column in trace.columns
    }
    columns: Mapping[str, tuple[str, bool]] = {
        "token_ids": ("token", trace.has_ids),
        "sequence": ("sequence", trace.has_sequences),
        "position": ("position", trace.has_positions),
    }
    arrays |= {name: token_column(trace, column) for name, (column, given) in columns.items() if given}
    for label in trace.labels:
        arrays[f"label_{label}"] = np.array(label_names(trace, label))[token_column(trace, label)]
    about = {"layers": list(trace.layers), "num_experts": trace.experts, "model": trace.model, "source": trace.source}
    about |= {} if trace.step is None else {"step": trace.step}
    write_npz(file, arrays | {name: np.array(value) for name, value in about.items()})
