"""Arms against a swept key that makes their steps dearer, paired with the reference arm of more steps and as much cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.plots.frame import Data, defined, legend, line, marker_of, mean, name_undefined
from routed.analysis.plots.marks import Point, intervals
from routed.analysis.plots.paired import above, compared, less
from routed.analysis.plots.scales import are_numbers, beside, finish, lay_out, told
from routed.plan.arms import ARMS, REFERENCE

#: The reference arm of equal cost, where arms stand beside each other: it may be among them with `steps` steps.
DEAR = "dear"


def equal_cost(spec: dict[str, Any], data: Data) -> Figure | None:
    """The first of `metrics` as the difference of each arm of `steps` steps from the reference of `dear[value]` steps at that value of `x`.

    Rows are those `at` a point. Of a metric with a log axis the log ratio. Below, the other metrics: means of the arms, and of that reference (black).
    """
    key, steps = spec["x"], spec["steps"]
    if key not in data.swept or "steps" not in data.swept or not len(data.last):
        return None
    rows = data.last[data.last.status == "ok"]
    at = {other: value for other, value in spec.get("at", {}).items() if other in data.swept}
    for other, value in data.settled((key, "steps"), at).items():
        rows = rows[rows[other] == value]
    metrics, values = defined(spec["metrics"], rows), sorted(rows[key].unique())
    reference = rows[rows.arm == REFERENCE].set_index("seed")
    dear = {at: reference[(reference[key] == at) & (reference.steps == spec["dear"].get(at))] for at in values}
    if not metrics or not any(len(runs) for runs in dear.values()):
        return None
    short = rows[rows.steps == steps]
    arms = [arm for arm in ARMS if arm in set(short.arm)]
    figure = Figure(figsize=(5.6, 1.2 + 2.5 * len(metrics)))
    panels = figure.subplots(len(metrics), 1, squeeze=False)[:, 0]
    for panel, metric in zip(panels, metrics, strict=True):
        places, column = lay_out(panel, key, values, spec.get("axis")), data.axes[metric]
        stands, names = beside(panel, places, [*arms, DEAR]), {at: told(at, spec.get("axis")) for at in values}
        if metric == metrics[0]:
            for arm in arms:
                gaps = _gaps(short[short.arm == arm], dear, key, metric, column.log)
                points = [
                    Point(stands[arm][at], statistics.estimate(gap), seeds=gap.to_dict(), at=names[at])
                    for at, gap in gaps.items()
                ]
                _draw(panel, points, ARMS[arm].colour, marker_of(arm), ARMS[arm].label)
            panel.axhline(0, color="black", lw=0.8)
            panel.set_ylabel(f"{column.label}:\n{less(arms, column.log)},\nof as many FLOPs, paired")
            continue
        for arm in arms:
            groups = short[short.arm == arm].groupby(key)
            here = [(stands[arm][at], group) for at, group in groups]
            line(panel, arm, here, metric, column, are_numbers(places), {stands[arm][at]: names[at] for at in values})
        points = [
            Point(stands[DEAR][at], mean(runs[metric], column), seeds=runs[metric].to_dict(), at=names[at])
            for at, runs in dear.items()
            if len(runs)
        ]
        _draw(panel, points, "#000000", "D", f"{ARMS[REFERENCE].label}, as many FLOPs")
        panel.set_ylabel(column.label)
        finish(panel, column)
    ends = [panel.get_xlim() for panel in panels]
    for panel in panels:  # a value is below itself
        panel.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))
    name_undefined(figure, spec["metrics"], rows, data)
    legend(figure, *panels)
    return figure


def dearer(spec: dict[str, Any], data: Data) -> str:
    """The caption of `equal_cost`."""
    first, *others = defined(spec["metrics"], data.last)
    top = (
        f"{'Top: m' if others else 'M'}{compared(first, data)[1:]} the learned router that trained for more steps, with as many FLOPs as"
        f" competition at that value, paired by seed, with 95 % t intervals; {above(first, data)}."
    )
    return f"{top} Below: means over seeds with 95 % intervals." if others else top


def _gaps(rows: pd.DataFrame, dear: dict[Any, pd.DataFrame], key: str, metric: str, log: bool) -> dict[Any, pd.Series]:
    """The differences of an arm's rows from the reference at each value of the key, by seed."""
    found = {}
    for value, reference in dear.items():
        mine = rows[rows[key] == value].set_index("seed")[metric]
        theirs = reference[metric].reindex(mine.index)
        found[value] = (np.log(mine / theirs) if log else mine - theirs).dropna()
    return found


def _draw(panel, points: list[Point], colour: str, marker: str, label: str) -> None:
    intervals(panel, points, label, {"color": colour, "marker": marker, "ms": 4, "capsize": 2, "lw": 1.2})
