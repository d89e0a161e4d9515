"""What a swept key does, drawn from the rows alone: everything against it, and the file's own figures at each of its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from routed.analysis.plots.curves import curve, steps
from routed.analysis.plots.frame import MARKERS, Data, defined, legend, line, name_undefined
from routed.analysis.plots.marks import Point, intervals
from routed.analysis.plots.paired import advantage, advantage_words, paired_lines, rivals
from routed.analysis.plots.scales import KEYS, are_numbers, beside, finish, lay_out
from routed.engine.rows import shown
from routed.plan.arms import ARMS

#: kind of figure -> what draws it for one metric onto one panel, so that it can be shown at several values of a key.
ONTO = {"curves": curve, "gap": steps, "paired": paired_lines}

#: Panels beside each other, at most.
MOST = 6


def against(spec: dict[str, Any], data: Data) -> Figure | None:
    """The loss of all arms, what the frozen controls lose against the learned router, and dead experts, against the swept key `x`."""
    rows = data.at_point(data.last, spec)
    rows = rows[rows.status == "ok"]
    metrics = [name for name in (data.loss, "router/dead") if name in rows]
    wanted: list[str | None] = [*defined(metrics, rows)]
    if not wanted:
        return None
    wanted[1:1] = [None] if rivals(data) else []
    figure = Figure(figsize=(3.6 * len(wanted), 3.9))
    panels = figure.subplots(1, len(wanted), squeeze=False)[0]
    for panel, metric in zip(panels, wanted, strict=True):
        places = lay_out(panel, spec["x"], sorted(rows[spec["x"]].unique()))
        if metric is None:
            _advantages(panel, rows, spec["x"], places, data)
            continue
        arms = [arm for arm in ARMS if arm in set(rows.arm)]
        for arm, stands in beside(panel, places, arms).items():
            groups = rows[rows.arm == arm].groupby(spec["x"])
            line(
                panel,
                arm,
                [(stands[value], group) for value, group in groups],
                metric,
                data.axes[metric],
                are_numbers(places),
                {place: shown(value) for value, place in stands.items()},
            )
        panel.set_ylabel(data.axes[metric].label)
        finish(panel, data.axes[metric])
    name_undefined(figure, metrics, rows, data)
    legend(figure, *panels)
    return figure


def _advantages(panel, rows: pd.DataFrame, key: str, places: dict[Any, float], data: Data) -> None:
    """What each frozen control loses against the learned router at every value of a key; the fairest is named at each."""
    for marker, (control, stands) in zip(MARKERS, beside(panel, places, rivals(data)).items(), strict=False):
        names = {place: shown(value) for value, place in stands.items()}
        lost = {place: advantage(rows[rows[key] == value], control, data) for value, place in stands.items()}
        lost = {place: (estimate, arm) for place, (estimate, arm) in lost.items() if np.isfinite(estimate.mean)}
        style = {"color": "black", "marker": marker, "ms": 4, "capsize": 2, "lw": 1.2}
        style |= {"ls": "-" if are_numbers(places) else ""}
        points = [Point(place, estimate, arm or "", at=names[place]) for place, (estimate, arm) in lost.items()]
        intervals(panel, points, advantage_words(control, data), style)
        for place, (estimate, arm) in lost.items():
            if arm is not None and arm != control:
                words = {"textcoords": "offset points", "fontsize": 6.5, "rotation": 20}
                panel.annotate(arm.removeprefix("frozen_"), (place, estimate.mean), (3, 4), **words)
    panel.axhline(0, color="black", lw=0.8)
    panel.set_ylabel("what frozen controls lose\nagainst the learned router, paired")


def multiples(spec: dict[str, Any], data: Data) -> Figure | None:
    """The figure `of` at each of `values` of the swept key `over`, side by side on shared axes; a row a metric."""
    of, over, values = spec["of"], spec["over"], spec["values"]
    parts = [of | {"metrics": (one,)} for one in defined(of["metrics"], data.last)] if "metrics" in of else [of]
    if not parts:
        return None
    figure = Figure(figsize=(2.3 * len(values) + 0.6, 2.5 * len(parts) + 0.9))
    panels = figure.subplots(len(parts), len(values), squeeze=False, sharey="row")
    drawn = [
        ONTO[of["kind"]](panel, part, data.only(over, value))
        for part, line in zip(parts, panels, strict=True)
        for panel, value in zip(line, values, strict=True)
    ]
    for part, (first, *others) in zip(parts, panels, strict=True):
        for panel in (first, *others) if "metrics" in part else ():
            finish(panel, data.axes[part["metrics"][0]])
        for panel in others:
            panel.set_ylabel("")
    for panel in panels[:-1].flat:
        panel.set_xlabel("")
    for panel, value in zip(panels[0], values, strict=True):
        panel.set_title(f"{KEYS.get(over, over)} = {shown(value)}", fontsize=9)
    limits = np.array([panel.get_xlim() for panel in panels.flat if panel.has_data()])
    for panel in panels.flat if len(limits) else ():
        panel.set_xlim(limits.min(), limits.max())
    name_undefined(figure, of.get("metrics", ()), data.last, data)
    legend(figure, *panels.flat)
    return figure if any(drawn) else None
