"""Gaps against the settings that a law is a function of, and against what it expected."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.paired_values import fair_gap
from routed.analysis.plots.frame import Data, legend, marker_of
from routed.analysis.plots.marks import Point, bars, intervals
from routed.analysis.plots.scales import logarithmic
from routed.papers.ours import law
from routed.plan.arms import ARMS

#: Points of a line of the law.
LINE = 41

#: What an axis of gaps shows beyond the lowest and highest mean; intervals are cut there.
ROOM = 0.5

#: What an axis of gaps says.
GAP = "log(fairest frozen control / learned)"


def foretold(spec: dict[str, Any], data: Data) -> Figure | None:
    """What was expected of each of `points` against what was measured: on the line if right."""
    found = []
    for at, (mean, low, high) in spec["points"]:
        rows = data.at(at) if {*at} <= {*data.swept} else data.last.iloc[:0]
        if (gap := fair_gap(law.cut(rows, spec.get("floor", 0.0)))) is not None:
            found.append((statistics.Estimate(mean, low, high, gap.estimate.n), gap))
    if not found:
        return None
    figure = Figure(figsize=(4.6, 4.8))
    panel = figure.subplots()
    _by_control(panel, [(one.mean, gap) for one, gap in found])
    expected = [one for one, _ in found]
    panel.errorbar(
        [one.mean for one in expected], [gap.estimate.mean for _, gap in found], xerr=bars(expected), ls="", color="0.6",
        elinewidth=0.8, zorder=1,
    )  # fmt: skip
    seen = [value for one, gap in found for value in (one.mean, gap.estimate.mean)]
    ends = min(seen) - ROOM, max(seen) + ROOM
    panel.plot(ends, ends, color="black", lw=0.8, zorder=0)
    panel.axhline(0, color="0.7", lw=0.8, zorder=0)
    panel.axvline(0, color="0.7", lw=0.8, zorder=0)
    panel.set(xlim=ends, ylim=ends, aspect="equal", xlabel="expected before it was measured", ylabel=f"measured: {GAP}")
    legend(figure, panel)
    return figure


def axes(spec: dict[str, Any], data: Data) -> Figure | None:
    """The gap of every point against each axis of the law, a panel an axis; the line is the law's, at the base config's other settings."""
    if not {*law.AXES} <= {*data.swept}:
        return None
    flats = [
        ({**data.base, **dict(zip(data.swept, values, strict=True))}, gap)
        for values, rows in data.last.groupby(data.swept)
        if (gap := fair_gap(law.cut(rows))) is not None
    ]
    if not flats:
        return None
    known = law.read() if spec.get("law") and law.FILE.is_file() else None  # none before the first fit
    figure = Figure(figsize=(8.4, 5.6))
    panels = figure.subplots(2, 3, sharey=True)
    for panel, (key, axis) in zip(panels.flat, law.AXES.items(), strict=True):
        sizes = [axis.size(flat) for flat, _ in flats]
        jitter = (
            np.random.default_rng(0).uniform(-0.06, 0.06, len(sizes)) if len({*sizes}) < 5 else np.zeros(len(sizes))
        )
        spread = np.exp(jitter) if axis.log else 1 + jitter
        _by_control(panel, [(size * by, gap) for size, by, (_, gap) in zip(sizes, spread, flats, strict=True)])
        if known is not None:
            line = (np.geomspace if axis.log else np.linspace)(min(sizes), max(sizes), LINE)
            expected = law.expect(known, [{**data.base, key: axis.value(size, data.base)} for size in line])
            panel.plot(line, [one.gap for one in expected], color="black", lw=1.2)
            panel.fill_between(
                line, [one.low for one in expected], [one.high for one in expected], color="0.85", zorder=0
            )
        if axis.log:
            logarithmic(panel, "x")
        panel.axhline(0, color="0.5", lw=0.8)
        panel.set_xlabel(axis.label)
    means = [gap.estimate.mean for _, gap in flats]
    panels[0, 0].set_ylim(min(means) - ROOM, max(means) + ROOM)  # five seeds may leave an interval of any length
    for first in panels[:, 0]:
        first.set_ylabel(GAP, fontsize=8)
    legend(figure, panels.flat[0])
    return figure


def _by_control(panel, points: list[tuple[float, statistics.Least]]) -> None:
    """Gaps with intervals at places, in the colour and marker of the control that was the fairest."""
    order = {arm: place for place, arm in enumerate(ARMS)}
    ranked = sorted(points, key=lambda one: order[one[1].name])
    for arm, group in itertools.groupby(ranked, key=lambda one: one[1].name):
        style = {"ls": "", "color": ARMS[arm].colour, "marker": marker_of(arm), "ms": 4, "elinewidth": 0.8}
        intervals(panel, [Point(place, gap.estimate) for place, gap in group], ARMS[arm].label, style)
