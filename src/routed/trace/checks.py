"""Checks of values of a trace, when it is written and when it is read: ranges, finiteness, one expert once a token."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from routed.contracts import UserError

#: A larger number is infinite as float16.
LARGEST_HALF = 65504.0
#: A larger expert number would be stored as another expert, or as none.
MOST_EXPERTS = int(np.iinfo(np.int16).max)
#: A larger weight makes sums of weights infinite as float32.
LARGEST_WEIGHT = 1e30
#: Signs that no page can show: control characters, and single halves of pairs of UTF-16.
UNSHOWN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

Arrays = Any  # NumPy, JAX or torch, or a sequence of them, one per layer


def refuse(text: str) -> NoReturn:
    """Raises a `UserError` of one line."""
    raise UserError(f"trace: {text}")


def as_array(values: Arrays) -> np.ndarray:
    """Returns a NumPy array of an array of NumPy, JAX or torch, which may be on a device or bfloat16."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def half(values: np.ndarray) -> type[np.floating]:
    """Returns float16, or float32 where a float16 would be infinite."""
    return np.float16 if np.abs(values).max(initial=0) < LARGEST_HALF else np.float32


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Returns a whole number of Python.

    Raises:
      UserError: the value is no whole number, or out of its range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_):
        refuse(f"{name}={value!r}: must be a whole number")
    if not least <= number <= most:
        refuse(f"{name}={number}: must be between {least} and {most}")
    return number


def text(name: str, value: Any) -> str:
    """Returns a text that a page can show.

    Raises:
      UserError: the value is no text, or has a sign that no page can show.
    """
    if not isinstance(value, str):
        refuse(f"{name}={value!r}: must be a text")
    if sign := UNSHOWN.search(value):
        refuse(f"{name} has the sign U+{ord(sign[0]):04X}, which no page can show: leave it out")
    return value


def names(name: str, values: Iterable[Any]) -> tuple[str, ...]:
    """Returns names that are different texts, none of them empty.

    Raises:
      UserError: a name is no text, empty, or there twice.
    """
    checked = tuple(text(name, value) for value in values)
    for i, value in enumerate(checked):
        if not value:
            refuse(f"{name}: a name is empty")
        if value in checked[:i]:
            refuse(f"{name}: two have the name {value!r}; give each its own name")
    return checked


def scores(values: np.ndarray, layer: Any) -> None:
    """Refuses scores [T, E] that are no real numbers, or not finite as float32."""
    if values.dtype.kind not in "biuf":
        refuse(f"scores of layer {layer} are {values.dtype}: must be real numbers")
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(values) <= np.finfo(np.float32).max).all(1)
    if bad.any():
        count = f"{int(bad.sum()):,} tokens, the first is token {int(bad.argmax())}"
        masked = not (np.isnan(values).any() or (values > np.finfo(np.float32).max).any())
        masks = "a mask of -inf hides which experts have scores, so give experts (and weights) instead of scores"
        refuse(f"scores of layer {layer} are not finite for {count}: {masks if masked else 'leave such tokens out'}")


def experts(values: np.ndarray, layer: Any, count: int) -> None:
    """Refuses experts [T, k] that are no integers of 0 to count - 1 (-1: none), or that a token has twice."""
    if values.dtype.kind not in "iu":
        refuse(f"experts of layer {layer} are {values.dtype}: must be integers")
    if int(values.max()) >= count or int(values.min()) < -1:
        bad = (values >= count) | (values < -1)
        token = int(bad.any(1).argmax())
        allowed = f"there are {count} experts, 0 to {count - 1} (-1: none)"
        refuse(f"layer {layer}, token {token} has expert {int(values[token][bad[token]][0])}, but {allowed}")
    ordered = np.sort(values, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if twice.any():
        refuse(f"layer {layer}, token {int(twice.argmax())} has an expert twice")


def weights(values: np.ndarray, layer: Any, chosen: np.ndarray) -> None:
    """Refuses weights [T, k] of chosen experts that are no real numbers up to 1e30, of any sign, as Gemma 4 has."""
    if values.dtype.kind not in "biuf":
        refuse(f"weights of layer {layer} are {values.dtype}: must be real numbers")
    with np.errstate(invalid="ignore"):
        bad = ((chosen >= 0) & ~(np.abs(values) <= LARGEST_WEIGHT)).any(1)
    if bad.any():
        token = int(bad.argmax())
        allowed = f"must be finite, at most {LARGEST_WEIGHT:g}"
        refuse(f"layer {layer}, token {token} has weights {values[token].tolist()}: {allowed}")


def kept(values: np.ndarray, layer: Any) -> None:
    """Refuses values [T, k] that are not True or False, nor 1 or 0."""
    if values.dtype.kind not in "biu" or not ((values == 0) | (values == 1)).all():
        refuse(f"kept of layer {layer} is {values.dtype} with other values than True and False")


def tokens(arrays: dict[str, np.ndarray]) -> None:
    """Refuses sequence, position or token [T] that are no integers, or whose values are not possible."""
    for column, array in arrays.items():
        if array.dtype.kind not in "iu":
            refuse(f"{column} is {array.dtype}: must be integers")
        most = np.iinfo(np.int32 if column == "position" else np.int64).max
        low, high = int(array.min()), int(array.max())
        if low < 0 and column != "sequence":
            refuse(f"{column}: {low} is negative; leave padding out")
        if high > most or low < -most:
            refuse(f"{column}: {high if high > most else low} cannot be stored; the largest is {most:,}")
    if "sequence" in arrays:
        starts = starts_of(arrays["sequence"])
        if len(np.unique(arrays["sequence"][starts])) != len(starts):
            refuse("sequence: the tokens of a sequence must stand together; sort all arrays by sequence")


def starts_of(sequence: np.ndarray) -> np.ndarray:
    """Returns the first token of each sequence."""
    return np.concatenate([[0], 1 + np.flatnonzero(sequence[1:] != sequence[:-1])])
