"""Vega-Lite layers of a panel, from back to front. Their parameters are `off` (series switched off) and `seeds`
(single seeds shown).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from routed.analysis.plots.panels import INK, Axis, Number, Panel, Series, short

Layer = dict[str, Any]
Scales = dict[str, Layer]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
#: Parameters that report.js sets: labels of series that are switched off, and whether single seeds are shown.
PARAMETERS = [{"name": "off", "value": []}, {"name": "seeds", "value": False}]
#: Rows of single seeds that a panel holds at most; a panel with more shows means alone.
MOST_SEEDS = 1500
#: Tooltip of a mean: field -> heading.
MEAN_TIP = {"series": "shows", "at": "at", "text": "mean [95 %]", "n": "n", "note": "note"}
#: Predicate of rows whose series is switched on.
ON = {"filter": "indexof(off, datum.series) < 0"}
#: Positions of text at the edges of a panel.
EDGES: dict[Any, Any] = {
    "left": {"value": 3},
    "right": {"value": "width"},
    "top": {"value": 3},
    "bottom": {"value": "height"},
}


def layers(
    panel: Panel, series: Mapping[str, Series], number: int = 0, seeds: bool = True
) -> tuple[list[Layer], dict[str, list[dict[str, Any]]]]:
    """Returns the layers of the panel with this number in its chart, and their rows by the names of data sets.

    `series` are all of the chart: Vega's panels share the scales of colours and shapes.
    """
    rows = {name: some for name, some in panel.rows.items() if name != "texts"}
    if not seeds or len(rows.get("seeds", ())) > MOST_SEEDS:
        rows.pop("seeds", None)
    built = []
    for name, build in BUILDERS.items():
        if name in rows:
            built += [{"data": {"name": f"{name}{number}"}} | layer for layer in build(panel, series_scales(series))]
    built += [_text(panel, **row) for row in panel.rows.get("texts", ())]
    return built, {f"{name}{number}": some for name, some in rows.items()}


def channel(panel: Panel, axis: str, field: str) -> Layer:
    """Returns the channel x or y of a field."""
    shown: Axis = getattr(panel, axis)
    scale: Layer = {"nice": False} | ({"type": "log"} if shown.log else {"zero": False})
    if shown.domain is not None:
        scale["domain"] = [float(end) for end in shown.domain]
    if shown.reverse:
        scale["reverse"] = True
    return {"field": field, "type": "quantitative", "scale": scale, "axis": _axis(shown)}


def _axis(axis: Axis) -> Layer:
    title = axis.label.split("\n") if axis.label else None
    if axis.ticks is None:
        plain = {"title": title, "grid": axis.grid, "labelExpr": "format(datum.value, ',.7~g')"}
        chosen = (
            {"values": log_ticks(*axis.domain)}
            if axis.log and axis.domain
            else {"tickCount": 5, "labelOverlap": "greedy"}
        )
        return plain | chosen
    positions, labels = [short(position) for position in axis.ticks], [*axis.ticks.values()]
    return {
        "title": title,
        "grid": axis.grid,
        "values": positions,
        "labelAngle": axis.angle,
        "labelLimit": 260,
        "labelOverlap": not axis.all_labels and "greedy",
        "labelExpr": labelled(positions, labels),
        "domain": bool(axis.label or labels),
    }


def log_ticks(low: Number, high: Number) -> list[float]:
    """Returns round numbers on a log axis: powers of ten over decades, more numbers over less."""
    steps = [1.0] if high / low >= 1000 else [1.0, 2.0, 5.0] if high / low > 4 else [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [short(step * 10**power) for power in powers for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) > 2:
        return ticks
    unit = 10 ** math.floor(math.log10(high - low))
    step = next(share * unit for share in (1, 0.5, 0.2) if (high - low) / (share * unit) > 2.5)
    return [short(step * count) for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def labelled(values: Sequence[float], labels: Sequence[str]) -> str:
    """Returns a Vega expression that names the values of ticks; a line break in a label stays one."""
    return f"{json.dumps(labels)}[indexof({json.dumps(values)}, datum.value)] || ''"


def series_scales(series: Mapping[str, Series]) -> Scales:
    """Returns the channels colour and shape of series."""
    labels = [*series]
    colours = {"domain": labels, "range": [entry.colour for entry in series.values()]}
    shapes = {"domain": labels, "range": [entry.shape for entry in series.values()]}
    shared = {"field": "series", "type": "nominal", "legend": None}
    return {"color": shared | {"scale": colours}, "shape": shared | {"scale": shapes}}


def tip(fields: Mapping[str, str]) -> list[Layer]:
    """Returns the channel of a tooltip: field -> heading."""
    return [{"field": field, "type": "nominal", "title": title} for field, title in fields.items()]


def _position(panel: Panel, field: str, second: str = "") -> Layer:
    axis = "y" if panel.horizontal else "x"
    return {axis: channel(panel, axis, field)} | ({f"{axis}2": {"field": second}} if second else {})


def _value(panel: Panel, field: str, second: str = "") -> Layer:
    axis = "x" if panel.horizontal else "y"
    return {axis: channel(panel, axis, field)} | ({f"{axis}2": {"field": second}} if second else {})


def _box(panel: Panel) -> Layer:
    return {"x": channel(panel, "x", "x"), "x2": {"field": "x2"}, "y": channel(panel, "y", "y"), "y2": {"field": "y2"}}


def _means(panel: Panel, scales: Scales) -> list[Layer]:
    rows = panel.rows["means"]
    both = _position(panel, "position") | _value(panel, "value") | {"color": scales["color"]}
    ends = _position(panel, "position") | _value(panel, "low", "high") | {"color": scales["color"]}
    built: list[Layer] = []
    if any(row["band"] for row in rows):
        areas = {"type": "area", "opacity": 0.18, "clip": True, "tooltip": None}
        built.append(
            {
                "transform": [ON, {"filter": "datum.band"}],
                "mark": areas,
                "encoding": ends | {"detail": {"field": "part"}},
            }
        )
    for style in sorted({row["line"] for row in rows} - {0}):
        mark = {"type": "line", "strokeWidth": 1.5, "clip": True} | ({"strokeDash": [5, 3]} if style == 2 else {})
        chosen = [ON, {"filter": f"datum.line == {style}"}]
        built.append({"transform": chosen, "mark": mark, "encoding": both | {"detail": {"field": "part"}}})
    whiskers = {"type": "rule", "strokeWidth": 1.4, "clip": True}
    built.append(
        {"transform": [ON, {"filter": "!datum.band && isValid(datum.low)"}], "mark": whiskers, "encoding": ends}
    )
    marks = {
        "type": "point",
        "filled": True,
        "size": 18 if any(row["band"] for row in rows) else 42,
        "opacity": 1,
        "clip": True,
    }
    return [
        *built,
        {"transform": [ON], "mark": marks, "encoding": both | {"shape": scales["shape"], "tooltip": tip(MEAN_TIP)}},
    ]


def _seeds(panel: Panel, scales: Scales) -> list[Layer]:
    both = _position(panel, "position") | _value(panel, "value") | {"color": scales["color"]}
    chosen = [ON, {"filter": "seeds"}]
    fields = tip({"series": "shows", "at": "at", "value": "value", "seed": "seed"})
    lines = {"type": "line", "strokeWidth": 0.7, "opacity": 0.45, "clip": True}
    points = {"type": "point", "size": 18, "opacity": 0.7, "clip": True}
    built: list[Layer] = [{"transform": chosen, "mark": points, "encoding": both | {"tooltip": fields}}]
    if any(row["line"] for row in panel.rows["means"]):
        detail = {"detail": [{"field": "part"}, {"field": "seed"}]}
        built.insert(0, {"transform": chosen, "mark": lines, "encoding": both | detail})
    return built


def _bars(panel: Panel, scales: Scales, outlined: bool = False) -> list[Layer]:
    box = _position(panel, "from", "to") | _value(panel, "start", "end")
    colour = {"stroke" if outlined else "color": scales["color"]}
    mark = {"type": "rect", "clip": True} | ({"filled": False, "strokeWidth": 1.6} if outlined else {"opacity": 0.85})
    whiskers = {"type": "rule", "strokeWidth": 1.4, "clip": True}
    ends = _position(panel, "position") | _value(panel, "low", "high")
    return [
        {"transform": [ON], "mark": mark, "encoding": box | colour | {"tooltip": tip(MEAN_TIP)}},
        {"transform": [ON, {"filter": "isValid(datum.low)"}], "mark": whiskers, "encoding": ends},
    ]


def _cells(panel: Panel, scales: Scales) -> list[Layer]:
    assert panel.scheme is not None
    fields = tip({"at": "at", "text": panel.scheme.title.partition("\n")[0] or "value", "n": "n", "note": "note"})
    colour = panel.scheme.channel("value")
    built: list[Layer] = [
        {"mark": {"type": "rect", "clip": True}, "encoding": _box(panel) | {"color": colour, "tooltip": fields}}
    ]
    centre = {
        "x": channel(panel, "x", "cx"),
        "y": channel(panel, "y", "cy"),
        "text": {"field": "label", "type": "nominal"},
    }
    for bright, ink in (("true", "white"), ("false", "black")):  # the same on a dark ground
        text = {"type": "text", "fontSize": 9, "color": ink, "tooltip": None, "lineBreak": "\n", "lineHeight": 10}
        chosen = [{"filter": f"datum.label != '' && datum.bright == {bright}"}]
        built.append({"transform": chosen, "mark": text, "encoding": centre})
    return built


def _images(panel: Panel, scales: Scales) -> list[Layer]:
    mark = {"type": "image", "aspect": False, "clip": True, "tooltip": None}
    built: list[Layer] = [{"mark": mark, "encoding": _box(panel) | {"url": {"field": "url", "type": "nominal"}}}]
    if panel.scheme is not None and panel.scheme.title:  # a picture has no legend: a mark that is not seen has one
        unseen = {"type": "point", "opacity": 0, "tooltip": None}
        centre = {"x": channel(panel, "x", "x"), "y": channel(panel, "y", "y"), "color": panel.scheme.channel("value")}
        built.append({"mark": unseen, "encoding": centre})
    return built


def _areas(panel: Panel, scales: Scales) -> list[Layer]:
    encoding = {"x": channel(panel, "x", "x"), "y": channel(panel, "y", "y"), "y2": {"field": "y2"}}
    return [
        {
            "mark": {"type": "area", "color": "#888888", "opacity": 0.25, "clip": True, "tooltip": None},
            "encoding": encoding,
        }
    ]


def _rules(panel: Panel, scales: Scales) -> list[Layer]:
    built = []
    for axis, dashed, faint in sorted({(row["axis"], bool(row["dash"]), row["faint"]) for row in panel.rows["rules"]}):
        mark = {"type": "rule", "strokeWidth": 1, "clip": True, "tooltip": None, "opacity": 0.35 if faint else 1}
        mark |= {"strokeDash": [2, 3]} if dashed else {}
        dashes = f"(length(datum.dash) > 0) == {json.dumps(dashed)}"
        same = f"datum.axis == '{axis}' && {dashes} && datum.faint == {json.dumps(faint)}"
        built.append({"transform": [{"filter": same}], "mark": mark, "encoding": {axis: channel(panel, axis, "value")}})
    return built


def _lines(panel: Panel, scales: Scales) -> list[Layer]:
    both = {
        "x": channel(panel, "x", "x"),
        "y": channel(panel, "y", "y"),
        "order": {"field": "order", "type": "quantitative"},
    }
    built = []
    for part, row in {row["part"]: row for row in panel.rows["lines"]}.items():
        mark = {"type": "line", "strokeWidth": row["width"], "clip": True, "tooltip": None}
        mark |= {"strokeDash": row["dash"]} if row["dash"] else {}
        mark |= {"color": row["colour"]} if row["colour"] != INK else {}
        built.append({"transform": [{"filter": f"datum.part == {part}"}], "mark": mark, "encoding": both})
    return built


def _segments(panel: Panel, scales: Scales) -> list[Layer]:
    return [{"mark": {"type": "rule", "strokeWidth": 1.6, "clip": True, "tooltip": None}, "encoding": _box(panel)}]


def _dots(panel: Panel, scales: Scales) -> list[Layer]:
    mark = {"type": "point", "filled": True, "size": panel.rows["dots"][0]["size"], "opacity": 0.9, "clip": True}
    both = {"x": channel(panel, "x", "x"), "y": channel(panel, "y", "y")}
    fields = {"tooltip": tip({"series": "shows", "note": "at"})}
    return [{"transform": [ON], "mark": mark, "encoding": both | scales | fields}]


def _text(panel: Panel, text: str, x: Number | str, y: Number | str, style: Layer) -> Layer:
    row = {axis: short(value) for axis, value in (("x", x), ("y", y)) if not isinstance(value, str)}
    at = {axis: channel(panel, axis, axis) if axis in row else EDGES[value] for axis, value in (("x", x), ("y", y))}
    mark = {
        "type": "text",
        "fontSize": 9,
        "baseline": "bottom",
        "text": text.split("\n"),
        "tooltip": None,
        "clip": False,
    }
    return {"data": {"values": [row]}, "mark": mark | style, "encoding": at}


#: Rows of a panel -> the function that builds their layers, from back to front.
BUILDERS = {
    "images": _images,
    "cells": _cells,
    "areas": _areas,
    "rules": _rules,
    "bars": _bars,
    "outlines": lambda panel, scales: _bars(panel, scales, outlined=True),
    "lines": _lines,
    "segments": _segments,
    "seeds": _seeds,
    "means": _means,
    "dots": _dots,
}
