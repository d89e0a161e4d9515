"""Differences from the learned arm, paired by seed: by arm, and against a swept key."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from routed.analysis import paired_values, statistics
from routed.analysis.paired_values import ANY_FAIR, fair_gap
from routed.analysis.plots.chart import Chart
from routed.analysis.plots.frame import COLOURS, Data, series_of, shape_of
from routed.analysis.plots.kind import Plot
from routed.analysis.plots.panels import Axis, Panel, Point, Series
from routed.analysis.plots.scales import are_numbers, dodge, set_value_axes, sweep_axis, value_label
from routed.contracts import Column
from routed.engine.rows import format_value
from routed.plan.arms import ARMS, REFERENCE, is_control, shown

#: Words in labels of metrics that are better the lower they are.
LOSSES = ("loss", "bits", "error", "excess over", "perplexity")


def difference(
    rows: pd.DataFrame, arm: str, metric: str, log: bool = False, reference: str = REFERENCE
) -> statistics.Estimate:
    """Returns the mean of an arm's metric minus the learned arm's (log: of their log ratio), paired by seed, with its
    t interval. Another arm may be the `reference`.
    """
    return statistics.estimate(paired_values.paired(rows, arm, reference, metric, log))


def rivals(data: Data) -> list[str]:
    """Returns the controls of the learned router: the fairest one, or each frozen router where none is called fair."""
    arms = [arm for arm in ARMS if arm in set(data.last.arm)]
    if REFERENCE not in arms:
        return []
    return [ANY_FAIR] if any(ARMS[arm].fair for arm in arms) else [arm for arm in arms if is_control(arm)]


def advantage(
    rows: pd.DataFrame, control: str, data: Data, arm: str = REFERENCE
) -> tuple[statistics.Estimate, str | None]:
    """Returns an arm's advantage over a control at one point, paired by seed, and the name of the control.

    log(control / arm) of a loss with a log axis; control - arm of any other (nats per token).
    """
    log = data.axes[data.loss].log
    if control == ANY_FAIR:
        least = fair_gap(rows, data.loss, log, arm)
        return (least.estimate, least.name) if least else (statistics.estimate([]), None)
    return difference(rows, control, data.loss, log, arm), control


def advantage_label(control: str, data: Data, arm: str = REFERENCE) -> str:
    """Returns the axis label of `advantage`; above 0 the arm is better."""
    name = "fairest frozen control" if control == ANY_FAIR else control
    return f"log({name} / {arm})" if data.axes[data.loss].log else f"{name} - {arm} (nats)"


def paired(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the other arms' differences from the learned router, against the swept key `x`, or by arm without it."""
    x, by = spec.get("x"), spec.get("by")
    arms = _arms(spec, data)
    if not arms or any(key and key not in data.swept for key in (x, by)) or spec["metric"] not in data.axes:
        return None
    column = data.axes[spec["metric"]]
    if x:
        panel = paired_lines(spec, data, width=380)
        chart = Chart([panel])
        label = panel.y.label
    else:
        ticks = {float(index): ARMS[arm].label for index, arm in enumerate(arms)}
        axis = Axis("", (-0.5, len(arms) - 0.5), ticks=ticks, reverse=True, all_labels=True)
        panel = Panel(Axis(), axis, horizontal=True, width=330, height=max(70, 30 * len(arms)))
        rows = data.at_point(data.last, spec)
        for index, arm in enumerate(arms):
            panel.means(series_of(arm), [Point(float(index), difference(rows, arm, spec["metric"], column.log))])
        panel.rule("x", 0)
        chart = Chart([panel], legend=False)
        label = f"{column.label}:\n{subtraction(arms, column.log)}, paired"
    set_value_axes(chart, [panel], Column(""), label)
    return chart


def paired_lines(spec: dict[str, Any], data: Data, width: int = 250) -> Panel:
    """Returns the panel of differences against the swept key `x`, with a line for each arm and value of `by`."""
    rows, by, metric = data.at_point(data.last, spec), spec.get("by"), spec["metric"]
    values, column = (sorted(rows[by].unique()) if by else [None]), data.axes[spec["metric"]]
    axis, positions = sweep_axis(spec["x"], sorted(rows[spec["x"]].unique()), spec.get("axis"), width)
    lines: dict[tuple[str, Any], dict[Any, statistics.Estimate]] = {}
    for arm, value in itertools.product(_arms(spec, data), values):
        some = rows if by is None else rows[rows[by] == value]
        pairs = {at: difference(some[some[spec["x"]] == at], arm, metric, column.log) for at in positions}
        if any(np.isfinite(estimate.mean) for estimate in pairs.values()):
            lines[arm, value] = pairs
    panel = Panel(axis, Axis(), width=width)
    for (arm, value), dodged in dodge(axis, positions, [*lines]).items():
        points = [
            Point(dodged[at], estimate, value_label(at, spec.get("axis"))) for at, estimate in lines[arm, value].items()
        ]
        suffix = "" if by is None else ", " + spec.get("words", {}).get(value, f"{by} = {format_value(value)}")
        label = ARMS[arm].label + suffix
        colour = ARMS[arm].colour if by is None else COLOURS[values.index(value) % len(COLOURS)]
        panel.means(Series(label, colour, shape_of(arm)), points, joined=are_numbers(positions))
    panel.rule("y", 0)
    arms = list(dict.fromkeys(arm for arm, _ in lines))
    panel.y.label = f"{column.label}:\n{subtraction(arms, column.log)}, paired" if arms else ""
    return panel


def subtraction(arms: Sequence[str], log: bool) -> str:
    """Returns the difference (log: ratio) that an axis shows; a single arm has its name."""
    minuend, subtrahend = ARMS[arms[0]].label if len(arms) == 1 else "arm", ARMS[REFERENCE].label
    return "\n".join(textwrap.wrap(f"log({minuend} / {subtrahend})" if log else f"{minuend} minus {subtrahend}", 44))


def compared(metric: str, data: Data) -> str:
    """Returns the beginning of a caption of differences in a metric."""
    label, log = " ".join(data.axes[metric].label.split()), data.axes[metric].log
    return f"{'Mean log ratio' if log else 'Mean difference'} of {label}: each arm {'over' if log else 'minus'}"


def above(metric: str, data: Data) -> str:
    """Returns the meaning of a difference above 0: better or worse of losses and of metrics that are better higher."""
    column = data.axes[metric]
    worse = ", which is worse" if any(word in column.label for word in LOSSES) else ""
    return f"above 0 the arm's is higher{', which is better' if column.higher_is_better else worse}"


def _arms(spec: dict[str, Any], data: Data) -> list[str]:
    """Returns the arms that ran at the figure's point, without the learned one."""
    present = {*data.at_point(data.last, spec).arm} - {REFERENCE}
    return [arm for arm in shown(spec.get("arms")) if arm in present]


def _caption(spec: dict[str, Any], data: Data) -> str:
    ends = f"paired by seed, with 95 % t intervals; {above(spec['metric'], data)}."
    return f"{compared(spec['metric'], data)} the learned router, {ends}"


PAIRED = Plot(
    paired,
    _caption,
    required={"metric": "column of which differences are shown"},
    optional={
        "x": "swept key on the x axis (without it: a line for each arm)",
        "by": "swept key with a line for each value",
        "words": "label of each value of `by`",
        "arms": "arms that are drawn",
        "axis": "label and factor of the x axis in a paper's unit",
    },
)
