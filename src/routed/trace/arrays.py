"""What a user gives for a trace, looked at: arrays of any library, whose shapes agree and whose values can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from routed.contracts import UserError
from routed.contracts.ties import highest_of_array
from routed.trace.format import OWN, ROW_GROUP

#: Above it a float16 is infinite.
LARGEST_HALF = 65504.0

Arrays = Any  # NumPy, JAX or torch, or a sequence of them, one a layer


def as_array(values: Arrays) -> np.ndarray:
    """NumPy's array of one of NumPy, JAX or torch, which may lie on a device or be bfloat16."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def half(values: np.ndarray) -> type[np.floating]:
    """float16, or float32 where a float16 would be infinite."""
    return np.float16 if np.abs(values).max(initial=0) < LARGEST_HALF else np.float32


def refuse(text: str) -> NoReturn:
    """Ends with one line."""
    raise UserError(f"trace: {text}")


Layer = Callable[[int], dict[str, np.ndarray]]


def choices_of(scores, experts, weights, kept, k, num_experts, keep_scores):
    """(layers, tokens, experts, k, columns, arrays of a layer), checked but for what only a look at every value can tell."""
    if scores is None and experts is None:
        refuse("neither scores nor experts are given")
    shapes = {}
    for name, array in (("scores", scores), ("experts", experts), ("weights", weights), ("kept", kept)):
        if array is not None:
            shapes[name] = (len(array), *as_array(array[0]).shape) if len(array) else (0,)
            if len(shapes[name]) != 3 or 0 in shapes[name]:
                last = "experts" if array is scores else "k"
                refuse(
                    f"{name} has shape {list(shapes[name])}: must be [layers, tokens, {last}], none of them 0; of one layer {name}[None]"
                )
    sizes = {name: shape[:2] for name, shape in shapes.items()}
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            refuse(
                f"{name} has {size[0]} layers and {size[1]} tokens, {first} has {sizes[first][0]} and {sizes[first][1]}"
            )
    layer_count, tokens = sizes[first]
    for name in ("weights", "kept"):
        if name in shapes and shapes[name] != shapes.get("experts"):
            refuse(
                f"{name} has shape {list(shapes[name])}: it goes with experts, which has {list(shapes.get('experts', ()))}"
            )
    if scores is not None:
        count = shapes["scores"][2]
        if num_experts not in (None, count):
            refuse(f"num_experts={num_experts}, but scores has {count} experts")
    else:
        count = int(num_experts) if num_experts else 1 + max(int(as_array(layer).max()) for layer in experts)
    if count > np.iinfo(np.int16).max:  # a larger expert would be stored as another, or as none
        refuse(f"{count:,} experts: a trace holds at most {np.iinfo(np.int16).max:,}")
    most = shapes["experts"][2] if experts is not None else k
    if most is None:
        refuse("k, the experts of a token, is missing")
    if k not in (None, most) or not 1 <= most <= count:
        refuse(
            f"k={k}: must be between 1 and {count} experts"
            + (f", and experts has {most} a token" if experts is not None else "")
        )
    given = experts is not None
    held = (
        "expert",
        *["weight"] * (weights is not None or not given),
        *["kept"] * (kept is not None),
        *["scores"] * (scores is not None and keep_scores),
    )

    sources = {"scores": scores, "expert": experts, "weight": weights, "kept": kept}

    def arrays(layer: int) -> dict[str, np.ndarray]:
        found = {name: as_array(of[layer]) for name, of in sources.items() if of is not None}
        for name, array in found.items():
            if array.shape != (shape := shapes[name if name in shapes else f"{name}s"][1:]):
                refuse(f"layer {layer} of {name} has shape {list(array.shape)}, layer 0 has {list(shape)}")
        if scores is not None:
            _check_scores(found["scores"], layer)
        if given:
            _check_experts(found["expert"], layer, count)
        else:
            found["expert"], found["weight"] = top(found["scores"], most)
        return {name: found[name] for name in held}

    return layer_count, tokens, count, most, held, arrays


def top(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k highest of each row of scores [T, E], highest first, the lower index first among equals; and their softmax probabilities."""
    chosen, weight = (np.empty((len(scores), k), kind) for kind in (np.int16, np.float32))
    for begin in range(0, len(scores), ROW_GROUP):
        here = slice(begin, begin + ROW_GROUP)
        some = scores[here].astype(np.float32)
        exponent = np.exp(some - some.max(1, keepdims=True))
        chosen[here] = best = highest_of_array(some, k)
        weight[here] = np.take_along_axis(exponent, best, axis=1) / exponent.sum(1, keepdims=True)
    return chosen, weight


def _check_scores(scores: np.ndarray, layer: int) -> None:
    bad = ~np.isfinite(scores).all(1)
    if bad.any():
        refuse(
            f"scores of layer {layer} are not finite for {int(bad.sum()):,} tokens, the first is token {int(bad.argmax())}: leave such tokens out"
        )


def _check_experts(experts: np.ndarray, layer: int, count: int) -> None:
    if not np.issubdtype(experts.dtype, np.integer):
        refuse(f"experts of layer {layer} are {experts.dtype}: must be integers")
    bad = ((experts >= count) | (experts < -1)).any(1)
    if bad.any():
        token = int(bad.argmax())
        refuse(
            f"layer {layer}, token {token} has expert {int(experts[token].max())}, but there are {count} experts, 0 to {count - 1} (-1: none)"
        )
    ordered = np.sort(experts, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if twice.any():
        refuse(f"layer {layer}, token {int(twice.argmax())} has an expert twice")


def token_table(tokens: int, token_ids, sequence, position, labels: Mapping[str, Any]) -> pa.Table:
    """tokens.parquet; one sequence where none is given, and positions counted in it where they are not."""
    columns: dict[str, Any] = {}
    for name, values in (("token_ids", token_ids), ("sequence", sequence), ("position", position)):
        if values is not None:
            array = as_array(values)
            if array.shape != (tokens,) or not np.issubdtype(array.dtype, np.integer):
                refuse(f"{name} has shape {list(array.shape)} of {array.dtype}: must be {tokens} integers, one a token")
            columns[name] = array
    rows = columns.get("sequence", np.zeros(tokens, np.int64))
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
    if len(np.unique(rows[starts])) != len(starts):
        refuse("sequence: the tokens of a sequence must stand together; sort all arrays by sequence")
    if "position" not in columns:
        lengths = np.diff(starts, append=tokens)
        columns["position"] = np.arange(tokens) - np.repeat(starts, lengths)
    table = {"sequence": rows.astype(np.int64), "position": columns["position"].astype(np.int32)}
    if "token_ids" in columns:
        if columns["token_ids"].min() < 0:
            refuse(f"token_ids: {int(columns['token_ids'].min())} is negative; leave padding out")
        table["token"] = columns["token_ids"].astype(np.int64)
    return pa.table(table | {name: _label(name, values, tokens) for name, values in labels.items()})


def _label(name: str, values: Any, tokens: int) -> pa.DictionaryArray:
    """A column of labels: codes in the order of their sorted values."""
    if name in OWN:
        refuse(f"labels: {name!r} is a column of every trace; give the label another name")
    array = as_array(values)
    if array.shape != (tokens,):
        refuse(f"labels[{name!r}] has shape {list(array.shape)}: must have {tokens} rows, one a token")
    missing = (
        np.array([value is None or value != value for value in array])
        if array.dtype.kind in "Of"
        else np.zeros(tokens, bool)
    )
    if missing.any():
        refuse(
            f"labels[{name!r}] lacks {int(missing.sum()):,} of {tokens:,} rows, the first is token {int(missing.argmax())}: name them, 'unknown' say"
        )
    if array.dtype.kind == "f":
        refuse(f"labels[{name!r}] holds {array.dtype}: labels are words or integers; put numbers into classes")
    values, codes = np.unique(array.astype(str) if array.dtype.kind == "O" else array, return_inverse=True)
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int32)), pa.array([str(value) for value in values.tolist()])
    )
