"""Metrics against a swept key or against training steps, and the gap decomposed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.figure import Figure

from routed.analysis import diagnosis, statistics
from routed.analysis.plots.frame import MARKERS, SHADES, Data, defined, legend, line, name_undefined
from routed.analysis.plots.marks import Marks, Point, bars, intervals, keep
from routed.analysis.plots.scales import KEYS, REFERENCE_LINE, are_numbers, beside, finish, lay_out, told
from routed.engine.rows import shown
from routed.plan.arms import ARMS


def curves(spec: dict[str, Any], data: Data) -> Figure | None:
    """Metrics against a swept key, a panel each, a line an arm: geometric (log axis) or arithmetic means with 95 % intervals."""
    if spec["x"] not in data.swept:
        return None
    rows = data.at_point(data.last, spec)
    metrics = _metrics(spec, rows)
    if not metrics:
        return None
    figure, panels = _side_by_side(metrics, data, alike=True)
    name_undefined(figure, spec["metrics"], rows, data)
    for panel, metric in zip(panels, metrics, strict=True):
        curve(panel, spec | {"metrics": (metric,)}, data)
    return _finished(figure, panels, metrics, data)


def curve(panel, spec: dict[str, Any], data: Data) -> bool:
    """One metric against a swept key, with what it is compared with (`Column.references`); False when its rows are missing."""
    (metric,), rows = spec["metrics"], data.at_point(data.last, spec)
    if not _metrics(spec, rows):
        return False
    values = sorted(rows[spec["x"]].unique())
    if len(values) == 1:
        _arms_beside(panel, spec, rows, data)
        return True
    places = lay_out(panel, spec["x"], values, spec.get("axis"))
    for words, reference in data.axes[metric].references.items():
        heights = [_height(reference, rows[rows[spec["x"]] == value], data) for value in places]
        panel.plot(list(places.values()), heights, color="black", lw=0.8, ls=":", label=REFERENCE_LINE)
        place = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 7}
        panel.annotate(words, (max(places.values()), heights[-1]), (0, 1), **place)
    arms = {arm: rows[rows.arm == arm].groupby(spec["x"]) for arm in _arms(spec, rows)}
    alone = {arm: next(iter(groups))[0] for arm, groups in arms.items() if len(groups) == 1}
    strip = _strip(panel, places, alone)
    stands = beside(panel, places, [arm for arm in arms if arm not in alone])
    for arm, groups in arms.items():
        at = {alone[arm]: strip[arm]} if arm in alone else stands[arm]
        names = {place: told(value, spec.get("axis")) for value, place in at.items()}
        here = [(at[value], group) for value, group in groups]
        line(panel, arm, here, metric, data.axes[metric], are_numbers(places), names)
    panel.set_ylabel(data.axes[metric].label)
    return True


def _arms_beside(panel, spec: dict[str, Any], rows: pd.DataFrame, data: Data) -> None:
    """The arms of a sweep's only point, each at a place of its own: above one place they would hide each other."""
    metric, value = spec["metrics"][0], rows[spec["x"]].iloc[0]
    for words, reference in data.axes[metric].references.items():
        panel.axhline(height := _height(reference, rows, data), color="black", lw=0.8, ls=":", label=REFERENCE_LINE)
        panel.annotate(
            words,
            (1, height),
            (0, 1),
            xycoords=panel.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=7,
        )
    for index, arm in enumerate(_arms(spec, rows)):
        place = float(index)
        names = {place: f"{KEYS.get(spec['x'], spec['x'])} {shown(value)}"}
        line(panel, arm, [(place, rows[rows.arm == arm])], metric, data.axes[metric], joined=False, names=names)
    panel.set_xticks([])
    panel.set_xlabel(f"arms at {KEYS.get(spec['x'], spec['x'])} = {shown(value)}")
    panel.set_ylabel(data.axes[metric].label)


def _strip(panel, places: dict[Any, float], alone: dict[str, Any]) -> dict[str, float]:
    """Where arms stand that ran at one value: behind a line at the end of the axis, which says at which; on it they would hide each other."""
    if not alone:
        return {}
    axis = panel.xaxis.get_transform()
    start, *_, end = sorted(axis.transform(list(places.values())))
    at = lambda share: float(axis.inverted().transform(end + share * (end - start)))  # noqa: E731
    ordered = sorted(alone, key=lambda arm: (str(alone[arm]), list(ARMS).index(arm)))
    found = {arm: at(0.14 + 0.07 * number) for number, arm in enumerate(ordered)}
    panel.axvline(at(0.07), color="0.75", lw=0.8, label="_strip")
    for value in dict.fromkeys(alone.values()):
        mine = [found[arm] for arm in ordered if alone[arm] == value]
        style = {"ha": "center", "va": "bottom", "fontsize": 6.5, "rotation": 90 if len(mine) < 3 else 0}
        panel.text(
            mine[(len(mine) - 1) // 2], 1.01, f"{shown(value)} only", transform=panel.get_xaxis_transform(), **style
        )
    return found


#: Losses of others on the same rows, drawn where they are known.
REFERENCES = {
    "eval/bigram": "bigram model",
    "eval/ngram": "5-gram model",
    "eval/floor_blind": "least without the dialect",
    "eval/floor": "least possible",
}


def training(spec: dict[str, Any], data: Data) -> Figure | None:
    """Metrics against optimiser steps at the figure's point, a line an arm: is everything converged?"""
    rows = data.at_point(data.table, spec)
    metrics = _metrics(spec, rows)
    if not metrics:
        return None
    figure, panels = _side_by_side(metrics, data, alike=False)
    name_undefined(figure, spec["metrics"], rows, data)
    for panel, metric in zip(panels, metrics, strict=True):
        steps = {step: float(step) for step in sorted(rows.step.unique())}
        for arm, stands in beside(panel, steps, _arms(spec, rows)).items():
            groups = [(stands[step], group) for step, group in rows[rows.arm == arm].groupby("step")]
            names = {place: f"{step:g}" for step, place in stands.items()}
            line(panel, arm, groups, metric, data.axes[metric], names=names)
        panel.set_xlabel("optimiser steps")
        panel.xaxis.set_major_locator(
            ticker.MaxNLocator(5, steps=[1, 2, 5, 10], integer=True)
        )  # numbers of five digits beside each other
        panel.set_ylabel(data.axes[metric].label)
        for column in REFERENCES if metric == data.loss else ():
            if column not in rows:
                continue
            height = rows[column].mean()
            panel.axhline(height, color="black", lw=0.8, ls=":", label=REFERENCE_LINE)
            place = {"transform": panel.get_yaxis_transform(), "ha": "left", "va": "bottom", "fontsize": 7.5}
            panel.text(0, height, f" {REFERENCES[column]}", **place)  # losses fall: most room is below their start
        if not data.axes[metric].log:
            _leave_out_start(panel, rows.groupby(["step", "arm"])[metric].mean().unstack("step"))
    return _finished(figure, panels, metrics, data)


def _leave_out_start(panel, means: pd.DataFrame) -> None:
    """Ends the y axis short of the values before training where these would take more than half of it, and says so.

    `means` has a column a step and a row an arm.
    """
    means = means.dropna(how="all")
    if means.shape[1] < 4 or means.columns[0] != 0 or not np.isfinite(means).all(axis=None):
        return
    start, during = means[0].mean(), means.drop(columns=0).to_numpy().ravel()
    bars = [line.get_ydata()[0] for line in panel.lines if line.get_label() == REFERENCE_LINE]
    drawn = [part for one in panel.containers for each in one.lines[2] for part in each.get_segments()]  # intervals
    ends = [y for part in drawn for x, y in part if x > means.columns[1] / 2 and np.isfinite(y)]  # beside 0 is 0
    low, high = min(*during, *ends, *bars), max(*during, *ends, *bars)
    span = high - low
    if low - span <= start <= high + span:
        return
    panel.set_ylim(low - 0.15 * span, high + 0.15 * span)
    words, place = f"before training: {start:.3g}", {"transform": panel.transAxes, "ha": "center", "va": "top"}
    panel.text(0.5, 0.99, words, fontsize=6.5, **place)


def success(spec: dict[str, Any], data: Data) -> Figure | None:
    """The share of runs that succeed against experts per cluster: a panel a separation, a line a number of clusters.

    `metric` is 1 in a run that succeeded; `predicted(clusters, experts)` is its probability, drawn dotted.
    """
    if spec["metric"] not in data.last or {"data.clusters", "data.separation"} - set(data.swept):
        return None
    rows = data.at_point(data.last, spec | {"y": "data.clusters", "by": "data.separation"})
    rows = rows[(rows.arm == spec["arm"]) & (rows.status == "ok")]
    if not len(rows):
        return None
    separations = sorted(rows["data.separation"].unique())
    figure = Figure(figsize=(2.9 * len(separations) + 0.4, 3.6))
    panels = figure.subplots(1, len(separations), squeeze=False, sharey=True)[0]
    for panel, separation in zip(panels, separations, strict=True):
        here = rows[rows["data.separation"] == separation]
        ratios = {ratio: float(ratio) for ratio in sorted((here[spec["x"]] / here["data.clusters"]).unique())}
        stands = beside(panel, ratios, sorted(here["data.clusters"].unique()))
        for i, (clusters, group) in enumerate(here.groupby("data.clusters")):
            shares = {n: statistics.proportion(runs[spec["metric"]].dropna()) for n, runs in group.groupby(spec["x"])}
            x = [experts / clusters for experts in shares]
            style = {"marker": MARKERS[i], "ms": 4, "capsize": 2, "lw": 1.2, "color": SHADES[i % len(SHADES)]}
            points = [
                Point(stands[clusters][at], one, at=f"{at:g}") for at, one in zip(x, shares.values(), strict=True)
            ]
            intervals(panel, points, f"{clusters} clusters", style)
            predicted = [spec["predicted"](clusters, experts) for experts in shares]
            panel.plot(x, predicted, color=style["color"], ls=":", lw=1.2)
        panel.set_title(f"separation {shown(separation)}", fontsize=9)
        panel.set_xlabel("experts per cluster")
        panel.set_ylim(-0.05, 1.05)
    panels[0].set_ylabel(data.axes[spec["metric"]].label)
    legend(figure, panels[0])
    return figure


#: The colour of each step of `diagnosis.PATH`, by the arm that it ends at; and how the comparisons beside it look.
COLOURS = {"frozen_sharp": "#E69F00", "frozen_data": "#009E73", "learned": "#0072B2"}
LOOKS = (("o", "black", "black"), ("o", "white", "black"), ("s", "#999999", "#999999"), ("D", "#5A2A00", "#5A2A00"))

#: Names of the comparisons that stand beside the path in a gap figure; that with the oracle may be e^15: see the table.
BESIDE = [name for name, *_ in diagnosis.BESIDE if "oracle" not in name]


def gap(spec: dict[str, Any], data: Data) -> Figure | None:
    """The gap between frozen and learned at every value of `x`: step by step, and beside it other comparisons on the same scale."""
    if spec["x"] not in data.swept:
        return None
    tables = _gaps(spec, data)
    figure = Figure(figsize=(8.4, 4.2))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    if not steps(left, spec, data):
        return None
    for i, name in enumerate(BESIDE):
        rows = {place: table[table.part == name] for place, table in enumerate(tables.values()) if len(table)}
        rows = {place: row.iloc[0] for place, row in rows.items() if len(row)}
        if rows:
            marker, face, edge = LOOKS[i % len(LOOKS)]
            points = [
                Point(place + 0.18 * (i - 1), statistics.Estimate(row["mean"], row.low, row.high, row.n))
                for place, row in rows.items()
            ]
            arms = next(iter(rows.values())).arms
            words = f"{name}: {arms}" if name.startswith("whole") else f"not a part: {name}, {arms}"
            style = {
                "color": edge,
                "marker": marker,
                "mfc": face,
                "mec": edge,
                "ecolor": edge,
                "ms": 5,
                "capsize": 2,
                "ls": "",
            }
            intervals(right, points, words, style)
    right.axhline(0, color="black", lw=0.8)
    left.set_title("steps that add up to the whole gap, one confound at a time", fontsize=8.5)
    right.set_title("the whole, and other comparisons", fontsize=8.5)
    _name_groups(right, spec["x"], list(tables))
    left.set_ylabel("log(first loss / second loss)\nabove 0: the second is lower")
    legend(figure, left, right)
    return figure


def steps(panel, spec: dict[str, Any], data: Data) -> bool:
    """The steps of `diagnosis.gap` at every value of `x`: each starts where the one before ends. False when arms are missing."""
    tables, labels = _gaps(spec, data), set[str]()
    for place, table in enumerate(tables.values()):
        start = 0.0
        path = table[~table.part.isin([name for name, *_ in diagnosis.BESIDE])] if len(table) else table
        for i, (_, part) in enumerate(path.iterrows()):
            at, words = place + 0.26 * (i - (len(path) - 1) / 2), f"{part.part}: {part.arms}"
            colour = COLOURS[part.arms.split(" / ")[1]]
            panel.bar(at, part["mean"], 0.24, bottom=start, color=colour, label=None if words in labels else words)
            one = statistics.Estimate(part["mean"], part.low, part.high, part.n)
            keep(panel, Marks("bars", words, colour, [Point(at, one, part.note, start=start)]))
            start += part["mean"]
            panel.errorbar(at, start, bars([one]), color="#444444", capsize=2, lw=1)
            labels.add(words)
    panel.axhline(0, color="black", lw=0.8)
    panel.set_ylabel("log(frozen / learned), step by step")
    _name_groups(panel, spec["x"], list(tables))
    return bool(labels)


def _gaps(spec: dict[str, Any], data: Data) -> dict[Any, pd.DataFrame]:
    """The gap decomposed at every value of `x`; empty where arms are missing."""
    return {value: diagnosis.gap(rows) for value, rows in data.at_point(data.last, spec).groupby(spec["x"])}


def _name_groups(panel, key: str, values: list[Any]) -> None:
    panel.set_xticks(range(len(values)), [shown(value) for value in values])
    panel.set_xlabel(KEYS.get(key, key))
    panel.grid(axis="x", visible=False)


def _arms(spec: dict[str, Any], rows: pd.DataFrame) -> list[str]:
    """The arms that a figure asks for and that have rows, in the order of the table."""
    return [arm for arm in ARMS if arm in set(rows.arm) and arm in spec.get("arms", ARMS)]


def _metrics(spec: dict[str, Any], rows: pd.DataFrame) -> list[str]:
    """The metrics that a figure asks for and that some arm of it has."""
    return defined(spec["metrics"], rows[rows.arm.isin(_arms(spec, rows))])


def _height(reference: float | str, rows: pd.DataFrame, data: Data) -> float:
    """A reference at some rows: the number, or the value of that setting there."""
    if not isinstance(reference, str):
        return reference
    return float(rows[reference].iloc[0] if reference in data.swept else data.base[reference])


def _side_by_side(metrics: list[str], data: Data, alike: bool) -> tuple[Figure, Any]:
    """A figure with a panel for each metric, which share their axis if they are `alike` and all logarithmic."""
    figure = Figure(figsize=(3.7 * len(metrics) + 0.2, 3.9))
    same = alike and all(data.axes[metric].log for metric in metrics)
    return figure, figure.subplots(1, len(metrics), squeeze=False, sharey=same)[0]


def _finished(figure: Figure, panels: Any, metrics: list[str], data: Data) -> Figure:
    """The figure with its axes, which panels may share, and its legend."""
    for panel, metric in zip(panels, metrics, strict=True):
        panel.yaxis.set_tick_params(labelleft=True)
        finish(panel, data.axes[metric])
    legend(figure, *panels)
    return figure
