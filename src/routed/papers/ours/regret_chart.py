"""The loss of every arm as a sum of its parts (routed.papers.ours.regret; kind `parts`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routed.analysis import statistics
from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Point, Series
from routed.analysis.plots.frame import arms_of, seeds_of
from routed.analysis.plots.scales import FLOOR, label_of
from routed.engine.rows import format_value
from routed.plan.arms import ARMS, REFERENCE

GATE, PREDICTED = "regret/gate", "regret/predicted"
#: Column -> looks of its part; parts are drawn one after the other. The gate's part may lie on the others: an outline.
PARTS = {
    "regret/partition": Series("partition", "#0072B2"),
    "regret/estimation": Series("estimation of the experts", "#E69F00"),
    GATE: Series("weights of the gate", "#009E73", hollow=True),
}
#: An axis ends at so many times the learned arm's loss: sums need a linear axis, and a loss ten times as long
#: would hide the others.
ROOM = 2.5
#: Symbol of a predicted loss, which other marks stay visible in.
PREDICTED_SERIES = Series(
    "predicted for experts trained on a frozen copy",
    "#CC79A7",
    "M-1,0A1,1,0,1,0,1,0A1,1,0,1,0,-1,0M-.65,0A.65,.65,0,1,1,.65,0A.65,.65,0,1,1,-.65,0",
)
#: Look of the numbers beside bars.
TEXT: dict[str, Any] = {"baseline": "middle", "fontSize": 8}
#: A part of the gate that is a smaller share of the axis is rounding.
THIN = 0.002


def parts(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns stacked bars, a line an arm and a panel a value of `x`: parts, measured and predicted loss."""
    rows = data.at_point(data.last, spec)
    if not {*PARTS, data.loss} <= {*rows}:
        return None
    rows = rows[(rows.status == "ok") & rows[[*PARTS]].notna().all(axis=1)]
    arms = arms_of(spec, rows)
    if not arms:
        return None
    key = spec["x"] if spec.get("x") in data.swept else None
    groups: dict[Any, pd.DataFrame] = dict(iter(rows.groupby(key))) if key else {None: rows}
    panels: list[Panel] = []
    for value, group in groups.items():
        ticks = {float(index): ARMS[arm].label for index, arm in enumerate(arms)}
        y = Axis("", (-0.5, len(arms) - 0.5), ticks=ticks, reverse=True, grid=False, all_labels=True)
        title = f"{label_of(key)} = {format_value(value)}" if key else ""
        panel = Panel(Axis("loss (1 = trivial)"), y, title, horizontal=True, width=230, height=26 * len(arms))
        _stack(panel, group, arms, data.loss)
        panels.append(panel)
    return Chart(panels, columns=3)


def _stack(panel: Panel, rows: pd.DataFrame, arms: list[str], loss: str) -> None:
    """Adds the bars of a panel with their losses; a bar longer than the axis says which parts it is made of."""
    means = rows.groupby("arm")[[*PARTS, loss]].mean()
    end = float(1.25 * min(means[loss].max(), ROOM * means[loss].get(REFERENCE, means[loss].median())))
    panel.x.domain = (0, 1.2 * end)
    for index, arm in enumerate(arms):
        some = rows[rows.arm == arm]
        if not len(some):
            continue
        start, reach = 0.0, 0.0
        for column, series in PARTS.items():
            size = means.loc[arm, column]
            if column != GATE or abs(size) > THIN * end:
                point = Point(float(index), statistics.estimate(some[column]), ARMS[arm].label, start=start)
                panel.bars(series, [point], 0.72, whiskers=False)
            start += size
            reach = max(reach, start)
        measured = statistics.estimate(some[loss])
        predicted = some[PREDICTED].mean() if PREDICTED in some else np.nan
        ends = [min(value, end) for value in (*measured[:3], predicted) if np.isfinite(value)]
        if measured.mean <= end:
            cut = measured._replace(high=min(measured.high, end))
            point = Point(float(index), cut, ARMS[arm].label, seeds=seeds_of(some, loss))
            panel.means(Series("measured loss", shape="diamond"), [point])
        if predicted <= end:
            panel.dots(PREDICTED_SERIES, [predicted], [index], 40)
        if measured.mean > end:
            text = _sum(measured.mean, means.loc[arm, [*PARTS]])
            panel.text(text, "right", index, align="right", dx=-2, **TEXT)
        else:
            right_of = min(max([reach, *ends, 0.0]), end)
            panel.text(_number(measured.mean), right_of, index, align="left", dx=7, **TEXT)


def _sum(total: float, sizes: pd.Series) -> str:
    """Returns a loss as the sum of its parts."""
    signed = "".join(f" {'-' if size < 0 else '+'} {_number(abs(size))}" for size in sizes if abs(size) > THIN)
    return f"{_number(total)} = {signed.removeprefix(' + ')}"


def _number(value: float) -> str:
    """Returns three digits, or "< FLOOR"."""
    return f"{value:#.3g}" if value >= FLOOR else f"< {FLOOR:g}"


PARTS_PLOT = Plot(
    parts,
    "The loss of every arm as a sum, means over seeds (routed.papers.ours.regret): the cost of its partition with the"
    " best experts, the distance of its experts from these, and the weights of its gate (outline; below 0 it lies on"
    " the others, back to the measured loss). Black: the measured loss with its 95 % t interval; ring: the loss of"
    " experts trained on a frozen copy of the partition, predicted from its cells and the number of samples (too low"
    " where the partition was learned from the same samples). A loss beyond the axis is written as a sum.",
    optional={"x": "swept key, a panel for each value", "arms": "arms that are drawn"},
)
