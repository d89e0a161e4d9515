"""Metrics against a swept key or against training steps, and the gap decomposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from routed.analysis import diagnosis
from routed.analysis.plots.frame import KEYS, MARKERS, SHADES, Data, legend, line, logarithmic, mean
from routed.contracts import Column
from routed.engine.rows import shown
from routed.plan.arms import ARMS


def curves(spec: dict[str, Any], data: Data) -> Figure | None:
    """Metrics against a swept key, a line an arm: geometric (log axis) or arithmetic means with 95 % t intervals."""
    if spec["x"] not in data.swept:
        return None
    rows = data.at_point(data.last, spec)
    xs = sorted(rows[spec["x"]].unique())
    figure = _panels(
        spec, data.axes, rows.assign(place=rows[spec["x"]].map(xs.index)), "place", spread=0.06 if len(xs) < 8 else 0
    )
    for panel in figure.axes if figure else ():
        panel.set_xticks(range(len(xs)), [shown(x) for x in xs])
        panel.set_xlabel(KEYS.get(spec["x"], spec["x"]))
    return figure


def training(spec: dict[str, Any], data: Data) -> Figure | None:
    """Metrics against optimiser steps at the figure's point, a line an arm: is everything converged?"""
    rows = data.at_point(data.table, spec)
    figure = _panels(spec, data.axes, rows, "step", spread=0)
    for panel in figure.axes if figure else ():
        panel.set_xlabel("optimiser steps")
        panel.locator_params(axis="x", nbins=5)  # numbers of five digits beside each other
        if "eval/bigram" in rows and panel.get_ylabel() == data.axes["eval/loss"].label:
            panel.axhline(rows["eval/bigram"].mean(), color="black", lw=0.8, ls=":")
            panel.text(
                1,
                rows["eval/bigram"].mean(),
                "bigram model ",
                transform=panel.get_yaxis_transform(),
                ha="right",
                va="bottom",
                fontsize=7.5,
            )
    return figure


def success(spec: dict[str, Any], data: Data) -> Figure | None:
    """The share of runs that succeed against experts per cluster: a panel a separation, a line a number of clusters.

    `metric` is 1 in a run that succeeded; `predicted(clusters, experts)` is its probability, drawn dotted.
    """
    rows = data.last[(data.last.arm == spec["arm"]) & (data.last.status == "ok")]
    if spec["metric"] not in rows or not len(rows) or {"data.clusters", "data.separation"} - set(data.swept):
        return None
    separations = sorted(rows["data.separation"].unique())
    figure = Figure(figsize=(2.9 * len(separations) + 0.4, 3.6))
    panels = figure.subplots(1, len(separations), squeeze=False, sharey=True)[0]
    for panel, separation in zip(panels, separations, strict=True):
        here = rows[rows["data.separation"] == separation]
        for i, (clusters, group) in enumerate(here.groupby("data.clusters")):
            found = [(experts, mean(one[spec["metric"]], log=False)) for experts, one in group.groupby(spec["x"])]
            x, ends = (
                [experts / clusters for experts, _ in found],
                [[e.mean - e.low, e.high - e.mean] for _, e in found],
            )
            style = {"marker": MARKERS[i], "ms": 4, "capsize": 2, "lw": 1.2, "color": SHADES[i % len(SHADES)]}
            panel.errorbar(x, [e.mean for _, e in found], np.transpose(ends), label=f"{clusters} clusters", **style)
            predicted = [spec["predicted"](clusters, experts) for experts, _ in found]
            panel.plot(x, predicted, color=style["color"], ls=":", lw=1.2)
        panel.set_title(f"separation {shown(separation)}", fontsize=9)
        panel.set_xlabel("experts per cluster")
        panel.set_ylim(-0.05, 1.05)
    panels[0].set_ylabel(data.axes[spec["metric"]][0])
    legend(figure, panels[0])
    return figure


def _panels(
    spec: dict[str, Any], axes: Mapping[str, Column], rows: pd.DataFrame, x: str, spread: float
) -> Figure | None:
    """A panel a metric that any arm has, a line an arm; `spread` sets the arms apart so that their intervals do not hide each other."""
    arms = [arm for arm in ARMS if arm in set(rows.arm) and arm in spec.get("arms", ARMS)]
    metrics = [m for m in spec["metrics"] if m in rows and rows[rows.arm.isin(arms)][m].notna().any()]
    if not metrics:
        return None
    figure = Figure(figsize=(3.7 * len(metrics) + 0.2, 3.9))
    same = all(axes[m][1] for m in metrics) and x != "step"
    panels = figure.subplots(1, len(metrics), squeeze=False, sharey=same)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        label, log = axes[metric]
        for i, arm in enumerate(arms):
            points = [(at, mean(group[metric], log)) for at, group in rows[rows.arm == arm].groupby(x)]
            line(panel, arm, [p for p in points if np.isfinite(p[1].mean)], shift=spread * (i - (len(arms) - 1) / 2))
        panel.set_ylabel(label)
        panel.yaxis.set_tick_params(labelleft=True)
    for panel, metric in zip(panels, metrics, strict=True):  # when all are drawn, as panels may share their limits
        if axes[metric][1]:
            logarithmic(panel)
    legend(figure, panels[0])
    return figure


def gap(spec: dict[str, Any], data: Data) -> Figure | None:
    """The gap between frozen and learned, decomposed, at every value of `x`: log ratios with 95 % intervals."""
    if spec["x"] not in data.swept:
        return None
    rows = data.at_point(data.last, spec)
    found = {x: part for x, group in rows.groupby(spec["x"]) if len(part := diagnosis.gap(group))}
    if not found:
        return None
    names = dict.fromkeys(part for table in found.values() for part in table.part)
    parts = [part for part in names if "oracle" not in part]  # may be e^15: see the table
    colours = ["#E69F00", "#009E73", "#0072B2", "#000000", "#999999", "#CC79A7", "#56B4E9"]
    figure = Figure(figsize=(7.6, 4.2))
    panel = figure.subplots()
    width = 0.8 / len(parts)
    for i, part in enumerate(parts):
        for j, table in enumerate(found.values()):
            if not (table.part == part).any():
                continue  # its arm ran at other points only
            row = table[table.part == part].iloc[0]
            place = j - 0.4 + (i + 0.5) * width
            panel.bar(place, row["mean"], width * 0.9, color=colours[i], label=part if not j else None)
            if np.isfinite(row.low):
                panel.errorbar(
                    place,
                    row["mean"],
                    [[row["mean"] - row.low], [row.high - row["mean"]]],
                    color="#444444",
                    capsize=2,
                    lw=1,
                )
    panel.axhline(0, color="black", lw=0.8)
    panel.set_xticks(range(len(found)), [shown(x) for x in found])
    panel.set_xlabel(KEYS.get(spec["x"], spec["x"]))
    panel.set_ylabel("log ratio of losses (nats; above 0: second is better)")
    panel.grid(axis="x", visible=False)
    legend(figure, panel)
    return figure
