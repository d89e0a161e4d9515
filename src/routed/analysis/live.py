"""Drawn figures as Vega-Lite specs, a panel each, from what `plots.marks` kept on them: nothing is shown that is not printed.

A spec's parameters are `off` (labels that are switched off) and `seeds` (single seeds are shown); report.js sets them. Values are
rounded to four digits, as they are for reading; results.parquet has all.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import vl_convert
from matplotlib.figure import Figure

from routed.analysis import digits
from routed.analysis.plots.marks import Marks, Point, kept
from routed.contracts import Column, UserError
from routed.system import files

#: Rows of single seeds that a panel holds at most; beyond them it shows means alone.
MOST_SEEDS = 1500

#: matplotlib's markers as Vega's.
SHAPES = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "<": "triangle-left",
    ">": "triangle-right", "X": "M-.9-.5L-.5-.9L0-.4L.5-.9L.9-.5L.4 0L.9.5L.5.9L0 .4L-.5.9L-.9.5L-.4 0Z",
    "p": "M0-.9L.86-.28L.53.73L-.53.73L-.86-.28Z", "h": "M0-.9L.78-.45L.78.45L0 .9L-.78.45L-.78-.45Z",
    "*": "M0-1L.25-.3L1-.3L.4.15L.6.9L0 .45L-.6.9L-.4.15L-1-.3L-.25-.3Z",
}  # fmt: skip


@functools.cache
def library() -> str:
    """The JavaScript of Vega, Vega-Lite and Vega-Embed in one piece, which takes seconds to make and is kept in ~/.cache/routed."""
    kept_at = (
        pathlib.Path("~/.cache/routed").expanduser() / f"vega-{importlib.metadata.version('vl-convert-python')}.js"
    )
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return kept_at.read_text("utf-8")
    made = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    with contextlib.suppress(OSError, UserError):  # without a home each process makes it
        kept_at.parent.mkdir(parents=True, exist_ok=True)
        files.write(kept_at, made)
    return made


def panels(figure: Figure, columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """The panels of a drawn figure that have marks: heading, what it measures, and spec. Empty where a panel shows others: it would be left out."""
    if any(panel.containers and not kept(panel) for panel in figure.axes):
        return []
    drawn = [panel for panel in figure.axes if kept(panel)]
    known = {" ".join(column.label.split()): column.definition for column in columns.values()}
    found = []
    for panel in drawn:
        along = "x" if kept(panel)[0].horizontal else "y"
        words = " ".join((panel.get_xlabel() if along == "x" else _shared(panel)).split())
        title = " ".join(panel.get_title().split())
        definition = known.get(words) or next((text for name, text in known.items() if words.startswith(name)), "")
        heading = f"{title}: {words}" if title and words else title or words
        found.append({"heading": heading, "definition": definition, "spec": spec(panel)})
    return found


def _shared(panel) -> str:
    """The label of a panel's y axis, or of the one to its left with which it shares it."""
    for other in (panel, *panel.get_shared_y_axes().get_siblings(panel)):
        if other.get_ylabel():
            return other.get_ylabel()
    return ""


def legend(figure: Figure) -> list[dict[str, str]]:
    """The labels of a figure with their colours, each once, in the order in which they were drawn."""
    found = {marks.label: marks.colour for panel in figure.axes for marks in kept(panel) if marks.kind != "cells"}
    return [{"label": label, "colour": colour} for label, colour in found.items()]


def has_seeds(figure: Figure) -> bool:
    """Has a figure single seeds to show? A panel with more than `MOST_SEEDS` shows none."""
    counts = [sum(len(point.seeds) for marks in kept(panel) for point in marks.points) for panel in figure.axes]
    return any(0 < count <= MOST_SEEDS for count in counts)


def spec(panel) -> dict[str, Any]:
    """One panel as a Vega-Lite spec, on the axes that it has in print."""
    marks = kept(panel)
    axes = {"x": _axis(panel, "x"), "y": _axis(panel, "y")}
    rows: dict[str, list[dict[str, Any]]] = {"means": [], "seeds": [], "bars": [], "cells": []}
    for number, one in enumerate(marks):
        for point in one.points:
            _add(rows, number, one, point, axes)
    if len(rows["seeds"]) > MOST_SEEDS:
        rows["seeds"] = []
    horizontal = marks[0].horizontal
    if horizontal:
        axes["x"]["channel"]["axis"]["title"] = None  # it is the panel's heading
    layers = _references(panel, marks)
    layers += _bars(horizontal) if rows["bars"] else []
    layers += _cells(panel) if rows["cells"] else []
    layers += _seeds(horizontal, any(one.joined for one in marks)) if rows["seeds"] else []
    layers += _means(horizontal) if rows["means"] else []
    labels = {one.label: one for one in marks if one.kind != "cells"}
    colours = {"domain": [*labels], "range": [one.colour for one in labels.values()]}
    shapes = {"domain": [*labels], "range": [SHAPES.get(one.marker, "circle") for one in labels.values()]}
    for layer in layers:
        channels = layer["encoding"]
        for axis in ("x", "y"):
            if axis in channels:
                channels[axis] |= axes[axis]["channel"]
        if channels.get("color", {}).get("field") == "g":
            channels["color"] |= {"scale": colours, "legend": None}
        if "shape" in channels:
            channels["shape"] |= {"scale": shapes, "legend": None}
    lines = len({point.place for one in marks for point in one.points}) if horizontal else 0
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container", "height": max(240, 17 * lines), "autosize": {"type": "fit", "contains": "padding"},
        "params": [{"name": "off", "value": []}, {"name": "seeds", "value": False}],
        "datasets": {name: some for name, some in rows.items() if some}, "layer": layers,
    }  # fmt: skip


def _add(rows: dict[str, list], number: int, one: Marks, point: Point, axes: Mapping[str, Any]) -> None:
    """The rows of a point in the data sets of a spec."""
    mean, low, high, n = point.estimate
    shared = {
        "g": one.label,
        "k": number,
        "m": _short(mean),
        "t": digits.with_interval((mean, low, high)),
        "n": int(n),
        "w": point.words,
    }
    if one.kind == "cells":
        x, y = point.place  # type: ignore[misc]
        star = "*" if low > 0 or high < 0 else ""
        rows["cells"].append(
            shared
            | {"x": x - 0.5, "x2": x + 0.5, "y": y - 0.5, "y2": y + 0.5, "cx": x, "cy": y, "s": f"{mean:+.2f}{star}"}
        )
        return
    place = _short(point.place)
    at = {"p": place, "at": point.at or _name(place, axes["y" if one.horizontal else "x"]["names"])}
    if one.kind == "bars":
        width = 0.36 if one.horizontal else 0.12
        start = point.start or 0.0
        sure = np.isfinite(low) and np.isfinite(high)
        reach = {"l": _short(start + low), "h": _short(start + high)} if sure else {"l": None, "h": None}
        rows["bars"].append(
            shared
            | at
            | {"p1": place - width, "p2": place + width, "a": _short(start), "b": _short(start + mean)}
            | reach
        )
        return
    ends_of = (
        {"l": _short(low), "h": _short(high)} if np.isfinite(low) and np.isfinite(high) else {"l": None, "h": None}
    )
    rows["means"].append(shared | at | ends_of | {"j": int(one.joined) + int(one.joined and one.dashed)})
    rows["seeds"] += [
        {"g": one.label, "k": number, "p": place, "at": at["at"], "v": _short(value), "s": int(seed)}
        for seed, value in point.seeds.items()
        if np.isfinite(value)
    ]


def _name(place: float, names: Mapping[float, str]) -> str:
    """The tick at a place, or beside which it stands, as marks of one line do; else the number."""
    return names.get(place) or names.get(float(round(place))) or f"{place:g}"


def _short(value: Any) -> float:
    return float(f"{float(value):.4g}")


def _axis(panel, name: str) -> dict[str, Any]:
    """A channel with the scale, ticks and words of a panel's axis, and the names of its places."""
    axis = getattr(panel, f"{name}axis")
    limits = [float(end) for end in getattr(panel, f"get_{name}lim")()]
    low, high = sorted(limits)
    places = [float(at) for at in axis.get_majorticklocs() if low <= at <= high]
    ticks = [*zip(places, axis.get_major_formatter().format_ticks(places), strict=True)] if places else []
    shown: dict[str, Any] = {
        "title": None if name == "y" else " ".join(axis.get_label_text().split()) or None,
        "grid": name == "y",
    }
    named = {_short(at): text for at, text in ticks if text}
    if ticks:
        shown["values"] = [_short(at) for at, _ in ticks]
    if named:
        words = {f"{at:g}": text for at, text in named.items()}
        shown |= {
            "labelExpr": f"({_literal(words)})[format(datum.value, '.6~g')] || ''",
            "labelLimit": 190,
            "labelOverlap": True,
        }
    if not ticks:
        shown |= {"values": [], "domain": name == "x"}
    scale: dict[str, Any] = {"domain": [low, high], "nice": False}
    scale |= {"type": "log"} if axis.get_scale() == "log" else {"zero": False}
    scale |= {"reverse": True} if limits[0] > limits[1] else {}
    return {"channel": {"type": "quantitative", "scale": scale, "axis": shown}, "names": named}


def _literal(words: Mapping[str, str]) -> str:
    """A dict as an object of Vega's expressions, whose numbers `format` writes with a proper minus."""
    quote = lambda text: "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", " ") + "'"  # noqa: E731
    return "{" + ", ".join(f"{quote(key.replace('-', '−'))}: {quote(text)}" for key, text in words.items()) + "}"


def _ways(horizontal: bool) -> tuple[str, str]:
    """The channels of the place and of the value."""
    return ("y", "x") if horizontal else ("x", "y")


ON = {"filter": "indexof(off, datum.g) < 0"}


def _tip(*fields: tuple[str, str]) -> list[dict[str, str]]:
    return [{"field": field, "title": title} for field, title in fields]


TOLD = (("g", "shows"), ("at", "at"), ("t", "mean [95 %]"), ("n", "n"), ("w", "note"))


def _means(horizontal: bool) -> list[dict[str, Any]]:
    place, value = _ways(horizontal)
    colour, data = {"field": "g"}, {"name": "means"}
    line: dict[str, Any] = {"data": data, "mark": {"type": "line", "strokeWidth": 1.5, "clip": True}}
    both = {place: {"field": "p"}, value: {"field": "m"}, "color": colour}
    return [
        *(
            line | {"mark": line["mark"] | dash, "transform": [ON, {"filter": f"datum.j == {j}"}], "encoding": _copy(both) | {"detail": {"field": "k"}}}
            for j, dash in ((1, {}), (2, {"strokeDash": [5, 3]}))
        ),
        {
            "data": data, "transform": [ON, {"filter": "isValid(datum.l)"}], "mark": {"type": "rule", "strokeWidth": 1.5, "clip": True},
            "encoding": {place: {"field": "p"}, value: {"field": "l"}, f"{value}2": {"field": "h"}, "color": _copy(colour)},
        },
        {
            "data": data, "transform": [ON], "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1, "clip": True},
            "encoding": _copy(both) | {"shape": {"field": "g"}, "tooltip": _tip(*TOLD)},
        },
    ]  # fmt: skip


def _seeds(horizontal: bool, joined: bool) -> list[dict[str, Any]]:
    place, value = _ways(horizontal)
    shared: dict[str, Any] = {"data": {"name": "seeds"}, "transform": [ON, {"filter": "seeds"}]}
    both = {place: {"field": "p"}, value: {"field": "v"}, "color": {"field": "g"}}
    tip = _tip(("g", "shows"), ("at", "at"), ("v", "value"), ("s", "seed"))
    lines: dict[str, Any] = shared | {
        "mark": {"type": "line", "strokeWidth": 0.7, "opacity": 0.45, "clip": True},
        "encoding": _copy(both) | {"detail": [{"field": "k"}, {"field": "s"}]},
    }
    points = shared | {
        "mark": {"type": "point", "size": 18, "opacity": 0.7, "clip": True},
        "encoding": both | {"tooltip": tip},
    }
    return [lines, points] if joined else [points]


def _bars(horizontal: bool) -> list[dict[str, Any]]:
    place, value = _ways(horizontal)
    channels = {
        place: {"field": "p1"},
        f"{place}2": {"field": "p2"},
        value: {"field": "a"},
        f"{value}2": {"field": "b"},
    }
    data, mark = {"name": "bars"}, {"type": "rect", "opacity": 0.85, "clip": True}
    return [
        {"data": data, "transform": [ON], "mark": mark, "encoding": channels | {"color": {"field": "g"}, "tooltip": _tip(*TOLD)}},
        {
            "data": data, "transform": [ON, {"filter": "isValid(datum.l)"}], "mark": {"type": "rule", "strokeWidth": 1.5, "clip": True},
            "encoding": {place: {"field": "p"}, value: {"field": "l"}, f"{value}2": {"field": "h"}},
        },
    ]  # fmt: skip


def _cells(panel) -> list[dict[str, Any]]:
    """Cells coloured as in print: 0 is white, and the panels of a figure share their scale."""
    shown = [kept(other) for other in panel.figure.axes]
    bound = max(
        abs(point.estimate.mean) for marks in shown for one in marks if one.kind == "cells" for point in one.points
    )
    data = {"name": "cells"}
    box = {"x": {"field": "x"}, "x2": {"field": "x2"}, "y": {"field": "y"}, "y2": {"field": "y2"}}
    colour = {
        "field": "m",
        "type": "quantitative",
        "scale": {"scheme": "redblue", "domain": [-(bound or 1), bound or 1]},
        "legend": None,
    }
    tip = _tip(("w", "at"), ("t", "advantage [95 %]"), ("n", "n"))
    return [
        {"data": data, "mark": "rect", "encoding": box | {"color": colour, "tooltip": tip}},
        {
            "data": data, "mark": {"type": "text", "fontSize": 10, "fill": "#000000", "stroke": "#ffffff", "strokeWidth": 2.5, "tooltip": None},
            "encoding": {"x": {"field": "cx"}, "y": {"field": "cy"}, "text": {"field": "s"}},
        },
        {"data": data, "mark": {"type": "text", "fontSize": 10, "fill": "#111111", "tooltip": None}, "encoding": {"x": {"field": "cx"}, "y": {"field": "cy"}, "text": {"field": "s"}}},
    ]  # fmt: skip


def _references(panel, marks: list[Marks]) -> list[dict[str, Any]]:
    """Lines that are no marks: zero, one expert, what a theorem predicts, a contour's end."""
    own = {line for bar in panel.containers if hasattr(bar, "has_yerr") for line in (bar.lines[0], *bar.lines[1])}
    labels, found = {one.label for one in marks}, []
    for line in panel.get_lines():
        if line in own or line.get_label() in labels or not len(line.get_xdata()):
            continue
        mark: dict[str, Any] = {"type": "line", "strokeWidth": 1, "clip": True}
        mark |= {"strokeDash": [2, 3]} if line.get_linestyle() == ":" else {}
        if line.get_transform() == panel.get_yaxis_transform():
            values, encoding = [{"y": float(line.get_ydata()[0])}], {"y": {"field": "y"}}
            mark["type"] = "rule"
        elif line.get_transform() == panel.get_xaxis_transform():
            values, encoding = [{"x": float(line.get_xdata()[0])}], {"x": {"field": "x"}}
            mark["type"] = "rule"
        elif line.get_transform() == panel.transData:
            values = [
                {"x": _short(x), "y": _short(y), "o": i}
                for i, (x, y) in enumerate(zip(line.get_xdata(), line.get_ydata(), strict=True))
            ]
            encoding = {"x": {"field": "x"}, "y": {"field": "y"}, "order": {"field": "o"}}
        else:
            continue
        found.append({"data": {"values": values}, "mark": mark, "encoding": encoding})
    return found


def _copy(channels: Mapping[str, Any]) -> dict[str, Any]:
    """Channels that may be changed alone."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in channels.items()}
