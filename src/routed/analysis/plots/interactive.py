"""Charts as interactive panels of a page: a Vega-Lite spec for each panel, and the library that draws them.

The parameters of a spec are `off` (labels that are switched off) and `seeds` (single seeds are shown); report.js sets
them. Values have five digits, for reading; results.parquet has all.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import pathlib
from collections.abc import Mapping
from typing import Any

import vl_convert

from routed.analysis.plots.chart import Chart
from routed.analysis.plots.layers import MOST_SEEDS, PARAMETERS, SCHEMA, layers
from routed.analysis.plots.panels import Panel
from routed.contracts import Column, UserError
from routed.system import files


@functools.cache
def library() -> str:
    """Returns the JavaScript of Vega, Vega-Lite and Vega-Embed in one piece, which takes seconds to make:
    ~/.cache/routed keeps it.
    """
    version = importlib.metadata.version("vl-convert-python")
    path = pathlib.Path("~/.cache/routed").expanduser() / f"vega-{version}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8")
    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    with contextlib.suppress(OSError, UserError):  # without a home each process makes it
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text)
    return text


def panels(chart: Chart, columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """Returns heading, definition and spec of each panel; `columns` have the definitions of their labels."""
    if chart.spec is not None:
        params = {"params": [*chart.spec.get("params", []), *PARAMETERS]}
        width = {} if {"concat", "hconcat", "vconcat", "facet", "repeat"} & {*chart.spec} else {"width": "container"}
        return [{"heading": "", "definition": "", "spec": dict(chart.spec) | width | params}]
    definitions = {" ".join(column.label.split()): column.definition for column in columns.values()}
    drawn = []
    for panel in chart.panels:
        values = {"means", "bars", "outlines", "dots"} & {*panel.rows}
        label = " ".join((panel.x if panel.horizontal else panel.y).label.split()) if values else ""
        definition = definitions.get(label) or next(
            (text for name, text in definitions.items() if name and label.startswith(name)), ""
        )
        heading = ": ".join(filter(None, [", ".join(part.rstrip(",:") for part in panel.title.split("\n")), label]))
        drawn.append({"heading": heading, "definition": definition, "spec": spec(panel, chart, bool(label))})
    return drawn


def spec(panel: Panel, chart: Chart, headed: bool = True) -> dict[str, Any]:
    """Returns the spec of one panel, as wide as its container; the heading of a `headed` panel says what its values
    are.
    """
    shown = copy.copy(panel)
    if headed and panel.horizontal:
        shown.x = dataclasses.replace(panel.x, label="")
    elif headed:
        shown.y = dataclasses.replace(panel.y, label="")
    if panel.scheme:
        shown.scheme = panel.scheme._replace(below=True)
    built, rows = layers(shown, chart.series)
    height = panel.height if panel.horizontal or "cells" in panel.rows else max(240, panel.height)
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "params": PARAMETERS,
        "datasets": rows,
        "layer": built,
    }


def legend(chart: Chart) -> list[dict[str, str]]:
    """Returns the labels of a chart with their colours."""
    return [{"label": label, "colour": series.colour} for label, series in chart.series.items()]


def has_seeds(chart: Chart) -> bool:
    """True if a panel can show single seeds."""
    return any(0 < len(panel.rows.get("seeds", ())) <= MOST_SEEDS for panel in chart.panels)
