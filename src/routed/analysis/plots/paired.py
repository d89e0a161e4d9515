"""Differences from the learned arm, paired by seed: by arm, against a swept key, and by language."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.figure import Figure

from routed.analysis import paired_values, statistics
from routed.analysis.paired_values import ANY_FAIR, fair_gap
from routed.analysis.plots.frame import SHADES, Data, legend, marker_of
from routed.analysis.plots.marks import Point, intervals
from routed.analysis.plots.scales import are_numbers, beside, lay_out, told
from routed.plan.arms import ARMS, REFERENCE, is_control

#: Words of the labels of metrics that are better the lower they are.
LOSSES = ("loss", "bits", "error", "excess over", "perplexity")


def difference(rows: pd.DataFrame, arm: str, metric: str, log: bool = False) -> statistics.Estimate:
    """Mean of `metric` of the arm minus the learned one's (log: of their log ratio), paired by seed, with its 95 % t interval."""
    if log:
        return statistics.estimate(paired_values.paired(rows, arm, REFERENCE, metric))
    good = rows[rows.status == "ok"]
    if metric not in good:
        return statistics.estimate([])
    table = good.pivot_table(index="seed", columns="arm", values=metric)
    if arm not in table or REFERENCE not in table:
        return statistics.estimate([])
    return statistics.estimate((table[arm] - table[REFERENCE]).dropna())


def rivals(data: Data) -> list[str]:
    """What the learned router is compared with: all fair controls, or each frozen router where none is called fair."""
    arms = [arm for arm in ARMS if arm in set(data.last.arm)]
    if REFERENCE not in arms:
        return []
    return [ANY_FAIR] if any(ARMS[arm].fair for arm in arms) else [arm for arm in arms if is_control(arm)]


def advantage(rows: pd.DataFrame, control: str, data: Data) -> tuple[statistics.Estimate, str | None]:
    """What a control loses against the learned router at one point, paired by seed, and which control it is.

    log(control / learned) of a loss with a log axis, which may approach 0; control - learned of another (nats per token).
    """
    if control == ANY_FAIR:
        least = fair_gap(rows, data.loss, data.axes[data.loss].log)
        return (least.estimate, least.name) if least else (statistics.estimate([]), None)
    if not data.axes[data.loss].log:
        return difference(rows, control, data.loss), control
    return statistics.estimate(paired_values.paired(rows, control, REFERENCE, data.loss)), control


def advantage_words(control: str, data: Data) -> str:
    """The axis label of `advantage`; above 0 the learned router is better."""
    name = "fairest frozen control" if control == ANY_FAIR else control
    return f"log({name} / learned)" if data.axes[data.loss].log else f"{name} - learned (nats)"


def paired(spec: dict[str, Any], data: Data) -> Figure | None:
    """What the other arms lose against the learned router: a line an arm and value of `by`, against the swept key `x`.

    Without `x`, one place for each arm.
    """
    x, by = spec.get("x"), spec.get("by")
    arms = _arms(spec, data)
    if not arms or (x and x not in data.swept) or (by and by not in data.swept):
        return None
    figure = Figure(figsize=(5.4, 3.9) if x else (6.2, 0.5 * len(arms) + 1.4))
    panel = figure.subplots()
    if x:
        paired_lines(panel, spec, data)
        legend(figure, panel)
        return figure
    rows = data.at_point(data.last, spec)
    for place, arm in enumerate(arms):
        one = difference(rows, arm, spec["metric"], data.axes[spec["metric"]].log)
        style = {"marker": marker_of(arm), "color": ARMS[arm].colour, "capsize": 3, "ls": ""}
        intervals(panel, [Point(place, one)], ARMS[arm].label, style, horizontal=True)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(arms)), [ARMS[arm].label for arm in arms])
    panel.set_ylim(len(arms) - 0.5, -0.5)
    panel.xaxis.set_major_locator(ticker.MaxNLocator(6))  # more of three decimals run into each other
    column = data.axes[spec["metric"]]
    panel.set_xlabel(f"{column.label}:\n{less(arms, column.log)}, paired")
    return figure


def paired_lines(panel, spec: dict[str, Any], data: Data) -> bool:
    """The lines of `paired` against the swept key `x`; False when there are none."""
    rows, by, metric = data.at_point(data.last, spec), spec.get("by"), spec["metric"]
    values, log = (sorted(rows[by].unique()) if by else [None]), data.axes[metric].log
    places = lay_out(panel, spec["x"], sorted(rows[spec["x"]].unique()), spec.get("axis"))
    found: dict[tuple[str, Any], dict[Any, statistics.Estimate]] = {}
    for arm, value in itertools.product(_arms(spec, data), values):
        mine = rows if by is None else rows[rows[by] == value]
        pairs = {at: difference(mine[mine[spec["x"]] == at], arm, metric, log) for at in places}
        if any(np.isfinite(one.mean) for one in pairs.values()):
            found[arm, value] = pairs
    for (arm, value), stands in beside(panel, places, [*found]).items():
        points = [Point(stands[at], one, at=told(at, spec.get("axis"))) for at, one in found[arm, value].items()]
        name = ARMS[arm].label + ("" if by is None else f", {spec['words'][value]}")
        colour = ARMS[arm].colour if by is None else SHADES[values.index(value) % len(SHADES)]
        style = {"marker": marker_of(arm), "color": colour, "capsize": 3, "lw": 1.2, "ms": 4}
        style["ls"] = "-" if are_numbers(places) else ""
        intervals(panel, points, name, style)
    panel.axhline(0, color="black", lw=0.8)
    panel.set_ylabel(f"{data.axes[metric].label}:\n{less(list(dict.fromkeys(arm for arm, _ in found)), log)}, paired")
    return bool(found)


def less(arms: Sequence[str], log: bool) -> str:
    """Which less (log: over) which a difference is: of one arm by its name."""
    one, other = ARMS[arms[0]].label if len(arms) == 1 else "arm", ARMS[REFERENCE].label
    return "\n".join(textwrap.wrap(f"log({one} / {other})" if log else f"{one} minus {other}", 44))


def compared(metric: str, data: Data) -> str:
    """How a caption of differences in a metric begins."""
    label, log = " ".join(data.axes[metric].label.split()), data.axes[metric].log
    return f"{'Mean log ratio' if log else 'Mean difference'} of {label}: each arm {'over' if log else 'minus'}"


def above(metric: str, data: Data) -> str:
    """What a difference above 0 means; only of a loss and of what is better the higher it is, for better or worse."""
    column = data.axes[metric]
    worse = ", which is worse" if any(word in column.label for word in LOSSES) else ""
    return f"above 0 the arm's is higher{', which is better' if column.higher_is_better else worse}"


def _arms(spec: dict[str, Any], data: Data) -> list[str]:
    """The arms that are compared with the learned one: those that ran at the figure's point."""
    there = {*data.at_point(data.last, spec).arm} - {REFERENCE}
    return [arm for arm in ARMS if arm in there and arm in spec.get("arms", ARMS)]


def languages(spec: dict[str, Any], data: Data) -> Figure | None:
    """The paired difference of validation loss from the learned arm in each language, the largest first."""
    rows = data.at_point(data.last, spec)
    columns = [name for name in rows if name.startswith("eval/loss/") and rows[name].notna().any()]
    found = {name.rsplit("/", 1)[1]: difference(rows, spec["arm"], name) for name in columns}
    found = dict(sorted(found.items(), key=lambda item: -item[1].mean))
    if not found or not any(np.isfinite(one.mean) for one in found.values()):
        return None
    figure = Figure(figsize=(max(4.0, 0.3 * len(found) + 1.4), 3.4))
    panel = figure.subplots()
    colour = ARMS[spec["arm"]].colour
    points = [Point(place, one) for place, one in enumerate(found.values())]
    intervals(panel, points, ARMS[spec["arm"]].label, {"marker": "o", "ls": "", "capsize": 3, "color": colour})
    panel.axhline(0, color="black", lw=0.8)
    panel.set_xticks(range(len(found)), list(found))
    panel.set_xlabel("language")
    panel.set_ylabel(f"nats per token: {ARMS[spec['arm']].label}\nminus {ARMS[REFERENCE].label}, paired")
    return figure
