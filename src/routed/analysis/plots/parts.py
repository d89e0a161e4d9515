"""The loss of every arm as a sum of its parts (routed.metrics.regret)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.plots.frame import SHADES, Data, legend
from routed.analysis.plots.marks import Marks, Point, by_seed, intervals, keep
from routed.analysis.plots.scales import FLOOR, KEYS
from routed.engine.rows import shown
from routed.plan.arms import ARMS, REFERENCE

#: Column -> its words in the legend; drawn one after the other.
PARTS = {
    "regret/partition": "partition",
    "regret/estimation": "estimation of the experts",
    "regret/gate": "weights of the gate",
}
GATE, PREDICTED = "regret/gate", "regret/predicted"

#: An axis ends at so many times the learned arm's loss: sums need a linear one, and a loss ten times as long would hide the others.
ROOM = 2.5

#: A part of the gate that is a smaller share of the axis is rounding.
THIN = 0.002


def parts(spec: dict[str, Any], data: Data) -> Figure | None:
    """Stacked bars, a line an arm, a panel a value of the swept key `x` (one panel without it): parts, measured and predicted loss."""
    rows = data.at_point(data.last, spec)
    if not {*PARTS, data.loss} <= {*rows}:
        return None
    rows = rows[(rows.status == "ok") & rows[[*PARTS]].notna().all(axis=1)]
    arms = [arm for arm in ARMS if arm in set(rows.arm) and arm in spec.get("arms", ARMS)]
    if not arms:
        return None
    key = spec["x"] if spec.get("x") in data.swept else None
    groups: dict[Any, pd.DataFrame] = dict(iter(rows.groupby(key))) if key else {None: rows}
    figure = Figure(figsize=(2.9 * len(groups) + 2.1, 0.34 * len(arms) + 1.5))
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for panel, (value, here) in zip(panels, groups.items(), strict=True):
        _stack(panel, here, arms, data.loss)
        if key:
            panel.set_title(f"{KEYS.get(key, key)} = {shown(value)}", fontsize=9)
        panel.set_xlabel("loss (1 = trivial)")
        panel.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(arms)), [ARMS[arm].label for arm in arms], fontsize=8)
    panels[0].set_ylim(len(arms) - 0.5, -0.5)
    legend(figure, *panels)
    return figure


def _stack(panel, rows: pd.DataFrame, arms: list[str], loss: str) -> None:
    """The bars of a panel, each with its loss; one that is longer than the axis also says of which parts it is made."""
    means = rows.groupby("arm")[[*PARTS, loss]].mean()
    end = 1.25 * min(means[loss].max(), ROOM * means[loss].get(REFERENCE, means[loss].median()))
    panel.set_xlim(0, end)
    for place, arm in enumerate(arms):
        mine = rows[rows.arm == arm]
        if not len(mine):
            continue
        start, reach = 0.0, 0.0
        for colour, (column, words) in zip(SHADES, PARTS.items(), strict=False):
            size = means.loc[arm, column]
            # The last part may be below 0 and then lies on the others: an outline. Most arms have none.
            style: dict[str, Any] = (
                {"fill": False, "hatch": "/////", "edgecolor": colour} if column == GATE else {"color": colour}
            )
            if column != GATE or abs(size) > THIN * end:
                panel.barh(place, size, 0.72, left=start, lw=0.8, label=words, **style)
                one = statistics.estimate(mine[column])
                keep(
                    panel,
                    Marks("bars", words, colour, [Point(place, one, ARMS[arm].label, start=start)], horizontal=True),
                )
            start += size
            reach = max(reach, start)
        measured = statistics.estimate(mine[loss])
        cut = measured.mean > end
        if not cut:
            style = {"color": "black", "marker": "D", "ms": 3.5, "capsize": 2.5, "lw": 1, "ls": ""}
            seeds = by_seed(mine, loss)
            intervals(panel, [Point(place, measured, ARMS[arm].label, seeds)], "measured loss", style, horizontal=True)
        predicted = mine[PREDICTED].mean() if PREDICTED in mine else np.nan
        if predicted <= end:
            style = {"marker": "o", "ms": 6.5, "mfc": "none", "mec": "black", "mew": 1, "ls": ""}
            panel.plot(predicted, place, label="predicted for experts trained on a frozen copy", **style)
        marks = [one for one in (*measured[:3], predicted) if one <= end]
        reach, box = max(reach, *marks, 0.0), {"boxstyle": "round,pad=0.15", "color": "white"}
        text = _number(measured.mean)
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7}
        if cut:
            sizes = [size for size in means.loc[arm, [*PARTS]] if abs(size) > THIN]
            signed = "".join(f" {'-' if size < 0 else '+'} {_number(abs(size))}" for size in sizes)
            text += f" = {signed.removeprefix(' + ')}"
            panel.annotate(text, (end, place), (-2, 0), ha="right", bbox=box, **beside)
        elif reach > 0.85 * end:  # no room behind it
            left = min(one for one in marks if one > measured.mean - 0.2 * end)
            panel.annotate(text, (left, place), (-7, 0), ha="right", bbox=box, **beside)
        else:
            panel.annotate(text, (reach, place), (6, 0), ha="left", **beside)


def _number(value: float) -> str:
    """Three digits; below `FLOOR`, where nothing is seen, that."""
    return f"{value:#.3g}" if value >= FLOOR else f"< {FLOOR:g}"
