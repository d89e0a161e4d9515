"""Metrics of arms against a swept key, and against training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from routed.analysis import statistics
from routed.analysis.plots import scales
from routed.analysis.plots.chart import Chart
from routed.analysis.plots.frame import Data, arms_of, defined, note_undefined, point_of, series_of
from routed.analysis.plots.kind import Plot
from routed.analysis.plots.panels import Axis, Panel
from routed.analysis.plots.scales import are_numbers, dodge, label_of, padded, set_value_axes, sweep_axis, value_label
from routed.engine.rows import format_value

Spec = dict[str, Any]

#: Widest row of panels, in panels.
COLUMNS = 3

#: Label of the best prediction that ignores its input; column -> label of losses on the same rows of models of counts,
#: and of the least ones, which are drawn where they are known.
CONSTANT = "best constant"
COUNT_MODELS = {"eval/bigram": "bigram model", "eval/ngram": "5-gram model"}
FLOORS = {"eval/floor_blind": "least without the dialect", "eval/floor": "least possible"}


def curves(spec: Spec, data: Data) -> Chart | None:
    """Returns a panel for each metric against a swept key, with a line for each arm."""
    if spec["x"] not in data.swept:
        return None
    rows = data.at_point(data.last, spec)
    metrics = metrics_of(spec, rows)
    if not metrics:
        return None
    panels = [curve(spec | {"metrics": (metric,)}, data) for metric in metrics]
    return finished(panels, metrics, spec, rows, data, shared=all(data.axes[metric].log for metric in metrics))


def curve(spec: Spec, data: Data) -> Panel:
    """Returns the panel of one metric against a swept key, with its references (`Column.references`)."""
    (metric,), rows = spec["metrics"], data.at_point(data.last, spec)
    column, arms, values = data.axes[metric], arms_of(spec, rows), sorted(rows[spec["x"]].unique())
    if len(values) == 1:
        return _single_value(spec, rows, data)
    axis, positions = sweep_axis(spec["x"], values, spec.get("axis"))
    panel = Panel(axis, Axis())
    values_of = {arm: sorted(rows[rows.arm == arm][spec["x"]].unique()) for arm in arms}
    alone = {arm: some[0] for arm, some in values_of.items() if len(some) == 1}
    dodged = dodge(axis, positions, [arm for arm in arms if arm not in alone]) | _strip(panel, positions, alone)
    for arm in arms:
        points = [
            point_of(dodged[arm][value], group, metric, column, value_label(value, spec.get("axis")))
            for value, group in rows[rows.arm == arm].groupby(spec["x"])
        ]
        panel.means(series_of(arm), points, joined=are_numbers(positions))
    draw_references(panel, metric, rows, data, spec["x"], positions)
    return panel


def _single_value(spec: Spec, rows: pd.DataFrame, data: Data) -> Panel:
    """Returns the panel of a sweep's only value: arms stand side by side, where above one value they would hide each
    other.
    """
    (metric,), arms, value = spec["metrics"], arms_of(spec, rows), rows[spec["x"]].iloc[0]
    name = label_of(spec["x"])
    panel = Panel(Axis(f"arms at {name} = {format_value(value)}", (-0.7, len(arms) - 0.3), ticks={}), Axis())
    for index, arm in enumerate(arms):
        point = point_of(
            float(index), rows[rows.arm == arm], metric, data.axes[metric], f"{name} {format_value(value)}"
        )
        panel.means(series_of(arm), [point])
    draw_references(panel, metric, rows, data)
    return panel


def _strip(panel: Panel, positions: dict[Any, float], alone: dict[str, Any]) -> dict[str, dict[Any, float]]:
    """Places arms that ran at one value behind a line at the end of the axis, which says at which; returns their
    positions.
    """
    if not alone:
        return {}
    scale, inverse = (np.log, np.exp) if panel.x.log else (np.asarray, np.asarray)
    start, end = scale([min(positions.values()), max(positions.values())])
    at = lambda share: float(inverse(end + share * (end - start)))  # noqa: E731
    arms = sorted(alone, key=lambda arm: str(alone[arm]))
    dodged = {arm: at(0.14 + 0.07 * number) for number, arm in enumerate(arms)}
    panel.x.cover(min(positions.values()), at(0.14 + 0.07 * len(arms)))
    panel.rule("x", at(0.07), faint=True)
    for value in dict.fromkeys(alone.values()):
        group = [dodged[arm] for arm in arms if alone[arm] == value]
        panel.text(
            f"{format_value(value)} only", group[(len(group) - 1) // 2], "top", fontSize=8, dy=-6, align="center"
        )
    return {arm: {alone[arm]: position} for arm, position in dodged.items()}


def training(spec: Spec, data: Data) -> Chart | None:
    """Returns a panel for each metric against optimiser steps at the figure's point, with a line for each arm."""
    rows = data.at_point(data.table, spec)
    metrics = metrics_of(spec, rows)
    if not metrics:
        return None
    steps = {step: float(step) for step in sorted(rows.step.unique())}
    panels = []
    for metric in metrics:
        axis = Axis("optimiser steps", padded(min(steps), max(steps), share=0.06))
        panel = Panel(axis, Axis())
        dodged = dodge(axis, steps, arms_of(spec, rows))
        for arm, at in dodged.items():
            groups = rows[rows.arm == arm].groupby("step")
            points = [point_of(at[step], group, metric, data.axes[metric], f"step {step:g}") for step, group in groups]
            panel.means(series_of(arm), points, joined=True)
        draw_references(panel, metric, rows, data)
        panels.append(panel)
    chart = finished(panels, metrics, spec, rows, data, shared=False)
    for panel, metric in zip(panels, metrics, strict=True):
        if not data.axes[metric].log:
            _leave_out_start(panel, rows.groupby(["step", "arm"])[metric].mean().unstack("step"))
    return chart


def _leave_out_start(panel: Panel, means: pd.DataFrame) -> None:
    """Ends the y axis short of the values before training where these would take more than half of it, and says so.

    means: a column for each step, a row for each arm.
    """
    means = means.dropna(how="all")
    if means.shape[1] < 4 or means.columns[0] != 0 or not np.isfinite(means).all(axis=None):
        return
    start, during = means[0].mean(), means.drop(columns=0).to_numpy().ravel()
    rules = [row["value"] for row in panel.rows.get("rules", ())]
    late = [row for row in panel.rows["means"] if row["position"] > means.columns[1] / 2 and row["low"] is not None]
    ends = [row[end] for row in late for end in ("low", "high")]
    low, high = min(*during, *ends, *rules), max(*during, *ends, *rules)
    span = high - low
    if low - span <= start <= high + span:
        return
    panel.y.domain = low - 0.15 * span, high + 0.15 * span
    panel.text(f"before training: {start:.3g}", "right", "top", align="right", baseline="top", fontSize=8)


def metrics_of(spec: Spec, rows: pd.DataFrame) -> list[str]:
    """Returns the metrics of a figure that some arm of it has."""
    return defined(spec["metrics"], rows[rows.arm.isin(arms_of(spec, rows))])


def finished(
    panels: list[Panel], metrics: list[str], spec: Spec, rows: pd.DataFrame, data: Data, shared: bool
) -> Chart:
    """Returns the chart of panels of metrics, with axes that log panels may share."""
    chart = Chart(panels, columns=min(COLUMNS, len(panels)))
    note_undefined(chart, spec["metrics"], rows, data, spec.get("x", ""))
    for panel, metric in zip(panels, metrics, strict=True):
        set_value_axes(chart, [panel], data.axes[metric], data.axes[metric].label)
    if shared:
        low, high = zip(*(panel.y.domain for panel in panels if panel.y.domain), strict=True)
        for panel in panels:
            panel.y.domain = min(low), max(high)
    return chart


def draw_references(
    panel: Panel, metric: str, rows: pd.DataFrame, data: Data, key: str = "", positions: Mapping[Any, float] = {}
) -> None:
    """Draws the losses of models that need no network, and the column's references, by value of `key`.

    Beside means that are all below `FLOOR` a constant would leave no room for them.
    """
    parts = [rows[rows[key] == value] for value in positions] if positions else [rows]
    references = [_references(metric, part, data) for part in parts]
    hidden = data.axes[metric].log and all(estimate.mean < scales.FLOOR for estimate in panel.estimates)
    for label in dict.fromkeys(label for part in references for label in part if not (hidden and label == CONSTANT)):
        heights = [part.get(label, np.nan) for part in references]
        if len({*heights}) == 1:
            panel.rule("y", heights[0], dash=(2, 3), label=label)
            continue
        panel.line([*positions.values()], heights, dash=(2, 3))
        panel.estimates += [statistics.Estimate(height, np.nan, np.nan, 0) for height in heights]  # for the axis
        shown = np.flatnonzero(np.isfinite(heights))[-1]
        panel.text(label, [*positions.values()][shown], heights[shown], align="right", dy=-2)


def _references(metric: str, rows: pd.DataFrame, data: Data) -> dict[str, float]:
    """Returns what values of a metric are compared with at some rows: numbers, values of settings, other columns."""
    heights = {}
    for label, reference in data.axes[metric].references.items():
        if isinstance(reference, str):
            reference = rows[reference].iloc[0] if reference in data.swept else data.base[reference]
        heights[label] = float(reference)
    floors = [name for name in FLOORS if metric == data.loss and name in rows and rows[name].notna().any()]
    return heights | simple(rows, data, metric) | {FLOORS[name]: float(rows[name].mean()) for name in floors}


def simple(rows: pd.DataFrame, data: Data, metric: str = "") -> dict[str, float]:
    """Returns the value of a metric (the loss) for the best constant and for models of counts, at the rows' point."""
    point = {key: rows[key].iloc[:1].tolist()[0] for key in data.swept if len(rows) and rows[key].nunique() == 1}
    column, is_loss = data.column(metric or data.loss, point), metric in ("", data.loss)
    heights = {} if column is None or column.constant is None else {CONSTANT: column.constant}
    counted = [name for name in COUNT_MODELS if is_loss and name in rows and rows[name].notna().any()]
    return heights | {COUNT_MODELS[name]: float(rows[name].mean()) for name in counted}


CURVES = Plot(
    curves,
    "Means over seeds with 95 % intervals (geometric means on log axes).",
    required={"x": "swept key on the x axis", "metrics": "columns, a panel each"},
    optional={"arms": "arms that are drawn", "axis": "label and factor of the x axis in a paper's unit"},
)
TRAINING = Plot(
    training,
    "Means over seeds with 95 % intervals during training (geometric means on log axes).",
    required={"metrics": "columns, a panel each"},
    optional={"arms": "arms that are drawn"},
)
