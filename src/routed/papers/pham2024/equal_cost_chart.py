"""Arms against a swept key that makes steps dearer, paired with the reference of equal cost (kind `equal_cost`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routed.analysis import statistics
from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Point, Series
from routed.analysis.plots.frame import arms_of, defined, note_undefined, point_of, series_of
from routed.analysis.plots.paired import above, compared, subtraction
from routed.analysis.plots.scales import are_numbers, dodge, set_value_axes, sweep_axis, value_label
from routed.contracts import Column
from routed.plan.arms import ARMS, REFERENCE

#: The reference arm of equal cost, beside the arms: it may be among them with `steps` steps.
DEAR = "dear"
DEAR_SERIES = Series(f"{ARMS[REFERENCE].label}, as many FLOPs", shape="diamond")


def equal_cost(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the difference of each arm of `steps` steps from the reference of `dear[value]` steps.

    It is that of the first of `metrics`, the log ratio if its axis is logarithmic. Panels of the other metrics show
    means of the arms and of that reference.
    """
    key, steps = spec["x"], spec["steps"]
    if key not in data.swept or "steps" not in data.swept or not len(data.last):
        return None
    rows = data.last[data.last.status == "ok"]
    at = {name: value for name, value in spec.get("at", {}).items() if name in data.swept}
    for name, value in data.settled((key, "steps"), at).items():
        rows = rows[rows[name] == value]
    metrics, values = defined(spec["metrics"], rows), sorted(rows[key].unique())
    reference = rows[rows.arm == REFERENCE].set_index("seed")
    dear = {at: reference[(reference[key] == at) & (reference.steps == spec["dear"].get(at))] for at in values}
    if not metrics or not any(len(runs) for runs in dear.values()):
        return None
    short = rows[rows.steps == steps]
    arms = arms_of({}, short)
    chart = Chart([], columns=2)
    for metric in metrics:
        axis, positions = sweep_axis(key, values, spec.get("axis"), 300)
        panel, column = Panel(axis, Axis(), width=300, height=170), data.axes[metric]
        dodged = dodge(axis, positions, [*arms, DEAR])
        names = {value: value_label(value, spec.get("axis")) for value in values}
        for arm in arms:
            some = short[short.arm == arm]
            if metric == metrics[0]:
                gaps = _gaps(some, dear, key, metric, column.log)
                points = [
                    Point(dodged[arm][value], statistics.estimate(gap), names[value], seeds=gap.to_dict())
                    for value, gap in gaps.items()
                ]
            else:
                points = [
                    point_of(dodged[arm][value], group, metric, column, names[value])
                    for value, group in some.groupby(key)
                ]
            panel.means(series_of(arm), points, joined=are_numbers(positions))
        if metric == metrics[0]:
            panel.rule("y", 0)
            set_value_axes(
                chart,
                [panel],
                Column(""),
                f"{column.label}:\n{subtraction(arms, column.log)},\nof as many FLOPs, paired",
            )
        else:
            points = [
                point_of(dodged[DEAR][value], runs.reset_index(), metric, column, names[value])
                for value, runs in dear.items()
                if len(runs)
            ]
            panel.means(DEAR_SERIES, points, joined=are_numbers(positions))
            set_value_axes(chart, [panel], column, column.label)
        chart.panels.append(panel)
    note_undefined(chart, spec["metrics"], rows, data)
    return chart


def caption(spec: dict[str, Any], data: Data) -> str:
    """Returns the caption."""
    first, *rest = defined(spec["metrics"], data.last)
    top = (
        f"{'First panel: m' if rest else 'M'}{compared(first, data)[1:]} the learned router that trained for"
        " more steps, with as many FLOPs"
        f" as competition at that value, paired by seed, with 95 % t intervals; {above(first, data)}."
    )
    return f"{top} Other panels: means over seeds with 95 % intervals." if rest else top


def _gaps(rows: pd.DataFrame, dear: dict[Any, pd.DataFrame], key: str, metric: str, log: bool) -> dict[Any, pd.Series]:
    """Returns the differences of an arm's rows from the reference at each value of the key, by seed."""
    gaps = {}
    for value, reference in dear.items():
        arm = rows[rows[key] == value].set_index("seed")[metric]
        base = reference[metric].reindex(arm.index)
        gaps[value] = (np.log(arm / base) if log else arm - base).dropna()
    return gaps


EQUAL_COST_PLOT = Plot(
    equal_cost,
    caption,
    required={
        "x": "swept key that makes steps dearer",
        "steps": "steps of the arms",
        "dear": "value of `x` -> steps of the reference with as many FLOPs",
        "metrics": "columns, a panel each; the first one as differences",
    },
    optional={"axis": "label and factor of the x axis in a paper's unit"},
    axes=lambda spec, data: [spec["x"], "steps"],
)
