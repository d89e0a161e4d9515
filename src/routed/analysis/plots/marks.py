"""Means with intervals, drawn, and kept beside the drawing with seeds and n: what a page needs to answer a pointer.

A panel (matplotlib Axes) carries what was drawn onto it through these functions as `panel.marks`, a list of `Marks`; `live` makes
interactive figures of it, so that these show what is printed and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from routed.analysis.statistics import Estimate

#: seed -> value.
Seeds = Mapping[int, float]


class Point(NamedTuple):
    """A mean at a place of the other axis, which is called `at` (else as its tick); `start` is where a bar begins, `words` say more."""

    place: float | tuple[int, int]
    estimate: Estimate
    words: str = ""
    seeds: Seeds = MappingProxyType({})
    start: float | None = None
    at: str = ""


class Marks(NamedTuple):
    """Points of one colour with one entry in the legend. kind: points, bars, or cells, which have no colour: `place` is (x, y)."""

    kind: str
    label: str
    colour: str
    points: list[Any]
    joined: bool = False
    dashed: bool = False
    horizontal: bool = False
    marker: str = "o"


def bars(found: Sequence[Estimate]) -> np.ndarray:
    """Lengths of error bars, [2, n], none where there is no interval; a mean beyond a bound, which is cut, has none on that side."""
    lengths = [[one.mean - one.low for one in found], [one.high - one.mean for one in found]]
    return np.nan_to_num(np.maximum(lengths, 0))


def intervals(
    panel, points: Iterable[Point], label: str, style: Mapping[str, Any], horizontal: bool = False, listed: bool = True
) -> None:
    """Means with their intervals as error bars in matplotlib's `style`, along x if `horizontal`; `listed` in the legend."""
    points = [point for point in points if np.isfinite(point.estimate.mean)]
    if not points:
        return
    places, found = [point.place for point in points], [point.estimate for point in points]
    means = [one.mean for one in found]
    style = {**style, **({"label": label} if listed else {})}
    if horizontal:
        panel.errorbar(means, places, xerr=bars(found), **style)
    else:
        panel.errorbar(places, means, bars(found), **style)
    explain(panel.figure, found)
    joined = style.get("ls", "-") != ""
    dashed, marker = style.get("ls") == "--", style.get("marker", "o")
    keep(panel, Marks("points", label, style.get("color", "#000000"), points, joined, dashed, horizontal, marker))


def keep(panel, marks: Marks) -> None:
    """Adds to what a panel shows."""
    panel.marks = [*kept(panel), marks]


def note(figure, words: str) -> None:
    """Adds to what a figure says of itself, above its panels and in its caption: what it cuts or leaves out."""
    figure.notes = [*dict.fromkeys([*notes(figure), words])]


def explain(figure, found: Iterable[Estimate]) -> None:
    """Has a figure say why some of its markers have no interval."""
    for one in found:
        if one.n == 1:
            note(figure, "where one seed ran, there is no interval")
        elif one.low == one.high:
            note(figure, "where all seeds are alike, an interval has no length")


def notes(figure) -> list[str]:
    """What a figure says of itself."""
    return getattr(figure, "notes", [])


def kept(panel) -> list[Marks]:
    """What was drawn onto a panel."""
    return getattr(panel, "marks", [])


def by_seed(rows: pd.DataFrame, metric: str) -> Seeds:
    """The values of a metric by seed."""
    good = rows[rows.status == "ok"]
    return dict(zip(good.seed.tolist(), good[metric].tolist(), strict=True))
