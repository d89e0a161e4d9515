"""Panels of a chart: means with intervals, bars, cells, lines and text on two axes, collected as rows.

A panel is described once; `layers` builds Vega-Lite of the description, and `rendering` makes the page, SVG and PNG
of that. Vega-Lite is written as dicts: Altair's objects took 150 of 228 ms a chart (BUILD_NOTES.md).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from routed.analysis import digits
from routed.analysis.plots.pictures import Scheme, picture
from routed.analysis.statistics import Estimate

#: A number from Python or a table.
Number = float | np.number

#: Colour of lines and marks that are no series, which a dark ground turns light.
INK = "#000000"


class Series(NamedTuple):
    """An entry of the legend. `shape` is a symbol of Vega; a `hollow` symbol is an outline."""

    label: str
    colour: str = INK
    shape: str = "circle"
    dashed: bool = False
    hollow: bool = False


class Point(NamedTuple):
    """A mean at a position. `at` names the position, `note` says more, `seeds` maps seed to value, a bar begins at
    `start`.
    """

    position: Number
    estimate: Estimate
    at: str = ""
    note: str = ""
    seeds: Mapping[int, float] = {}
    start: float = 0.0


@dataclasses.dataclass
class Axis:
    """An axis: its label, ends, and the labels of its ticks by their positions (None: Vega chooses).

    `all_labels` keeps labels that touch each other; `angle` turns labels, in degrees.
    """

    label: str = ""
    domain: tuple[Number, Number] | None = None
    log: bool = False
    ticks: Mapping[Any, str] | None = None
    reverse: bool = False
    grid: bool = True
    all_labels: bool = False
    angle: int = 0

    def name_of(self, position: Number) -> str:
        """Returns the label of the tick at a position, or of the nearest integer, or else the number."""
        ticks = self.ticks or {}
        return ticks.get(position) or ticks.get(round(float(position))) or f"{position:g}"

    def cover(self, low: Number, high: Number) -> None:
        """Widens the axis so that it shows two values."""
        start, end = self.domain or (low, high)
        self.domain = min(start, low), max(end, high)


class Panel:
    """Rows of marks on two axes. Values of a `horizontal` panel lie along the x axis; `width` and `height` are pixels
    in print.
    """

    def __init__(
        self, x: Axis, y: Axis, title: str = "", horizontal: bool = False, width: int = 250, height: int = 230
    ):
        self.x, self.y, self.title, self.horizontal = x, y, title, horizontal
        self.width, self.height = width, height
        self.series: dict[str, Series] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.estimates: list[Estimate] = []
        self.scheme: Scheme | None = None

    def means(self, series: Series, points: Iterable[Point], joined: bool = False, band: bool = False) -> None:
        """Adds means with intervals, as whiskers or a `band`; means may be `joined` by a line."""
        part = len(self.rows.get("means", ()))
        for point in points:
            if not np.isfinite(point.estimate.mean):
                continue
            self.series.setdefault(series.label, series)
            self.estimates.append(point.estimate)
            low, high = _ends(point.estimate)
            shared = {"series": series.label, "part": part, "position": short(point.position), "at": self._at(point)}
            style = {"line": (2 if series.dashed else 1) if joined else 0, "band": band}
            values = {"value": short(point.estimate.mean), "low": low, "high": high}
            self.add("means", shared | _description(point) | values | style)
            for seed, value in point.seeds.items():
                if np.isfinite(value):
                    self.add("seeds", shared | {"value": short(value), "seed": int(seed)})

    def bars(self, series: Series, points: Iterable[Point], thickness: float, whiskers: bool = True) -> None:
        """Adds bars from `start` to `start` + mean, with intervals at their ends; a hollow series has outlines."""
        for point in points:
            if not np.isfinite(point.estimate.mean):
                continue
            self.series.setdefault(series.label, series._replace(shape="square"))
            self.estimates.append(point.estimate)
            low, high = _ends(point.estimate) if whiskers else (None, None)
            edges = {
                "low": None if low is None else short(point.start + low),
                "high": None if high is None else short(point.start + high),
            }
            sides = {
                "from": point.position - thickness / 2,
                "to": point.position + thickness / 2,
                "position": point.position,
            }
            ends = {"start": short(point.start), "end": short(point.start + point.estimate.mean)}
            row = {"series": series.label, "at": self._at(point)} | _description(point) | sides | ends | edges
            self.add("outlines" if series.hollow else "bars", row)

    def cells(self, scheme: Scheme, cells: Iterable[tuple[float, float, Number, dict[str, Any]]]) -> None:
        """Adds unit cells of (x, y, value, fields); fields are `label` in the cell, and at, text, n and note for a
        pointer.
        """
        self.scheme = scheme
        for x, y, value, fields in cells:
            box = {"x": x - 0.5, "x2": x + 0.5, "y": y - 0.5, "y2": y + 0.5, "cx": x, "cy": y, "value": short(value)}
            self.add("cells", {"label": "", "bright": scheme.is_dark(value)} | box | fields)

    def image(self, values: np.ndarray, scheme: Scheme | None = None) -> None:
        """Adds a picture, a unit for each cell: a matrix in the colours of a scheme, or pixels (uint8 [rows, columns,
        3]).
        """
        pixels = values if scheme is None else scheme.colours(values)
        self.scheme = scheme
        box = {"x": -0.5, "x2": pixels.shape[1] - 0.5, "y": -0.5, "y2": pixels.shape[0] - 0.5}
        self.add("images", box | {"url": picture(pixels)} | ({} if scheme is None else {"value": scheme.domain[1]}))

    def picture(self, pixels: np.ndarray) -> None:
        """Adds a picture that fills the axes: uint8 [rows, columns, 3], the first row at the top."""
        assert self.x.domain and self.y.domain
        (left, right), (bottom, top) = self.x.domain, self.y.domain
        box = {"x": short(left), "x2": short(right), "y": short(top), "y2": short(bottom)}
        self.add("images", box | {"url": picture(pixels)})

    def line(
        self, x: Iterable[Number], y: Iterable[Number], colour: str = INK, dash: Sequence[int] = (), width: float = 1.0
    ) -> None:
        """Adds a line without marks: a fitted line, or values that a theorem predicts."""
        part = 1 + max((row["part"] for row in self.rows.get("lines", ())), default=-1)
        for order, (left, height) in enumerate(zip(x, y, strict=True)):
            if np.isfinite(left) and np.isfinite(height):
                point = {"x": short(left), "y": short(height), "order": order}
                self.add("lines", point | {"part": part, "colour": colour, "dash": [*dash], "width": width})

    def segments(self, ends: Iterable[tuple[Number, Number, Number, Number]]) -> None:
        """Adds straight lines from (x, y) to (x2, y2)."""
        for x, y, x2, y2 in ends:
            self.add("segments", {"x": x, "y": y, "x2": x2, "y2": y2})

    def area(self, x: Iterable[Number], low: Iterable[Number], high: Iterable[Number]) -> None:
        """Adds a grey band behind all marks."""
        for left, bottom, top in zip(x, low, high, strict=True):
            self.add("areas", {"x": short(left), "y": short(bottom), "y2": short(top)})

    def rule(self, axis: str, value: Number, dash: Sequence[int] = (), label: str = "", faint: bool = False) -> None:
        """Adds a line across the panel at a value of the x or y axis; that of y may have a label at its right end."""
        if np.isfinite(value):
            self.add("rules", {"axis": axis, "value": short(value), "dash": [*dash], "faint": faint})
            if label:
                self.text(label, "right", value, align="right", dy=-2)

    def dots(
        self, series: Series, x: Iterable[Number], y: Iterable[Number], size: float = 14, notes: Sequence[str] = ()
    ) -> None:
        """Adds points without intervals, with notes for a pointer."""
        self.series.setdefault(series.label, series)
        for left, height, note in zip(x, y, notes or itertools.repeat(""), strict=bool(notes)):
            self.add("dots", {"series": series.label, "x": short(left), "y": short(height), "size": size, "note": note})

    def text(self, text: str, x: Number | str, y: Number | str, **style: Any) -> None:
        """Adds text at a position; x may be left or right, y top or bottom. `style` is that of Vega-Lite's text
        marks.
        """
        self.add("texts", {"text": text, "x": x, "y": y, "style": style})

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """Adds a row of one kind of mark."""
        self.rows.setdefault(kind, []).append(row)

    def _at(self, point: Point) -> str:
        return point.at or (self.y if self.horizontal else self.x).name_of(point.position)


def _description(point: Point) -> dict[str, Any]:
    mean, low, high, n = point.estimate
    return {"text": digits.with_interval((mean, low, high)), "n": int(n), "note": point.note}


def _ends(estimate: Estimate) -> tuple[float | None, float | None]:
    sure = np.isfinite(estimate.low) and np.isfinite(estimate.high)
    return (short(estimate.low), short(estimate.high)) if sure else (None, None)


def short(value: Any) -> float:
    """Returns a number with five digits."""
    return float(f"{float(value):.5g}")
