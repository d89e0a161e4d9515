"""Checks of the arrays that a user gives for a trace, from any library: their shapes and their values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from routed.trace import checks
from routed.trace.checks import MOST_EXPERTS, Arrays, as_array, refuse, whole
from routed.trace.format import LAYER_COLUMNS, ROW_GROUP, TOKEN_COLUMNS

#: No known model has more layers with routers, or more experts in a layer; more of them than tokens are refused.
MANY_LAYERS, MANY_EXPERTS = 128, 1024


class Choices(NamedTuple):
    """Checked choices of a trace: sizes, the columns of a layer's file, and a function from a layer to its columns."""

    layers: int
    tokens: int
    experts: int
    k: int
    columns: tuple[str, ...]
    of_layer: Callable[[int], dict[str, np.ndarray]]


def choices_of(given: Mapping[str, Arrays], k: Any, num_experts: Any, keep_scores: bool) -> Choices:
    """Returns checked choices from the arrays scores, experts, weights and kept (None where not given).

    Values are checked when a layer is read.

    Raises:
      UserError: scores and experts are both missing, or shapes or counts do not agree.
    """
    given = {name: array for name, array in given.items() if array is not None}
    if not given.keys() & {"scores", "experts"}:
        refuse("neither scores nor experts are given")
    shapes = _shapes_of(given)
    _check_axes(shapes)
    experts, k = _sizes(given, shapes, k, num_experts)
    columns = {name: column for name, column in LAYER_COLUMNS.items() if name in {*given, "experts"}}
    if not keep_scores:
        columns.pop("scores", None)

    def of_layer(layer: int) -> dict[str, np.ndarray]:
        arrays = {name: as_array(array[layer]) for name, array in given.items()}
        for name, array in arrays.items():
            if array.shape != (shape := shapes[name][1:]):
                refuse(f"layer {layer} of {name} has shape {list(array.shape)}, layer 0 has {list(shape)}")
        if "scores" in arrays:
            checks.scores(arrays["scores"], layer)
        if "experts" in arrays:
            checks.experts(arrays["experts"], layer, experts)
            if "weights" in arrays:
                checks.weights(arrays["weights"], layer, arrays["experts"])
            if "kept" in arrays:
                checks.kept(arrays["kept"], layer)
        else:
            arrays["experts"] = top(arrays["scores"], k)
        return {column: arrays[name] for name, column in columns.items()}

    layers, tokens, _ = next(iter(shapes.values()))
    return Choices(layers, tokens, experts, k, tuple(columns.values()), of_layer)


def _shapes_of(given: Mapping[str, Arrays]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes [layers, tokens, experts or k] of the given arrays, which agree."""
    shapes: dict[str, tuple[int, ...]] = {}
    for column, array in given.items():
        dense = [i for i, layer in enumerate(array) if layer is None] if isinstance(array, list | tuple) else []
        if dense:
            refuse(
                f"{column}[{dense[0]}] is None, as of a layer without a router: leave such layers out, and name the"
                f" others, for example layers={[str(i) for i in range(len(array)) if i not in dense][:3]}"
            )
        shapes[column] = shape = (len(array), *as_array(array[0]).shape) if len(array) else (0,)
        if len(shape) != 3 or 0 in shape:
            axes = f"[layers, tokens, {'experts' if column == 'scores' else 'k'}]"
            refuse(
                f"{column} has shape {list(shape)}: must be {axes}, none of them 0; for one layer give {column}[None]"
            )
    first, (layers, tokens, _) = next(iter(shapes.items()))
    for name, shape in shapes.items():
        if shape[:2] != (layers, tokens):
            refuse(f"{name} has {shape[0]} layers and {shape[1]} tokens, {first} has {layers} and {tokens}")
    for name in ("weights", "kept"):
        if name in shapes and shapes[name] != (experts := shapes.get("experts", ())):
            refuse(f"{name} has shape {list(shapes[name])}: it must be the shape of experts, which is {list(experts)}")
    return shapes


def _check_axes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses axes that stand in another order, before their layers are read: 6,000 layers of 3 tokens take 10 GB."""
    for column, (layers, tokens, last) in shapes.items():
        axes = f"[layers, tokens, {'experts' if column == 'scores' else 'k'}]"
        if layers > max(MANY_LAYERS, tokens):
            text = f"{column} has {layers:,} layers of {tokens:,} tokens: its axes must be {axes}"
            refuse(f"{text}; if tokens come first, give {column}.swapaxes(0, 1)")
        if last > max(MANY_EXPERTS, tokens):
            text = f"{column} has {tokens:,} tokens with {last:,} entries each: its axes must be {axes}"
            refuse(f"{text}; if tokens come last, give {column}.swapaxes(1, 2)")


def _sizes(given: Mapping[str, Arrays], shapes: Mapping[str, Any], k: Any, num_experts: Any) -> tuple[int, int]:
    """Returns the number of experts, and of experts of a token."""
    if "scores" in shapes:
        count = shapes["scores"][2]
        if num_experts is not None and whole("num_experts", num_experts, 1, sys.maxsize) != count:
            refuse(f"num_experts={num_experts}, but scores has {count} experts")
    elif num_experts is not None:
        count = whole("num_experts", num_experts, 1, sys.maxsize)
    else:
        count = 1 + max(int(as_array(layer).max()) for layer in given["experts"])
    if count > MOST_EXPERTS:
        refuse(f"{count:,} experts: a trace holds at most {MOST_EXPERTS:,}")
    k = None if k is None else whole("k", k, -sys.maxsize, sys.maxsize)
    most = shapes["experts"][2] if "experts" in shapes else k
    if most is None:
        refuse("k, the number of experts of a token, is missing")
    if k not in (None, most) or not 1 <= most <= count:
        also = f", and experts has {most} per token" if "experts" in shapes else ""
        refuse(f"k={k}: must be between 1 and {count} experts{also}")
    return count, most


def top(scores: np.ndarray, k: int) -> np.ndarray:
    """Returns the k highest experts [T, k] of each row of scores [T, E], highest first.

    The lower index comes first among equal scores, as in the layer.
    """
    chosen = np.empty((len(scores), k), np.int16)
    for begin in range(0, len(scores), ROW_GROUP):
        here = slice(begin, begin + ROW_GROUP)
        chosen[here] = highest_of_array(scores[here].astype(np.float32), k)
    return chosen


def highest_of_array(values: Float[np.ndarray, "N M"], k: int) -> Int[np.ndarray, "N k"]:
    """Returns the same indices as `contracts.ties.highest`, of an array whose values are above -inf.

    It is faster than a sort for small k.
    """
    remaining, rows = values.copy(), np.arange(len(values))
    indices = np.empty((len(values), k), np.int32)
    for rank in range(k):
        indices[:, rank] = best = remaining.argmax(1)
        remaining[rows, best] = -np.inf
    return indices


def token_table(tokens: int, columns: Mapping[str, Arrays], labels: Mapping[Any, Any]) -> pa.Table:
    """Returns tokens.parquet from token_ids, sequence and position (None where not given) and labels, each [tokens].

    Without `sequence` all tokens are one sequence; without `position` tokens are numbered within their sequence.

    Raises:
      UserError: a shape is not [tokens], or values are not possible.
    """
    arrays = {name: as_array(values) for name, values in columns.items() if values is not None}
    for name, array in arrays.items():
        if array.shape != (tokens,) or array.dtype.kind not in "iu":
            shape = f"shape {list(array.shape)} of {array.dtype}"
            refuse(f"{name} has {shape}: must be {tokens} integers, one for each token")
    checks.tokens(arrays)
    sequence = arrays.get("sequence", np.zeros(tokens, np.int64))
    starts = checks.starts_of(sequence)
    counted = np.arange(tokens) - np.repeat(starts, np.diff(starts, append=tokens))
    position = arrays.get("position", counted).astype(np.int32)
    table = {"sequence": sequence.astype(np.int64), "position": position}
    if "token_ids" in arrays:
        table["token"] = arrays["token_ids"].astype(np.int64)
    checks.names("labels", labels)
    return pa.table(table | {name: _label(name, values, tokens) for name, values in labels.items()})


def _label(name: str, values: Any, tokens: int) -> pa.DictionaryArray:
    """Returns a column of labels: codes in the order of their sorted values."""
    if name in TOKEN_COLUMNS:
        refuse(f"labels: {name!r} is a column of every trace; give the label another name")
    array, label = as_array(values), f"labels[{name!r}]"
    if array.shape != (tokens,):
        refuse(f"{label} has shape {list(array.shape)}: must have {tokens} rows, one for each token")
    if array.dtype.kind in "Of":
        missing = np.array([value is None or value != value for value in array])
        if missing.any():
            rows = f"{int(missing.sum()):,} of {tokens:,} rows, the first is token {int(missing.argmax())}"
            refuse(f"{label} lacks {rows}: give them a value, for example 'unknown'")
    if array.dtype.kind not in "OUTiub":
        refuse(f"{label} holds {array.dtype}: labels are words or integers; put numbers into classes")
    values, codes = np.unique(array.astype(str) if array.dtype.kind == "O" else array, return_inverse=True)
    names = [checks.text(f"a value of {label}", str(value)) for value in values.tolist()]
    if "" in names:
        refuse(f"{label} has an empty value: give such tokens another one, for example 'unknown'")
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names))
