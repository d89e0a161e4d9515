"""Metrics against a number, both in logarithms, each with its power: panels of lines of sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.plots.frame import MARKERS, Data
from routed.analysis.plots.marks import bars, explain
from routed.analysis.plots.reached import COLOURS
from routed.analysis.plots.scales import lay_out, logarithmic
from routed.papers.pham2024.powers import fitted


def powers(spec: dict[str, Any], data: Data) -> Figure | None:
    """A panel for each of `panels` (words -> name -> number -> side): means over seeds, the line fitted to their logarithms, its slope.

    `words` are those of the number. Dotted, where `bound` names a power: that power through the first line's first mean.
    """
    panels = {
        words: {name: _table(sides, data) for name, sides in lines.items()} for words, lines in spec["panels"].items()
    }
    panels = {words: {name: one for name, one in lines.items() if one.size} for words, lines in panels.items()}
    panels = {words: lines for words, lines in panels.items() if lines}
    if not panels:
        return None
    figure = Figure(figsize=(4.6 * len(panels), 4.4))
    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (words, lines) in zip(drawn, panels.items(), strict=True):
        lay_out(panel, spec["words"], sorted({float(x) for table in lines.values() for x in table}))
        for place, (name, table) in enumerate(lines.items()):
            _line(panel, place, name, table, spec.get("bound"))
        logarithmic(panel)
        panel.set_ylabel(words)
        panel.legend(
            fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False
        )  # its slopes are the panel's own
    return figure


def _line(panel, place: int, name: str, table: pd.DataFrame, bound: float | None) -> None:
    """The means with their intervals, the fitted line with its slope in the legend, and the bound beside the first of them."""
    means = {x: statistics.estimate(table[x].dropna(), bounds=(0, None)) for x in table}
    means = {float(x): one for x, one in means.items() if one.n and one.mean > 0}
    numbers, found = np.array(list(means)), fitted(table)
    look = {"color": COLOURS[place], "marker": MARKERS[place]}
    aside = 1 + 0.03 * place
    slope = "" if found is None else "{:.2f} [{:.2f}, {:.2f}]".format(*found.slope[:3])
    heights = [one.mean for one in means.values()]
    explain(panel.figure, means.values())
    panel.errorbar(
        numbers * aside,
        heights,
        bars([*means.values()]),
        **look,
        ms=4.5,
        capsize=2,
        ls="",
        label=f"{name}: slope {slope}",
    )
    if found is not None:
        panel.plot(numbers, np.exp(found.height) * numbers**found.slope.mean, color=COLOURS[place], lw=1)
    if bound is not None and not place and heights:
        panel.plot(
            numbers, heights[0] * (numbers / numbers[0]) ** bound, color="black", ls=":", lw=1, label=f"slope {bound:g}"
        )


def _table(sides: Mapping[float, Mapping[str, Any]], data: Data) -> pd.DataFrame:
    """What each side shows at its number, a row a seed."""
    found = {}
    for number, side in sides.items():
        rows = data.last[(data.last.status == "ok") & (data.last.arm == side["arm"])]
        for key in data.swept:
            if key in side:
                rows = rows[rows[key] == side[key]]
        if len(rows) and side["metric"] in rows:
            found[number] = rows.set_index("seed")[side["metric"]]
    return pd.DataFrame(found)
