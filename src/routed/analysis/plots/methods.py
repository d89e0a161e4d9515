"""Points side by side, a line each: methods by several metrics, and choices of a protocol by their gap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routed.analysis.paired_values import ANY_FAIR
from routed.analysis.plots.chart import Chart
from routed.analysis.plots.frame import Data, defined, mean, note_undefined, seeds_of, series_of
from routed.analysis.plots.kind import Plot
from routed.analysis.plots.paired import advantage
from routed.analysis.plots.panels import INK, Axis, Panel, Point, Series
from routed.analysis.plots.scales import label_of, set_value_axes
from routed.contracts import Column
from routed.engine.rows import at_base, format_value
from routed.plan.arms import ARMS, UNTRAINED
from routed.routers import ROUTERS

#: Pixels of a method's line, and between two arms of a method.
LINE, APART = 16, 9
#: Looks of methods whose router has nothing to learn, whatever their arm is called.
FIXED = Series("nothing to learn: fixed rule", INK, "diamond")


def methods(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns a panel for each metric with a line for each method, best first by the first metric of its learned
    (else frozen) arm.
    """
    rows_of = {name: data.at(point) for name, point in spec["methods"].items()}
    rows_of = {name: rows[rows.status == "ok"] for name, rows in rows_of.items() if len(rows)}
    if not rows_of:
        return None
    every = pd.concat(rows_of.values())
    metrics = defined(spec["metrics"], every)
    if not metrics:
        return None
    arms = [arm for arm in ARMS if arm in set(every.arm)]
    names = sorted(rows_of, key=lambda name: _rank(rows_of[name], arms, metrics[0], data.axes[metrics[0]]))
    arms_of = {name: [arm for arm in arms if (rows_of[name].arm == arm).any()] for name in names}
    heights = [max(LINE, APART * (len(arms_of[name]) + 1)) for name in names]
    centres = dict(zip(names, np.cumsum(heights) - np.array(heights) / 2, strict=True))
    chart = Chart([], columns=len(metrics) if len(metrics) < 5 else 3)
    order = sorted((arms.index(arm), _looks(spec, name, arm, data)) for name in names for arm in arms_of[name])
    for metric in metrics:
        ticks = {float(f"{centres[name]:.5g}"): name for name in names}
        axis = Axis("", (0, float(sum(heights))), ticks=ticks, reverse=True, all_labels=True)
        panel = Panel(Axis(), axis, horizontal=True, width=170, height=max(60, int(sum(heights))))
        panel.series = {series.label: series for _, series in order}
        for name in names:
            for i, arm in enumerate(arms_of[name]):
                rows = rows_of[name][rows_of[name].arm == arm]
                position = centres[name] + APART * (i - (len(arms_of[name]) - 1) / 2)
                point = Point(position, _estimate(rows, metric, data.axes[metric]), name, seeds=seeds_of(rows, metric))
                panel.means(_looks(spec, name, arm, data), [point])
        set_value_axes(chart, [panel], data.axes[metric], " ".join(data.axes[metric].label.split()))
        chart.panels.append(panel)
    note_undefined(chart, spec["metrics"], every, data)
    return chart


def _estimate(rows: pd.DataFrame, metric: str, column: Column) -> Any:
    return mean(rows[metric] if metric in rows else pd.Series(dtype=float), column)


def _rank(rows: pd.DataFrame, arms: list[str], metric: str, column: Column) -> float:
    """Returns the mean of the first arm that has the metric, negative where higher is better."""
    means = (_estimate(rows[rows.arm == arm], metric, column).mean for arm in arms)
    best = next((value for value in means if np.isfinite(value)), np.nan)
    return np.inf if np.isnan(best) else -best if column.higher_is_better else best


def _looks(spec: dict[str, Any], name: str, arm: str, data: Data) -> Series:
    router = spec["methods"][name].get("router.name", data.base.get("router.name"))
    return FIXED if arm == UNTRAINED and router in ROUTERS and not ROUTERS[router].learns else series_of(arm)


def forest(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns a line for each point: log(frozen / learned) and log(fairest frozen / learned)."""
    if not data.swept or not len(data.last):
        return None
    points = data.last[data.swept].drop_duplicates().sort_values(data.swept)
    base = at_base(points, data.swept, data.base).iloc[0]
    points = points.iloc[(points != base).any(axis=1).argsort(kind="stable")]  # the protocol first
    protocol = "the protocol" if all(base[key] == data.base[key] for key in data.swept) else "the largest values"
    names: dict[float, str] = {}
    panel = Panel(Axis(), Axis(), horizontal=True, width=360, height=26 * len(points))
    looks = (
        (UNTRAINED, Series("against frozen", "#D55E00"), -0.12),
        (ANY_FAIR, Series("against the fairest frozen control", "#0072B2", "square"), 0.12),
    )
    for index, (_, point) in enumerate(points.iterrows()):
        rows = data.last[(data.last[data.swept] == point).all(axis=1)]
        changed = [f"{label_of(key)} = {format_value(point[key])}" for key in data.swept if point[key] != base[key]]
        names[float(index)] = ", ".join(changed) or protocol
        for control, series, offset in looks:
            estimate, arm = advantage(rows, control, data)
            panel.means(series, [Point(index + offset, estimate, names[index], arm or "")])
    panel.y = Axis("", (-0.5, len(names) - 0.5), ticks=names, reverse=True, all_labels=True)
    panel.rule("x", 0)
    chart = Chart([panel])
    set_value_axes(chart, [panel], Column(""), "log(frozen / learned) top-1 loss (right of 0: learned is better)")
    return chart


METHODS = Plot(
    methods,
    "Means over seeds with 95 % intervals (geometric means on log axes), best first by the first panel.",
    required={"methods": "name of a method -> settings of its point", "metrics": "columns, a panel each"},
)
FOREST = Plot(
    forest,
    "Mean paired log ratio of top-1 loss with 95 % t intervals; each line changes one choice of the protocol.",
    axes=lambda spec, data: sorted(data.own),
)
