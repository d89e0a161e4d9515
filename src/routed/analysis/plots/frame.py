"""What every figure shares: the rows it draws, the looks of lines, a line with intervals, a legend."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.plots.marks import Point, by_seed, intervals, note
from routed.contracts import Column
from routed.engine.rows import at_base, last, plain
from routed.plan.arms import ARMS, is_control

#: Why no run may have a metric.
UNDEFINED = {"router/dead": "undefined: fewer than 100 test tokens an expert"}

#: Lines that are no arms.
SHADES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")

STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "routed",
    "text.parse_math": False,  # names are text, also one with two dollars
    # Laid out for one format, and text is a little wider in another.
    "figure.constrained_layout.use": True, "figure.constrained_layout.w_pad": 0.08, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "figure.dpi": 110,
}  # fmt: skip


class Data:
    """The rows of a workdir as figures need them; `base` is the flat config that points depart from, `axes` how columns are shown.

    `loss` is the column that arms are compared by; `own` are the keys that the experiment file sweeps, the others are the user's.
    """

    def __init__(
        self,
        table: pd.DataFrame,
        swept: list[str],
        base: dict[str, Any],
        heatmaps: Mapping[str, np.ndarray],
        axes: Mapping[str, Column],
        loss: str = "test/loss",
        own: Iterable[str] | None = None,
    ):
        tuning = table.status == "tuning"
        self.table = table[~tuning] if tuning.any() else table  # which may be large
        self.swept, self.heatmaps, self.last, self.axes, self.loss = swept, heatmaps, last(table), axes, loss
        self.own = set(swept if own is None else own)
        self.base = dict(base)
        # Points of the file do not name the user's keys, so these need a value that has rows.
        for key in set(swept) - self.own if len(self.last) else ():
            self.base[key] = at_base(self.last, [key], base)[key].iloc[0]

    @property
    def varying(self) -> list[str]:
        """The swept keys that have several values."""
        return [key for key in self.swept if self.last[key].nunique() > 1]

    def values(self, key: str) -> list[Any]:
        """The values of a swept key, in order."""
        return sorted(self.last[key].unique())

    def only(self, key: str, value: Any) -> Data:
        """The rows at one value of a swept key, as if it were not swept."""
        one = copy.copy(self)
        one.table, one.last = (rows[rows[key] == value] for rows in (self.table, self.last))
        one.swept, one.base = [other for other in self.swept if other != key], self.base | {key: value}
        return one

    def goes_with(self, key: str, drawn: Iterable[str]) -> bool:
        """Does the key have one value wherever the `drawn` ones have theirs? Then what shows these shows it too."""
        places = [other for other in drawn if other in self.swept]
        return bool(places) and bool(len(self.last)) and int(self.last.groupby(places)[key].nunique().max()) == 1

    def settled(self, drawn: Iterable[str], at: Mapping[str, Any]) -> dict[str, Any]:
        """The one value that a figure shows of each swept key that it does not draw: that in `at`, of the base, or the largest.

        A key that goes with what is drawn is left alone.
        """
        rows, drawn = self.last, [key for key in drawn if key in self.swept]
        for key, value in at.items():
            rows = rows[rows[key] == plain(value)]
        others = [key for key in self.swept if key not in (*drawn, *at)]
        if drawn and len(rows):
            values = rows.groupby(drawn)[others].nunique()
            others = [key for key in others if (values[key] > 1).any()]
        rows = at_base(rows, others, self.base)
        return {key: plain(value) for key, value in at.items()} | (
            {key: rows[key].iloc[0] for key in others} if len(rows) else {}
        )

    def at_point(self, rows: pd.DataFrame, spec: dict[str, Any]) -> pd.DataFrame:
        """The rows at the one point that a figure shows (`settled`), with all values of the keys that it draws."""
        for key, value in self.settled(drawn(spec), spec.get("at", {})).items():
            rows = rows[rows[key] == value]
        return rows

    def at(self, point: dict[str, Any], rows: pd.DataFrame | None = None) -> pd.DataFrame:
        """The last rows (or those of `rows`) at exactly this point: a swept key that it does not name has its base value."""
        rows = self.last if rows is None else rows
        for key in self.swept:
            rows = rows[rows[key] == plain(point.get(key, self.base[key]))]
        return rows


def drawn(spec: Mapping[str, Any]) -> list[str]:
    """The swept keys that a figure has an axis, or a line or panel a value, for."""
    return [spec[axis] for axis in ("x", "y", "by", "over") if spec.get(axis)]


def mean(values: pd.Series, column: Column) -> statistics.Estimate:
    """The mean of a column with its 95 % interval within the column's bounds; on log axes the geometric mean."""
    values = values.dropna()
    if not column.log:
        return statistics.estimate(values, bounds=column.bounds)
    low, high = (np.log(end) if end else None for end in column.bounds)
    logs = statistics.estimate(np.log(values.clip(lower=statistics.TINY)), bounds=(low, high))
    return statistics.Estimate(float(np.exp(logs.mean)), float(np.exp(logs.low)), float(np.exp(logs.high)), logs.n)


def defined(metrics: Iterable[str], rows: pd.DataFrame) -> list[str]:
    """Those of the metrics that some of the rows have."""
    return [metric for metric in metrics if metric in rows and rows[metric].notna().any()]


def name_undefined(figure: Figure, metrics: Iterable[str], rows: pd.DataFrame, data: Data) -> None:
    """Has a figure say which of the metrics that it was asked for have no panel."""
    for metric in sorted({*metrics} & {*data.axes} - {*defined(metrics, rows)}):
        words = " ".join(data.axes[metric].label.split())
        note(figure, f"left out: {words} ({UNDEFINED.get(metric, 'no run has it')})")


def marker_of(arm: str) -> str:
    """The marker of an arm in every figure; there are fewer markers than arms."""
    return MARKERS[list(ARMS).index(arm) % len(MARKERS)]


def line(
    panel,
    arm: str,
    groups: Iterable[tuple[float, pd.DataFrame]],
    metric: str,
    column: Column,
    joined: bool = True,
    names: Mapping[float, str] = {},
) -> None:
    """Means and intervals of an arm's finite runs at places of the x axis, in the arm's colour and marker; dashed if it is a control.

    `names` are those of places that have no tick.
    """
    points = [
        Point(place, mean(rows[metric], column), seeds=by_seed(rows, metric), at=names.get(place, ""))
        for place, rows in ((place, rows[rows.status == "ok"]) for place, rows in groups)
    ]
    style = {"color": ARMS[arm].colour, "marker": marker_of(arm), "ms": 4, "capsize": 2, "lw": 1.2, "elinewidth": 0.8}
    style["ls"] = "" if not joined else "--" if is_control(arm) else "-"
    intervals(panel, points, ARMS[arm].label, style)


def legend(figure: Figure, *panels) -> None:
    """One legend below the figure, for all of `panels`, with as many columns as fit."""
    found = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    entry = 0.075 * max(map(len, found), default=0) + 0.6  # inches
    columns = max(1, min(4 if len(found) == 4 else 3, int(figure.get_figwidth() / entry)))
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns, fontsize=8)
