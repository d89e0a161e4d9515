"""Named points over training (kind `series`), and the test samples of each cluster by expert (kind `dispatch`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Point, Series
from routed.analysis.plots.curves import COLUMNS
from routed.analysis.plots.frame import COLOURS, defined, mean, note_undefined
from routed.analysis.plots.pictures import Scheme
from routed.analysis.plots.scales import padded, set_value_axes
from routed.plan.arms import REFERENCE

#: Keys of figures of named points.
LINES = {"lines": "name of a line -> settings of its point"}
ARM = {"arm": "arm that is drawn (learned)"}


def series(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns a panel for each metric against optimiser steps, with a line for each named point."""
    arm = spec.get("arm", REFERENCE)
    rows_of = {name: data.at(point, data.table) for name, point in spec["lines"].items()}
    rows_of = {name: rows[(rows.status == "ok") & (rows.arm == arm)] for name, rows in rows_of.items() if len(rows)}
    every = pd.concat(rows_of.values()) if rows_of else data.table.iloc[:0]
    metrics = defined(spec["metrics"], every)
    if not metrics:
        return None
    chart = Chart([], columns=min(COLUMNS, len(metrics)))
    for metric in metrics:
        panel = Panel(Axis("optimiser steps", padded(0, float(every.step.max()), share=0.02)), Axis(), height=200)
        for i, (name, rows) in enumerate(rows_of.items()):
            points = [
                Point(float(step), mean(group[metric], data.axes[metric]), f"step {step}")
                for step, group in rows.groupby("step")
            ]
            colour = COLOURS[i if len(rows_of) <= 6 else i // 2 % 6]  # of many lines, neighbours share a colour
            panel.means(Series(name, colour, dashed=bool(i % 2)), points, joined=True, band=True)
        set_value_axes(chart, [panel], data.axes[metric], data.axes[metric].label)
        chart.panels.append(panel)
    note_undefined(chart, spec["metrics"], every, data)
    return chart


def arrays_of(spec: dict[str, Any], data: Data, *names: str) -> dict[str, list[np.ndarray]]:
    """Returns the arrays `names` of the base seed for each line that has them, of the learned or the spec's arm."""
    arrays = {}
    for line, point in spec["lines"].items():
        rows = data.at(point)
        for run in rows[rows.arm == spec.get("arm", REFERENCE)].run:
            if all(f"{run}/{name}" in data.heatmaps for name in names):
                arrays[line] = [data.heatmaps[f"{run}/{name}"] for name in names]
    return arrays


def dispatch(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns tables of the test samples of each cluster that go to each expert, before and after training."""
    arrays = arrays_of(spec, data, "counts")
    if not arrays:
        return None
    panels = []
    for name, (counts,) in arrays.items():
        scheme = Scheme("blues", (0, float(counts.sum(2).max())))
        for table, when in ((counts[0], "before"), (counts[-1], "after")):
            clusters, experts = table.shape
            x = Axis("expert", (-0.5, experts - 0.5), ticks={float(i): f"{i + 1}" for i in range(experts)}, grid=False)
            y = Axis(
                "cluster",
                (-0.5, clusters - 0.5),
                ticks={float(i): f"{i + 1}" for i in range(clusters)},
                reverse=True,
                grid=False,
            )
            panel = Panel(x, y, f"{name},\n{when} training", width=max(120, 32 * experts), height=24 * clusters)
            cells = [
                (
                    float(j),
                    float(i),
                    float(count),
                    {"label": f"{count}", "at": f"cluster {i + 1}, expert {j + 1}", "text": f"{count}"},
                )
                for (i, j), count in np.ndenumerate(table)
            ]
            panel.cells(scheme, cells)
            panels.append(panel)
    return Chart(panels, columns=2)


SERIES_PLOT = Plot(
    series,
    "Means over seeds with 95 % intervals (bands).",
    required=LINES | {"metrics": "columns, a panel each"},
    optional=ARM,
)
DISPATCH_PLOT = Plot(
    dispatch,
    "Test samples of each cluster (rows) that go to each expert (columns), learned router, base seed.",
    required=LINES,
    optional=ARM,
    alone=True,
)
