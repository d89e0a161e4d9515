"""The gap between the frozen and the learned router, decomposed at every value of a swept key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from routed.analysis import diagnosis, statistics
from routed.analysis.plots.chart import Chart
from routed.analysis.plots.frame import Data
from routed.analysis.plots.kind import Plot
from routed.analysis.plots.panels import INK, Axis, Panel, Point, Series
from routed.analysis.plots.scales import label_of, set_value_axes
from routed.contracts import Column
from routed.engine.rows import format_value

#: Colour of each step of `diagnosis.PATH`, by the arm that the step ends at.
COLOURS = {"frozen_sharp": "#E69F00", "frozen_data": "#009E73", "learned": "#0072B2"}
#: Names of the comparisons beside the path, but for that with the oracle: it may be e^15, and the table has it.
BESIDE = [name for name, *_ in diagnosis.BESIDE if "oracle" not in name]
#: Looks of these comparisons.
LOOKS = (("circle", INK), ("triangle-up", "#56B4E9"), ("square", "#999999"), ("diamond", "#5A2A00"))


def gap(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the steps of the gap at every value of `x`, and beside them other comparisons on the same scale."""
    if spec["x"] not in data.swept:
        return None
    path, tables = steps(spec, data), _gaps(spec, data)
    if not path.rows.get("bars"):
        return None
    path.title = "steps that add up to the whole gap"
    beside = Panel(_groups(spec["x"], [*tables]), Axis(), "the whole, and other comparisons", width=260)
    for i, name in enumerate(BESIDE):
        rows = {index: table[table.part == name] for index, table in enumerate(tables.values()) if len(table)}
        rows = {index: part.iloc[0] for index, part in rows.items() if len(part)}
        if rows:
            arms = next(iter(rows.values())).arms
            label = f"{name}: {arms}" if name.startswith("whole") else f"not a part: {name}, {arms}"
            shape, colour = LOOKS[i % len(LOOKS)]
            points = [Point(index + 0.18 * (i - 1), _estimate(part)) for index, part in rows.items()]
            beside.means(Series(label, colour, shape), points)
    beside.rule("y", 0)
    chart = Chart([path, beside])
    set_value_axes(chart, chart.panels, Column(""))
    cover_bars(chart.panels)
    path.y.label = beside.y.label = "log(first loss / second loss)\nabove 0: the second is lower"
    return chart


def steps(spec: dict[str, Any], data: Data) -> Panel:
    """Returns the panel of the steps of `diagnosis.gap` at every value of `x`: each starts where the step before it
    ends.
    """
    tables = _gaps(spec, data)
    panel = Panel(_groups(spec["x"], [*tables]), Axis("log(frozen / learned), step by step"), width=280)
    for index, (value, table) in enumerate(tables.items()):
        start = 0.0
        path = table[~table.part.isin([name for name, *_ in diagnosis.BESIDE])] if len(table) else table
        for i, (_, part) in enumerate(path.iterrows()):
            position = index + 0.26 * (i - (len(path) - 1) / 2)
            series = Series(f"{part.part}: {part.arms}", COLOURS[part.arms.split(" / ")[1]])
            panel.bars(series, [Point(position, _estimate(part), format_value(value), part.note, start=start)], 0.24)
            start += part["mean"]
    panel.rule("y", 0)
    return panel


def _estimate(part: pd.Series) -> statistics.Estimate:
    return statistics.Estimate(part["mean"], part.low, part.high, part.n)


def cover_bars(panels: Sequence[Panel]) -> None:
    """Widens the y axes of panels so that bars that begin where others end are seen."""
    rows = [row for panel in panels for row in panel.rows.get("bars", ())]
    ends = [row[name] for row in rows for name in ("start", "end", "low", "high") if row[name] is not None]
    for panel in panels if ends else ():
        panel.y.cover(1.05 * min(ends), 1.05 * max(ends))


def _gaps(spec: dict[str, Any], data: Data) -> dict[Any, pd.DataFrame]:
    """Returns the decomposed gap at every value of `x`, empty where arms are missing."""
    return {value: diagnosis.gap(rows) for value, rows in data.at_point(data.last, spec).groupby(spec["x"])}


def _groups(key: str, values: list[Any]) -> Axis:
    ticks = {float(index): format_value(value) for index, value in enumerate(values)}
    return Axis(label_of(key), (-0.5, len(values) - 0.5), ticks=ticks, grid=False)


GAP = Plot(
    gap,
    "Log ratios of loss, paired by seed, with 95 % t intervals. Left: each step takes one confound away and"
    " starts where the step"
    " before it ends; the last ends at the whole gap. Right: the whole gap, and comparisons that are no part of it.",
    required={"x": "swept key on the x axis"},
)
