"""Metrics against a number, both in logarithms, each with its power: panels of lines of sides (kind `powers`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from routed.analysis import statistics
from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Point, Series
from routed.analysis.plots.frame import PALETTE, SHAPES
from routed.analysis.plots.kind import swept_in
from routed.analysis.plots.scales import dodge, set_value_axes, sweep_axis
from routed.contracts import Column
from routed.papers.pham2024.powers import fitted


def powers(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns a panel for each of `panels`: means over seeds, the line fitted to their logarithms, and its slope.

    Dotted, where `bound` names a power: that power through the first line's first mean.
    """
    tables = {
        label: {name: table for name, sides in lines.items() if (table := _table(sides, data)).size}
        for label, lines in spec["panels"].items()
    }
    chart = Chart([])
    for label, lines in tables.items():
        if not lines:
            continue
        axis, positions = sweep_axis(
            spec["words"], sorted({float(x) for table in lines.values() for x in table}), width=300
        )
        panel = Panel(axis, Axis(), width=300, height=260)
        for index, (name, dodged) in enumerate(dodge(axis, positions, [*lines]).items()):
            _add_line(panel, index, name, lines[name], dodged, spec.get("bound"))
        set_value_axes(chart, [panel], Column(label, log=True), label)
        chart.panels.append(panel)
    return chart if chart.panels else None


def _add_line(
    panel: Panel, index: int, name: str, table: pd.DataFrame, dodged: Mapping[float, float], bound: float | None
) -> None:
    """Adds means with intervals, the fitted line with its slope, and the bound through the first line's first mean."""
    means = {float(x): statistics.estimate(table[x].dropna(), bounds=(0, None)) for x in table}
    means = {x: mean for x, mean in means.items() if mean.n and mean.mean > 0}
    numbers, fit = np.array([*means]), fitted(table)
    series = Series(name, PALETTE[index], SHAPES[index])
    panel.means(series, [Point(dodged[x], mean, f"{x:g}") for x, mean in means.items()])
    if fit is not None:
        panel.line(numbers, np.exp(fit.height) * numbers**fit.slope.mean, colour=series.colour)
        slope = "slope {:.2f} [{:.2f}, {:.2f}]".format(*fit.slope[:3])
        panel.text(slope, "left", "bottom", align="left", dx=2, dy=-4 - 11 * index, color=series.colour)
    if bound is not None and not index and means:
        heights = next(iter(means.values())).mean * (numbers / numbers[0]) ** bound
        panel.line(numbers, heights, dash=(2, 3))
        panel.text(f"slope {bound:g}", numbers[-1], heights[-1], align="right", baseline="top", dy=4)


def _table(sides: Mapping[float, Mapping[str, Any]], data: Data) -> pd.DataFrame:
    """Returns the values of each side at its number, a row for each seed."""
    columns = {}
    for number, side in sides.items():
        rows = data.last[(data.last.status == "ok") & (data.last.arm == side["arm"])]
        for key in data.swept:
            rows = rows[rows[key] == side.get(key, data.base[key])]
        if len(rows) and side["metric"] in rows:
            columns[number] = rows.set_index("seed")[side["metric"]]
    return pd.DataFrame(columns)


POWERS_PLOT = Plot(
    powers,
    "Means over seeds with 95 % intervals; lines: least squares on the logarithms of the means, slopes with 95 %"
    " percentile intervals of a bootstrap over seeds; dotted: the power that was foretold.",
    required={
        "panels": "label of a panel -> name of a line -> number -> arm, metric and settings of a side",
        "words": "label of the number",
    },
    optional={"bound": "power of the dotted line"},
    axes=swept_in,
)
