"""A metric against a swept key for named sides, and what each of them needs to reach a level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.bootstrap import all_then_resampled as drawn
from routed.analysis.bootstrap import estimate_of_draws as estimate
from routed.analysis.bootstrap import fitted_slope
from routed.analysis.plots.frame import MARKERS, Data, legend, mean
from routed.analysis.plots.marks import bars, explain
from routed.analysis.plots.scales import beside, finish, lay_out, logarithmic
from routed.papers.chowdhury2023.sample_complexity import first_reached, ratio_of

#: Okabe and Ito's palette without its yellow, then Tol's darker ones: lines of a figure are few enough to be told apart by colour and marker.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#117733",
    "#999999",
    "#7B3FF2",
    "#5A2A00",
)


#: The column of what is drawn: a side may have a metric of its own.
SHOWN = "_shown"


def reached(spec: dict[str, Any], data: Data) -> Figure | None:
    """Panels of `families` (title -> name -> side): `metric` against `x`, and at last the values at which each side is at `level`."""
    if spec["x"] not in data.swept:
        return None
    families = {
        title: {name: _rows(side, spec["x"], spec["metric"], data) for name, side in sides.items()}
        for title, sides in spec["families"].items()
    }
    families = {title: {name: rows for name, rows in sides.items() if len(rows)} for title, sides in families.items()}
    families = {title: sides for title, sides in families.items() if sides}
    if not families:
        return None
    names = [name for sides in families.values() for name in sides]
    looks = {  # a marker a family, a colour a line of it
        name: {"color": COLOURS[i % len(COLOURS)], "marker": marker}
        for marker, sides in zip(MARKERS, families.values(), strict=False)
        for i, name in enumerate(sides)
    }
    figure = Figure(figsize=(3.5 * len(families) + 4.6, max(3.6, 0.24 * len(names) + 2.2)))
    *panels, last = figure.subplots(1, len(families) + 1)
    column = data.axes[spec["metric"]]
    for panel, (title, sides) in zip(panels, families.items(), strict=True):
        every = sorted({value for rows in sides.values() for value in rows[spec["x"]]})
        places = lay_out(panel, spec["x"], every, spec.get("axis"))
        for name, stands in beside(panel, places, [*sides]).items():
            points = [(stands[value], mean(group[SHOWN], column)) for value, group in sides[name].groupby(spec["x"])]
            explain(figure, (one for _, one in points))
            panel.errorbar([x for x, _ in points], [one.mean for _, one in points], bars([one for _, one in points]), **looks[name],
                           ms=4, capsize=2, lw=1.1, elinewidth=0.7, label=name)  # fmt: skip
        panel.axhline(spec["level"], color="black", lw=0.8, ls=":")
        panel.set_title(title, fontsize=9)
        panel.set_ylabel(column.label)
        finish(panel, column)
    low, high = zip(*(panel.get_ylim() for panel in panels), strict=True)
    for panel in panels:  # after each has cut its intervals
        panel.set_ylim(min(low), max(high))
    _needed(last, spec, {name: rows for sides in families.values() for name, rows in sides.items()}, looks)
    legend(figure, *panels)
    return figure


def _needed(
    panel, spec: dict[str, Any], sides: Mapping[str, pd.DataFrame], looks: Mapping[str, dict[str, str]]
) -> None:
    """A line a side: the interpolated value with its bootstrap interval over seeds; an arrow where the level is not reached."""
    largest = max(rows[spec["x"]].max() for rows in sides.values())
    for place, (name, rows) in enumerate(sides.items()):
        table = rows.pivot_table(index="seed", columns=spec["x"], values=SHOWN).dropna()
        values = table.columns.to_numpy(float)
        found = estimate(first_reached(values, table.to_numpy()[drawn(len(table))].mean(1), spec["level"]), len(table))
        if not np.isfinite(found.mean):
            panel.plot(largest, place, **looks[name] | {"marker": ">"}, ms=6, ls="")
            panel.annotate(
                "not reached ",
                (largest, place),
                ha="right",
                va="center",
                fontsize=7,
                xytext=(-5, 0),
                textcoords="offset points",
            )
            continue
        cut = statistics.Estimate(found.mean, found.low, min(found.high, largest), found.n)
        panel.errorbar(found.mean, place, xerr=bars([cut]), **looks[name], ms=4.5, capsize=2, ls="")
    panel.set_yticks(range(len(sides)), list(sides), fontsize=8)
    panel.set_ylim(len(sides) - 0.5, -0.5)
    panel.set_xlabel(f"{spec.get('words', 'training samples')} for {spec['level']:g}")
    low = min(rows[spec["x"]].min() for rows in sides.values())
    panel.set_xlim(low / 1.15, largest * 1.15)
    logarithmic(panel, "x")


def ratios(spec: dict[str, Any], data: Data) -> Figure | None:
    """What the side `base` needs over what others need, against a number: `lines` (name -> number -> side), each with its fitted slope.

    Dotted: the power `bound` of the number, through 1 at 1.
    """
    if spec["x"] not in data.swept:
        return None
    seen_by: dict[str, tuple[np.ndarray, list[statistics.Estimate]]] = {}
    tables = {name: {x: _table(side, spec, data) for x, side in sides.items()} for name, sides in spec["lines"].items()}
    base = _table(spec["base"], spec, data)
    figure = Figure(figsize=(5.2, 4.4))
    panel = figure.subplots()
    for i, (name, line) in enumerate(tables.items()):
        found = {x: _ratio(base, table, spec["level"]) for x, table in line.items()}
        found = {x: draws for x, draws in found.items() if len(draws) and np.isfinite(draws[0])}
        if not found:
            continue
        seen = [estimate(draws, len(base)) for draws in found.values()]
        slope = fitted_slope(np.log(list(found)), np.log([one.mean for one in seen]))
        seen_by[f"{name}: slope {slope:.2f}"] = np.array(list(found)) * (1 + 0.04 * (i - 1)), seen
    reach = [end for _, seen in seen_by.values() for one in seen for end in one[:3] if np.isfinite(end) and end > 0]
    if not reach:
        return None
    bottom, top = min(*reach, 1) / 1.3, max(*reach, 1) * 2
    for i, (label, (place, seen)) in enumerate(seen_by.items()):
        ends = [
            one._replace(low=max(one.low, bottom), high=min(one.high, top)) for one in seen
        ]  # open ones go to the edge
        panel.errorbar(place, [one.mean for one in seen], bars(ends), color=COLOURS[i], marker=MARKERS[i], ms=5, capsize=2, lw=1.2,
                       label=label)  # fmt: skip
    numbers = np.geomspace(1, max(x for line in spec["lines"].values() for x in line), 50)
    panel.plot(numbers, numbers ** spec["bound"], color="black", ls=":", lw=1, label=f"bound: power {spec['bound']:g}")
    panel.axhline(1, color="black", lw=0.8)
    lay_out(panel, spec["words"], sorted({x for line in spec["lines"].values() for x in line}))
    panel.set_yscale("log")
    panel.set_ylim(bottom, top)
    logarithmic(panel)
    panel.set_ylabel(f"samples for {spec['level']:g}: CNN's over those of the line")
    legend(figure, panel)
    return figure


def _table(side: Mapping[str, Any], spec: Mapping[str, Any], data: Data) -> pd.DataFrame:
    """What a side shows, a row a seed and a column a value of `x`."""
    rows = _rows(side, spec["x"], spec["metric"], data)
    return rows.pivot_table(index="seed", columns=spec["x"], values=SHOWN).dropna() if len(rows) else pd.DataFrame()


def _ratio(base: pd.DataFrame, other: pd.DataFrame, level: float) -> np.ndarray:
    """Draws of what `base` needs over what `other` needs, of their common seeds."""
    seeds = base.index.intersection(other.index)
    if not len(seeds):
        return np.empty(0)
    which = drawn(len(seeds))
    high, low = (
        first_reached(one.columns.to_numpy(float), one.loc[seeds].to_numpy()[which].mean(1), level)
        for one in (base, other)
    )
    return ratio_of(high, low)


def _rows(side: Mapping[str, Any], x: str, default: str, data: Data) -> pd.DataFrame:
    """The last finite rows of a side at all values of `x`; a swept key that it does not name has its base value."""
    rows = data.last[data.last.status == "ok"]
    rows = rows[rows.arm == side["arm"]]
    if (metric := side.get("metric", default)) not in rows:
        return rows.iloc[:0]
    rows = rows.assign(**{SHOWN: rows[metric]}).dropna(subset=SHOWN)
    for key in data.swept:
        if key != x:
            rows = rows[rows[key] == side.get(key, data.base[key])]
    return rows
