"""Charts as SVG, for light and for dark grounds, and as PNG."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import vl_convert

from routed.analysis.plots.chart import Chart
from routed.analysis.plots.layers import PARAMETERS, SCHEMA, layers, series_scales
from routed.analysis.plots.panels import Panel, Series
from routed.analysis.plots.pictures import recompressed

#: Pixels of a letter of a legend's label, and of an entry of the legend beside its label.
LETTER, ENTRY = 5.7, 28
#: Pixels of an axis beside a panel, and letters of a title in a pixel.
AXIS, TITLE_LETTERS = 62, 0.17
#: Resolution of a PNG over that of a screen.
PNG_SCALE = 2.0


def theme(dark: bool) -> dict[str, Any]:
    """Returns the Vega-Lite config for a light or a dark ground."""
    ink, soft, grid = ("#e8e8e6", "#b9bec4", "#363a40") if dark else ("#111111", "#333333", "#e2e2e2")
    axis = {"labelColor": soft, "titleColor": ink, "gridColor": grid, "domainColor": soft, "tickColor": soft}
    sizes = {"labelFontSize": 10, "titleFontSize": 11, "titleFontWeight": "normal"}
    return {
        "background": "transparent",
        "font": "Helvetica, Arial, sans-serif",
        "view": {"stroke": None},
        "axis": axis | sizes,
        "legend": {"labelColor": soft, "titleColor": ink, "titleLimit": 0} | sizes,
        "rule": {"color": ink},
        "line": {"color": ink},
        "text": {"color": soft},
        "title": {"color": soft, "fontSize": 11, "fontWeight": "normal"},
    }


def toned(colour: str) -> str:
    """Returns a colour for a dark ground: dark colours become lighter, in the same hue. report.js has the same rule."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    light = (0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2]) / 255
    share = 0.62 - light if light < 0.45 else 0
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def on_dark(spec: Any) -> Any:
    """Returns a spec whose series and marks have colours for a dark ground; colour scales of values stay."""
    if isinstance(spec, Mapping):
        fixed = {"datasets"} | ({"scale"} if spec.get("type") == "quantitative" else set())
        return {key: value if key in fixed else on_dark(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [on_dark(value) for value in spec]
    return toned(spec) if isinstance(spec, str) and re.fullmatch("#[0-9a-f]{6}", spec, re.IGNORECASE) else spec


def printed(chart: Chart, dark: bool = False) -> dict[str, Any]:
    """Returns the Vega-Lite spec of a whole chart: its title above, panels in rows, its legend below."""
    spec = dict(chart.spec) if chart.spec is not None else _concatenated(chart)
    spec = on_dark(spec) if dark else spec
    config = spec.get("config", {}) | theme(dark) | {"aria": False}  # which would double the size
    if chart.title:
        lines = textwrap.wrap(chart.title, max(40, int(TITLE_LETTERS * _width(chart))))
        spec["title"] = {"text": lines, "fontSize": 10.5, "anchor": "start", "offset": 8}
    return spec | {"config": config}


def _width(chart: Chart) -> int:
    """Returns the pixels of the widest row of panels."""
    columns = chart.columns or len(chart.panels) or 1
    rows = (chart.panels[first : first + columns] for first in range(0, len(chart.panels), columns))
    return max((sum(panel.width + AXIS for panel in row) for row in rows), default=400)


def _concatenated(chart: Chart) -> dict[str, Any]:
    columns = chart.columns or len(chart.panels)
    drawn: list[dict[str, Any]] = []
    datasets: dict[str, Any] = {}
    for number, panel in enumerate(chart.panels):
        repeats = number % columns > 0 and panel.y == chart.panels[number - 1].y
        built, rows = layers(_bare(panel) if repeats else panel, chart.series, number, seeds=False)
        datasets |= rows
        title = {"title": panel.title.split("\n")} if panel.title else {}
        drawn.append({"width": panel.width, "height": panel.height, "layer": built} | title)
    whole: dict[str, Any] = {"concat": drawn, "columns": columns, "spacing": 16}
    if chart.series and chart.legend:
        key, datasets["key"] = _legend(chart.series, _width(chart))
        whole = {"vconcat": [whole, key], "spacing": 12}
    return {"$schema": SCHEMA, "params": PARAMETERS, "datasets": datasets} | whole


def _bare(panel: Panel) -> Panel:
    """Returns a panel without the labels of its y axis, which the panel to its left has."""
    bare = copy.copy(panel)
    ticks = None if panel.y.ticks is None else dict.fromkeys(panel.y.ticks, "")
    bare.y = dataclasses.replace(panel.y, label="", ticks=ticks)
    return bare


def _legend(series: Mapping[str, Series], width: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the legend as a panel with its rows: Vega's legends lose colours where panels differ in series."""
    entry = LETTER * max(map(len, series)) + ENTRY
    columns = max(1, min(len(series), int(width // entry)))
    lines = -(-len(series) // columns)
    rows = [{"series": label, "x": entry * (i % columns), "y": i // columns} for i, label in enumerate(series)]
    size: dict[str, Any] = {
        "width": max(width - AXIS, int(entry * columns)),
        "height": 15 * lines,
        "view": {"stroke": None},
    }
    hidden = {"type": "quantitative", "axis": None}
    x = hidden | {"field": "x", "scale": {"domain": [-6, size["width"] - 6], "nice": False, "zero": False}}
    y = hidden | {"field": "y", "scale": {"domain": [lines - 0.5, -0.5], "nice": False, "zero": False}}
    symbols = {"type": "point", "filled": True, "size": 45, "opacity": 1}
    labels = {"type": "text", "align": "left", "dx": 9, "fontSize": 10.5}
    marks = [
        {"mark": symbols, "encoding": {"x": x, "y": y} | series_scales(series)},
        {"mark": labels, "encoding": {"x": x, "y": y, "text": {"field": "series"}}},
    ]
    return size | {"data": {"name": "key"}, "layer": marks}, rows


def svg(chart: Chart, dark: bool = False) -> str:
    """Returns the chart as SVG with text as text; the same rows give the same SVG.

    Vega numbers ids in one count for the whole process, and names roles of marks that a caption describes better.
    """
    text = vl_convert.vegalite_to_svg(json.dumps(printed(chart, dark), allow_nan=False))
    text = re.sub(r' (?:role|aria-\w+)="[^"]*"', "", text)
    numbers = {name: f"m{number}" for number, name in enumerate(re.findall(r'\bid="([^"]+)"', text))}
    return re.sub(r'(\bid="|url\(#|href="#)([^")]+)', lambda mark: mark[1] + numbers.get(mark[2], mark[2]), text)


def png(chart: Chart) -> bytes:
    """Returns the chart as PNG on white."""
    spec = printed(chart)
    spec["config"] |= {"background": "#ffffff"}
    return recompressed(vl_convert.vegalite_to_png(json.dumps(spec, allow_nan=False), scale=PNG_SCALE))
