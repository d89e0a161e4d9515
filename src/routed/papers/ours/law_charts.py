"""Gaps against the settings of a law (kind `axes`), and against its predictions (kind `foretold`)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from routed.analysis import statistics
from routed.analysis.paired_values import fair_gap
from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Point
from routed.analysis.plots.frame import series_of
from routed.analysis.plots.scales import padded
from routed.papers.ours import law
from routed.plan.arms import ARMS

#: Points of a line of the law.
LINE = 41
#: Room of an axis of gaps beyond the lowest and highest mean; intervals are cut there.
ROOM = 0.5
#: Label of an axis of gaps.
GAP = "log(fairest frozen control / learned)"


def foretold(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns measured gaps against the predictions of each of `points`: on the line if they are right."""
    pairs = []
    for at, (mean, low, high) in spec["points"]:
        rows = data.at(at) if {*at} <= {*data.swept} else data.last.iloc[:0]
        if (gap := fair_gap(law.cut(rows, spec.get("floor", 0.0)))) is not None:
            pairs.append((statistics.Estimate(mean, low, high, gap.estimate.n), gap))
    if not pairs:
        return None
    values = [value for expected, gap in pairs for value in (expected.mean, gap.estimate.mean)]
    ends = min(values) - ROOM, max(values) + ROOM
    panel = Panel(Axis("expected before it was measured", ends), Axis(f"measured: {GAP}", ends), width=320, height=320)
    panel.rule("x", 0, faint=True)
    panel.rule("y", 0, faint=True)
    panel.line(ends, ends)
    panel.segments((low, gap.estimate.mean, high, gap.estimate.mean) for (_, low, high, _), gap in pairs)
    _add_gaps(panel, [(expected.mean, gap) for expected, gap in pairs])
    return Chart([panel])


def axes(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns a panel for each axis of the law: the gaps of all points, and the law at the other base settings."""
    if not {*law.AXES} <= {*data.swept}:
        return None
    flats = [
        ({**data.base, **dict(zip(data.swept, values, strict=True))}, gap)
        for values, rows in data.last.groupby(data.swept)
        if (gap := fair_gap(law.cut(rows))) is not None
    ]
    if not flats:
        return None
    fitted = law.read() if spec.get("law") and law.FILE.is_file() else None  # none before the first fit
    means = [gap.estimate.mean for _, gap in flats]
    heights = min(means) - ROOM, max(means) + ROOM  # five seeds may leave an interval of any length
    panels = []
    for key, axis in law.AXES.items():
        sizes = [axis.size(flat) for flat, _ in flats]
        few = len({*sizes}) < 5
        spread = np.random.default_rng(0).uniform(-0.06, 0.06, len(sizes)) if few else np.zeros(len(sizes))
        factors = np.exp(spread) if axis.log else 1 + spread
        spread_sizes = [float(size * factor) for size, factor in zip(sizes, factors, strict=True)]
        x = Axis(axis.label, padded(min(spread_sizes), max(spread_sizes), axis.log), axis.log)
        panel = Panel(x, Axis(GAP, heights), width=210, height=190)
        if fitted is not None:
            line = (np.geomspace if axis.log else np.linspace)(min(sizes), max(sizes), LINE)
            expected = law.expect(fitted, [{**data.base, key: axis.value(size, data.base)} for size in line])
            panel.area(line, [value.low for value in expected], [value.high for value in expected])
            panel.line(line, [value.gap for value in expected], width=1.3)
        panel.rule("y", 0, faint=True)
        _add_gaps(panel, [(position, gap) for position, (_, gap) in zip(spread_sizes, flats, strict=True)])
        panels.append(panel)
    return Chart(panels, columns=3)


def _add_gaps(panel: Panel, points: list[tuple[float, statistics.Least]]) -> None:
    """Adds gaps with intervals, in the looks of the control that was the fairest."""
    order = {arm: index for index, arm in enumerate(ARMS)}
    ranked = sorted(points, key=lambda point: order[point[1].name])
    for arm, group in itertools.groupby(ranked, key=lambda point: point[1].name):
        panel.means(series_of(arm), [Point(position, gap.estimate, f"{position:.3g}") for position, gap in group])


AXES_PLOT = Plot(
    axes,
    "Gap of every point, mean over seeds with its 95 % interval, against each setting of the law; all others differ"
    " from point to point. Colour: the fairest control there. Line and band: the law at the centre of the design, with"
    " its 95 % interval. Points of few values are spread sideways; intervals are cut where the axis ends.",
    optional={"law": "draws the law that was fitted"},
    axes=lambda spec, data: data.swept,
)
FORETOLD_PLOT = Plot(
    foretold,
    "Gaps at points that the law has not seen: expected before they ran (95 % prediction intervals, sideways) and"
    " measured (means over seeds with 95 % intervals); the line is where both are equal; intervals are cut where an"
    " axis ends. Colour: the fairest control there.",
    required={"points": "pairs of settings and (mean, low, high) of a prediction"},
    optional={"floor": "losses below it count as it"},
    axes=lambda spec, data: data.swept,
)
