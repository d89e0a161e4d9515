"""A metric against a swept key for named sides, and the value that each needs for a level (`reached`, `ratios`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from routed.analysis import statistics
from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Point, Series
from routed.analysis.plots.frame import PALETTE, SHAPES, mean
from routed.analysis.plots.kind import swept_in
from routed.analysis.plots.scales import dodge, padded, set_value_axes, sweep_axis
from routed.papers.chowdhury2023.sample_complexity import needed, ratio_of
from routed.papers.draws import estimate_of_draws, fitted_slope

#: Column of the shown values: a side may have a metric of its own.
SHOWN = "_shown"
Spec = dict[str, Any]


def reached(spec: Spec, data: Data) -> Chart | None:
    """Returns a panel for each family of sides, `metric` against `x`, and the values at which each is at `level`."""
    if spec["x"] not in data.swept:
        return None
    families = {
        title: {name: rows for name, side in sides.items() if len(rows := _rows(side, spec["x"], spec["metric"], data))}
        for title, sides in spec["families"].items()
    }
    families = {title: sides for title, sides in families.items() if sides}
    if not families:
        return None
    looks = {  # a shape for each family, a colour for each line of it
        name: Series(name, PALETTE[i % len(PALETTE)], shape)
        for shape, sides in zip(SHAPES, families.values(), strict=False)
        for i, name in enumerate(sides)
    }
    chart, column = Chart([], columns=min(3, len(families) + 1)), data.axes[spec["metric"]]
    for title, sides in families.items():
        values = sorted({value for rows in sides.values() for value in rows[spec["x"]]})
        axis, positions = sweep_axis(spec["x"], values, spec.get("axis"), 220)
        panel = Panel(axis, Axis(), title, width=220, height=max(230, 13 * len(looks)))
        for name, dodged in dodge(axis, positions, [*sides]).items():
            groups = sides[name].groupby(spec["x"])
            points = [Point(dodged[value], mean(group[SHOWN], column), f"{value:g}") for value, group in groups]
            panel.means(looks[name], points, joined=True)
        panel.rule("y", spec["level"], dash=(2, 3))
        chart.panels.append(panel)
    set_value_axes(chart, chart.panels, column, column.label)
    every = {name: rows for sides in families.values() for name, rows in sides.items()}
    chart.panels.append(_needs(spec, every, looks))
    return chart


def _needs(spec: Spec, sides: Mapping[str, pd.DataFrame], looks: Mapping[str, Series]) -> Panel:
    """Returns a line for each side: the interpolated value with its bootstrap interval over seeds, or "not reached"."""
    low = min(rows[spec["x"]].min() for rows in sides.values())
    largest = max(rows[spec["x"]].max() for rows in sides.values())
    x = Axis(f"{spec.get('words', 'training samples')} for {spec['level']:g}", (low / 1.15, largest * 1.15), log=True)
    ticks = {float(index): name for index, name in enumerate(sides)}
    y = Axis("", (-0.5, len(sides) - 0.5), ticks=ticks, reverse=True, all_labels=True)
    panel = Panel(x, y, horizontal=True, width=220, height=max(230, 13 * len(sides)))
    for index, (name, rows) in enumerate(sides.items()):
        table = _by_seed(rows, spec["x"])
        need = estimate_of_draws(needed(table, spec["level"]), len(table))
        if np.isfinite(need.mean):
            cut = need._replace(high=min(need.high, float(largest)))
            panel.means(looks[name], [Point(float(index), cut, name)])
        else:
            panel.dots(looks[name]._replace(shape="triangle-right"), [largest], [index], size=45)
            panel.text("not reached", largest, index, align="right", baseline="middle", dx=-7)
    return panel


def ratios(spec: Spec, data: Data) -> Chart | None:
    """Returns the needs of the side `base` over those of other sides against a number: lines with fitted slopes.

    Dotted: the power `bound` of the number, through 1 at 1.
    """
    if spec["x"] not in data.swept:
        return None
    base = _table(spec["base"], spec, data)
    lines: dict[str, tuple[list[float], list[statistics.Estimate]]] = {}
    for name, sides in spec["lines"].items():
        ratios = {x: _ratio(base, _table(side, spec, data), spec["level"]) for x, side in sides.items()}
        needs = {x: ratio for x, ratio in ratios.items() if ratio is not None and np.isfinite(ratio.mean)}
        if needs:
            slope = fitted_slope(np.log([*needs]), np.log([need.mean for need in needs.values()]))
            lines[f"{name}: slope {slope:.2f}"] = [*needs], [*needs.values()]
    ends = [end for _, needs in lines.values() for need in needs for end in need[:3] if np.isfinite(end) and end > 0]
    if not ends:
        return None
    bottom, top = min(*ends, 1) / 1.3, max(*ends, 1) * 2
    numbers = sorted({x for sides in spec["lines"].values() for x in sides})
    axis, positions = sweep_axis(spec["words"], numbers, width=320)
    axis.cover(*padded(1, max(numbers), axis.log))
    label = f"samples for {spec['level']:g}: CNN's over those of the line"
    panel = Panel(axis, Axis(label, (bottom, top), log=True), width=320, height=300)
    every = np.geomspace(1, max(numbers), 50)
    panel.line(every, every ** spec["bound"], dash=(2, 3))
    panel.text(f"bound: power {spec['bound']:g}", 1.0, top, align="left", dx=12, dy=12)
    panel.rule("y", 1)
    for (name, (xs, estimates)), dodged, colour, shape in zip(
        lines.items(), dodge(axis, positions, [*lines]).values(), PALETTE, SHAPES, strict=False
    ):
        # Open intervals end at the edges.
        cut = [need._replace(low=max(need.low, bottom), high=min(need.high, top)) for need in estimates]
        points = [Point(dodged[x], need, f"{x:g}") for x, need in zip(xs, cut, strict=True)]
        panel.means(Series(name, colour, shape), points, joined=True)
    return Chart([panel])


def _table(side: Mapping[str, Any], spec: Mapping[str, Any], data: Data) -> pd.DataFrame:
    """Returns the values of a side, a row for each seed and a column for each value of `x`."""
    rows = _rows(side, spec["x"], spec["metric"], data)
    return _by_seed(rows, spec["x"]) if len(rows) else pd.DataFrame()


def _by_seed(rows: pd.DataFrame, x: str) -> pd.DataFrame:
    return rows.pivot_table(index="seed", columns=x, values=SHOWN).dropna()


def _ratio(base: pd.DataFrame, rival: pd.DataFrame, level: float) -> statistics.Estimate | None:
    """Returns the need of `base` over that of `rival`, over their common seeds."""
    if not len(seeds := base.index.intersection(rival.index)):
        return None
    return estimate_of_draws(ratio_of(*(needed(table.loc[seeds], level) for table in (base, rival))), len(seeds))


def _rows(side: Mapping[str, Any], x: str, default: str, data: Data) -> pd.DataFrame:
    """Returns the last finite rows of a side at all values of `x`; other swept keys have the side's or base values."""
    rows = data.last[(data.last.status == "ok") & (data.last.arm == side["arm"])]
    if (metric := side.get("metric", default)) not in rows:
        return rows.iloc[:0]
    rows = rows.assign(**{SHOWN: rows[metric]}).dropna(subset=SHOWN)
    for key in data.swept:
        if key != x:
            rows = rows[rows[key] == side.get(key, data.base[key])]
    return rows


LEVELS = {"x": "swept key", "metric": "column", "level": "value of the metric that is to be reached"}
REACHED_PLOT = Plot(
    reached,
    "Means over seeds with 95 % intervals; dotted: the level. Last panel: the value at which the mean over seeds"
    " reaches it, linear between the logarithms of values, with 95 % percentile intervals of a bootstrap over seeds,"
    " cut at the largest value.",
    required=LEVELS | {"families": "title of a panel -> name of a side -> its arm and settings"},
    optional={"words": "label of `x`", "axis": "label and factor of the x axis in a paper's unit"},
    axes=swept_in,
)
RATIOS_PLOT = Plot(
    ratios,
    "Ratios of the samples that a level needs, from means over seeds, with 95 % percentile intervals of a bootstrap"
    " over common seeds; slopes by least squares on logarithms; dotted: the bound's power, through 1 at 1.",
    required=LEVELS
    | {
        "base": "arm and settings of the side in the numerator",
        "lines": "name of a line -> number -> arm and settings of a side",
        "words": "label of the number",
        "bound": "power of the dotted line",
    },
    axes=swept_in,
)
