"""Arms against a swept key that makes their steps dearer, paired with the reference arm of more steps and as much cost."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.plots.frame import Data, are_numbers, beside, finish, lay_out, legend, line, marker_of, mean
from routed.analysis.plots.marks import Point, intervals
from routed.plan.arms import ARMS, REFERENCE

#: The reference arm of equal cost, where arms stand beside each other: it may be among them with `steps` steps.
DEAR = "dear"


def equal_cost(spec: dict[str, Any], data: Data) -> Figure | None:
    """The first of `metrics` as the difference of each arm of `steps` steps from the reference of `dear[value]` steps at that value of `x`.

    Rows are those `at` a point. Of a metric with a log axis the log ratio. Below, the other metrics: means of the arms, and of that reference (black).
    """
    key, steps, metrics = spec["x"], spec["steps"], [one for one in spec["metrics"] if one in data.last]
    if key not in data.swept or "steps" not in data.swept or not metrics or not len(data.last):
        return None
    rows = data.last[data.last.status == "ok"]
    at = {other: value for other, value in spec.get("at", {}).items() if other in data.swept}
    for other, value in data.settled((key, "steps"), at).items():
        rows = rows[rows[other] == value]
    values = sorted(rows[key].unique())
    reference = rows[rows.arm == REFERENCE].set_index("seed")
    dear = {at: reference[(reference[key] == at) & (reference.steps == spec["dear"].get(at))] for at in values}
    if not any(len(runs) for runs in dear.values()):
        return None
    short = rows[rows.steps == steps]
    arms = [arm for arm in ARMS if arm in set(short.arm)]
    shift = beside(values, [*arms, DEAR])
    near = {arm: (place - (len(arms) - 1) / 2) / 30 for place, arm in enumerate(arms)}  # where shifts are none
    figure = Figure(figsize=(5.6, 1.2 + 2.5 * len(metrics)))
    panels = figure.subplots(len(metrics), 1, squeeze=False)[:, 0]
    for panel, metric in zip(panels, metrics, strict=True):
        places, column = lay_out(panel, key, values, spec.get("axis")), data.axes[metric]
        if metric == metrics[0]:
            for arm in arms:
                aside = (near if len(values) > 1 else shift)[arm]
                _differences(panel, arm, aside, short, dear, places, key, metric, column.log)
            panel.axhline(0, color="black", lw=0.8)
            words = (
                f"log({_of(arms)} / {ARMS[REFERENCE].label})"
                if column.log
                else f"{_of(arms)} minus {ARMS[REFERENCE].label}"
            )
            panel.set_ylabel(f"{column.label}:\n{words},\nof as many FLOPs, paired")
            continue
        for arm in arms:
            groups = short[short.arm == arm].groupby(key)
            here = [(places[at] + shift[arm], group) for at, group in groups]
            line(panel, arm, here, metric, column, are_numbers(places))
        points = [
            Point(places[at] + shift[DEAR], mean(runs[metric], column), seeds=runs[metric].to_dict())
            for at, runs in dear.items()
            if len(runs)
        ]
        _draw(panel, points, "#000000", "D", f"{ARMS[REFERENCE].label}, as many FLOPs")
        panel.set_ylabel(column.label)
        finish(panel, column)
    legend(figure, *panels)
    return figure


def _of(arms: list[str]) -> str:
    return "arm" if len(arms) > 1 else ARMS[arms[0]].label


def _differences(panel, arm: str, aside: float, rows, dear, places, key: str, metric: str, log: bool) -> None:
    """The paired differences of an arm, a little aside, so that intervals do not hide each other."""
    points = []
    for value, place in places.items():
        mine = rows[(rows.arm == arm) & (rows[key] == value)].set_index("seed")[metric]
        theirs = dear[value][metric].reindex(mine.index)
        gaps = (np.log(mine / theirs) if log else mine - theirs).dropna()
        moved = place * (1 + aside) if panel.get_xscale() == "log" else place + aside * len(places)
        points.append(Point(moved, statistics.estimate(gaps), seeds=gaps.to_dict(), at=f"{value}"))
    _draw(panel, points, ARMS[arm].colour, marker_of(arm), ARMS[arm].label)


def _draw(panel, points: list[Point], colour: str, marker: str, label: str) -> None:
    intervals(panel, points, label, {"color": colour, "marker": marker, "ms": 4, "capsize": 2, "lw": 1.2})
