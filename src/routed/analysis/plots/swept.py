"""Charts of swept keys that no figure of the file shows: everything against a key, and other charts at each of its
values.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from routed.analysis.paired_values import ANY_FAIR
from routed.analysis.plots.chart import Chart
from routed.analysis.plots.curves import curve, draw_references
from routed.analysis.plots.frame import SHAPES, Data, arms_of, defined, drawn, note_undefined, point_of, series_of
from routed.analysis.plots.gap import cover_bars, steps
from routed.analysis.plots.kind import Plot
from routed.analysis.plots.paired import advantage, advantage_label, paired_lines, rivals
from routed.analysis.plots.panels import INK, Axis, Panel, Point, Series
from routed.analysis.plots.scales import are_numbers, dodge, label_of, set_value_axes, sweep_axis
from routed.contracts import Column
from routed.engine.rows import format_value
from routed.plan.arms import ARMS, OWN, REFERENCE, UNTRAINED

#: Kind -> function that draws one metric on one panel, so that a chart can be shown at several values of a key.
ONTO = {"curves": curve, "gap": steps, "paired": paired_lines}

#: Panels beside each other, at most.
MOST = 6


def against(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the loss of all arms, the learned router's advantage, and dead experts, against the swept key `x`."""
    if spec["x"] not in data.swept:
        return None
    rows = data.at_point(data.last, spec)
    rows = rows[rows.status == "ok"]
    metrics = [name for name in (data.loss, "router/dead") if name in rows]
    shown_metrics = defined(metrics, rows)
    if not shown_metrics:
        return None
    chart = Chart([])
    values = sorted(rows[spec["x"]].unique())
    for metric in shown_metrics:
        axis, positions = sweep_axis(spec["x"], values, width=220)
        panel = Panel(axis, Axis(), width=220)
        for arm, dodged in dodge(axis, positions, arms_of({}, rows)).items():
            groups = rows[rows.arm == arm].groupby(spec["x"])
            points = [
                point_of(dodged[value], group, metric, data.axes[metric], format_value(value))
                for value, group in groups
            ]
            panel.means(series_of(arm), points, joined=are_numbers(positions))
        draw_references(panel, metric, rows, data, spec["x"], positions)
        set_value_axes(chart, [panel], data.axes[metric], data.axes[metric].label)
        chart.panels.append(panel)
    advantages = _advantages(chart, rows, spec["x"], values, data)
    chart.panels[1:1] = [advantages] if advantages.estimates else []
    note_undefined(chart, metrics, rows, data, spec["x"])
    return chart


def _advantages(chart: Chart, rows: pd.DataFrame, key: str, values: list[Any], data: Data) -> Panel:
    """Returns the panel of the advantages of the learned router over each frozen control, and of each own arm over
    learned, frozen and the fairest control, at every value of a key; the fairest control is named.
    """
    axis, positions = sweep_axis(key, values, width=220)
    panel = Panel(axis, Axis(), width=220)
    present, names = {*rows.arm}, (REFERENCE, UNTRAINED, ANY_FAIR)
    pairs = [(REFERENCE, control) for control in rivals(data)]
    pairs += [(arm, name) for arm in ARMS if arm in OWN & present for name in names if name in {*present, ANY_FAIR}]
    lines = dodge(axis, positions, pairs)
    for shape, (arm, control) in zip(itertools.cycle(SHAPES), lines, strict=False):
        points = []
        for value, position in lines[arm, control].items():
            estimate, name = advantage(rows[rows[key] == value], control, data, arm)
            points.append(Point(position, estimate, format_value(value), name or ""))
            if name is not None and name != control and np.isfinite(estimate.mean):
                panel.text(name.removeprefix("frozen_"), position, estimate.mean, align="left", dx=5, dy=-3, fontSize=8)
        colour = INK if arm == REFERENCE else ARMS[arm if control == ANY_FAIR else control].colour
        panel.means(Series(advantage_label(control, data, arm), colour, shape), points, joined=are_numbers(positions))
    panel.rule("y", 0)
    several = any(arm != REFERENCE for arm, _ in pairs)
    what = "other arms\nover an arm's" if several else "frozen controls\nover the learned router's"
    set_value_axes(chart, [panel], Column(""), f"loss of {what}, paired")
    return panel


def multiples(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the chart `of` at each of `values` of the swept key `over`, side by side on shared axes; a row for each
    metric.
    """
    of, over, values = spec["of"], spec["over"], spec["values"]
    if over not in data.swept:
        return None
    metrics = defined(of["metrics"], data.last) if "metrics" in of else [None]
    chart = Chart([], columns=len(values))
    for metric in metrics:
        part = of if metric is None else of | {"metrics": (metric,)}
        row = [ONTO[of["kind"]](part, data.only(over, value)) for value in values]
        column = Column("") if metric is None else data.axes[metric]
        label = row[0].y.label if metric is None else column.label
        set_value_axes(chart, row, column, label)
        cover_bars(row)
        for panel, value in zip(row, values, strict=True):
            panel.width, panel.height = 150, 170
            panel.title = f"{label_of(over)} = {format_value(value)}"
        chart.panels += row
    if not any(panel.estimates for panel in chart.panels):
        return None
    ends = [panel.x.domain for panel in chart.panels if panel.x.domain and panel.estimates]
    for panel in chart.panels:
        panel.x.domain = min(low for low, _ in ends), max(high for _, high in ends)
    note_undefined(chart, of.get("metrics", ()), data.last, data)
    return chart


AGAINST = Plot(
    against,
    "Against a swept key: the loss of every arm, the loss of controls over that of the learned router and of arms of"
    " your own (paired by seed; above 0 that arm is better; a name at a point: its fairest control), and dead experts;"
    " means with 95 % intervals.",
    required={"x": "swept key on the x axis"},
)
MULTIPLES = Plot(
    multiples,
    "",
    required={"of": "figure that is shown", "over": "swept key", "values": "values of `over`, a panel each"},
    optional={"left_out": "values of `over` that are not shown"},
    axes=lambda spec, data: [*drawn(spec), *drawn(spec["of"])],
)
