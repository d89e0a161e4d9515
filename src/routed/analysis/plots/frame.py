"""Rows as charts need them, and the looks of arms: means of runs as points, colours, shapes and lines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from routed.analysis import statistics
from routed.analysis.plots.chart import Chart
from routed.analysis.plots.panels import INK, Point, Series
from routed.contracts import Column
from routed.engine.rows import at_base, format_value, last_evaluations, plain_value
from routed.plan.arms import ARMS, is_control, shown

#: Metric -> the reason why no run has it.
UNDEFINED = {"router/dead": "undefined: fewer than 100 test tokens an expert"}

#: Colours of series that are no arms: Okabe and Ito's palette without its yellow, then Tol's darker ones.
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    INK,
    "#882255",
    "#117733",
    "#999999",
    "#7B3FF2",
    "#5A2A00",
)
#: Palette of sides, whose lines are told apart by colour and shape.
PALETTE = ("#0072B2", "#D55E00", *COLOURS[2:4], "#E69F00", *COLOURS[4:5], *COLOURS[6:])

#: Vega symbols of series; paths are those that Vega has no name for.
SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "triangle-down",
    "cross",
    "M-.9-.5L-.5-.9L0-.4L.5-.9L.9-.5L.4 0L.9.5L.5.9L0 .4L-.5.9L-.9.5L-.4 0Z",
    "triangle-left",
    "triangle-right",
    "M0-.9L.86-.28L.53.73L-.53.73L-.86-.28Z",
    "M0-.9L.78-.45L.78.45L0 .9L-.78.45L-.78-.45Z",
    "M0-1L.25-.3L1-.3L.4.15L.6.9L0 .45L-.6.9L-.4.15L-1-.3L-.25-.3Z",
)


class Data:
    """The rows of a workdir; `base` is the flat config that points depart from, `axes` maps columns to how they are
    shown.

    Arms are compared by the column `loss`. The experiment file sweeps the keys `own`, the user the rest of `swept`.
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
        self.table = table[~tuning] if tuning.any() else table  # no copy of a large table
        self.swept, self.heatmaps, self.last, self.axes, self.loss = (
            swept,
            heatmaps,
            last_evaluations(table),
            axes,
            loss,
        )
        self.own = set(swept if own is None else own)
        #: The column of a metric at a point, whose task may have another constant than that of `base`.
        self.column: Callable[[str, Mapping[str, Any]], Column | None] = lambda metric, at: axes.get(metric)
        self.base = dict(base)
        # Points of the file do not name the user's keys: each needs a base value that has rows.
        for key in set(swept) - self.own if len(self.last) else ():
            self.base[key] = at_base(self.last, [key], base)[key].iloc[0]

    @property
    def varying(self) -> list[str]:
        """Swept keys with several values."""
        return [key for key in self.swept if self.last[key].nunique() > 1]

    def values(self, key: str) -> list[Any]:
        """Returns the values of a swept key, sorted."""
        return sorted(self.last[key].unique())

    def only(self, key: str, value: Any) -> Data:
        """Returns the data at one value of a swept key, which then counts as not swept."""
        part = copy.copy(self)
        part.table, part.last = (rows[rows[key] == value] for rows in (self.table, self.last))
        part.swept, part.base = [name for name in self.swept if name != key], self.base | {key: value}
        return part

    def goes_with(self, key: str, drawn: Iterable[str]) -> bool:
        """True if the values of the `drawn` keys determine that of the key, which is then shown with them."""
        keys = [name for name in drawn if name in self.swept]
        return bool(keys) and bool(len(self.last)) and int(self.last.groupby(keys)[key].nunique().max()) == 1

    def settled(self, drawn: Iterable[str], at: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the value of each swept key that a figure does not draw: that in `at`, of the base, or the largest.

        A key that the drawn keys determine is left out.
        """
        rows, drawn = self.last, [key for key in drawn if key in self.swept]
        for key, value in at.items():
            rows = rows[rows[key] == plain_value(value)]
        free = [key for key in self.swept if key not in (*drawn, *at)]
        if drawn and len(rows):
            counts = rows.groupby(drawn)[free].nunique()
            free = [key for key in free if (counts[key] > 1).any()]
        rows = at_base(rows, free, self.base)
        return {key: plain_value(value) for key, value in at.items()} | (
            {key: rows[key].iloc[0] for key in free} if len(rows) else {}
        )

    def at_point(self, rows: pd.DataFrame, spec: dict[str, Any]) -> pd.DataFrame:
        """Returns the rows at the point that a figure shows (`settled`), with all values of the keys that it draws."""
        for key, value in self.settled(drawn(spec), spec.get("at", {})).items():
            rows = rows[rows[key] == value]
        return rows

    def at(self, point: dict[str, Any], rows: pd.DataFrame | None = None) -> pd.DataFrame:
        """Returns the last rows (or those of `rows`) at a point; a swept key that the point does not name has its
        base value.
        """
        rows = self.last if rows is None else rows
        for key in self.swept:
            rows = rows[rows[key] == plain_value(point.get(key, self.base[key]))]
        return rows


def drawn(spec: Mapping[str, Any]) -> list[str]:
    """Returns the settings that a figure draws: those of its axes, lines and panels."""
    return [spec[axis] for axis in ("x", "y", "by", "over") if spec.get(axis)]


def mean(values: pd.Series, column: Column) -> statistics.Estimate:
    """Returns the mean of a column with its 95 % interval within its bounds; on log axes the geometric mean."""
    values = values.dropna()
    if not column.log:
        return statistics.estimate(values, bounds=column.bounds)
    low, high = (np.log(end) if end else None for end in column.bounds)
    logs = statistics.estimate(np.log(values.clip(lower=statistics.TINY)), bounds=(low, high))
    return statistics.Estimate(float(np.exp(logs.mean)), float(np.exp(logs.low)), float(np.exp(logs.high)), logs.n)


def defined(metrics: Iterable[str], rows: pd.DataFrame) -> list[str]:
    """Returns the metrics that some of the rows have."""
    return [metric for metric in metrics if metric in rows and rows[metric].notna().any()]


def note_undefined(chart: Chart, metrics: Iterable[str], rows: pd.DataFrame, data: Data, key: str = "") -> None:
    """Notes the metrics of a figure that no run has, and of the others the values of `key` at which no run has them."""
    present = defined(metrics, rows)
    for metric in sorted({*metrics} & {*data.axes}):
        label, why = " ".join(data.axes[metric].label.split()), UNDEFINED.get(metric, "no run has it")
        if metric not in present:
            chart.note(f"left out: {label} ({why})")
        elif key in rows and (counts := rows.groupby(key)[metric].count()).min() == 0:
            chart.note(f"no {label} at {key} = {', '.join(map(format_value, counts.index[counts == 0]))} ({why})")


def shape_of(arm: str) -> str:
    """Returns the symbol of an arm in every figure; arms are more than symbols."""
    return SHAPES[list(ARMS).index(arm) % len(SHAPES)]


def series_of(arm: str) -> Series:
    """Returns the looks of an arm in every figure; lines of controls are dashed."""
    return Series(ARMS[arm].label, ARMS[arm].colour, shape_of(arm), is_control(arm))


def seeds_of(rows: pd.DataFrame, metric: str) -> dict[int, float]:
    """Returns the values of a metric by seed, of finished runs."""
    good = rows[rows.status == "ok"]
    return dict(zip(good.seed.tolist(), good[metric].tolist(), strict=True))


def point_of(position: float, rows: pd.DataFrame, metric: str, column: Column, at: str = "") -> Point:
    """Returns the mean of a metric over finished runs as a point."""
    good = rows[rows.status == "ok"]
    return Point(position, mean(good[metric], column), at, seeds=seeds_of(good, metric))


def arms_of(spec: Mapping[str, Any], rows: pd.DataFrame) -> list[str]:
    """Returns the arms that a figure asks for and that have rows, in the order of the table of arms."""
    return [arm for arm in shown(spec.get("arms")) if arm in set(rows.arm)]
