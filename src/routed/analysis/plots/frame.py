"""What every figure shares: the rows it draws, axes and their words, a line with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.contracts import Column
from routed.engine.rows import at_base, last
from routed.plan.arms import ARMS, is_control

#: swept key -> its words on an axis.
KEYS = {
    "data.samples": "training samples",
    "data.separation": "separation c",
    "data.positions": "tokens of a sample",
    "data.clusters": "clusters",
    "experts.depth": "layers of an expert",
    "data.dim": "dimensions",
    "data.noise": "sigma",
    "experts.count": "experts",
    "optimizer.weight_decay": "weight decay",
    "transformer.dim": "width of the trunk",
}

#: Log axes end here: an oracle with constant experts reaches 1e-8 and would flatten everything else.
FLOOR = 1e-3

#: Lines that are no arms.
SHADES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")

STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "routed",
    "text.parse_math": False,  # names are text, also one with two dollars
    "figure.constrained_layout.use": True, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "figure.dpi": 110,
}  # fmt: skip


class Data:
    """The rows of a workdir as figures need them; `base` is the flat config that points depart from, `axes` how columns are shown."""

    def __init__(
        self,
        table: pd.DataFrame,
        swept: list[str],
        base: dict[str, Any],
        heatmaps: dict[str, np.ndarray],
        axes: Mapping[str, Column],
    ):
        self.table = table[table.status != "tuning"]
        self.swept, self.base, self.heatmaps, self.last = swept, base, heatmaps, last(table)
        self.axes = axes

    def at_point(self, rows: pd.DataFrame, spec: dict[str, Any]) -> pd.DataFrame:
        """The rows at one point: a swept key that `spec` does not draw has its value in `at`, its base value, or else its largest.

        A key that goes with what is drawn, with one value at each place, is left alone.
        """
        for key, value in spec.get("at", {}).items():
            rows = rows[rows[key] == value]
        drawn = [spec[axis] for axis in ("x", "y") if spec.get(axis) in self.swept]
        others = [key for key in self.swept if key not in drawn]
        if drawn and len(rows):
            values = rows.groupby(drawn)[others].nunique()
            others = [key for key in others if (values[key] > 1).any()]
        return at_base(rows, others, self.base)

    def at(self, point: dict[str, Any], rows: pd.DataFrame | None = None) -> pd.DataFrame:
        """The last rows (or those of `rows`) at exactly this point: a swept key that it does not name has its base value."""
        rows = self.last if rows is None else rows
        for key in self.swept:
            rows = rows[rows[key] == point.get(key, self.base[key])]
        return rows


def mean(values: pd.Series, log: bool) -> statistics.Estimate:
    values = values.dropna()
    if not log:
        return statistics.estimate(values)
    one = statistics.estimate(np.log(values.clip(lower=statistics.TINY)))
    return statistics.Estimate(float(np.exp(one.mean)), float(np.exp(one.low)), float(np.exp(one.high)), one.n)


def marker_of(arm: str) -> str:
    """The marker of an arm in every figure; there are fewer markers than arms."""
    return MARKERS[list(ARMS).index(arm) % len(MARKERS)]


def line(panel, arm: str, points: Sequence[tuple[float | int, statistics.Estimate]], shift: float = 0.0) -> None:
    if not points:
        return
    label, colour = ARMS[arm].label, ARMS[arm].colour
    x = np.array([p[0] for p in points]) + shift
    y = np.array([p[1].mean for p in points])
    low, high = (np.array([p[1][i] for p in points]) for i in (1, 2))
    bars = np.nan_to_num(np.stack([y - low, high - y]))
    panel.errorbar(
        x,
        y,
        bars,
        color=colour,
        marker=marker_of(arm),
        ms=4,
        capsize=2,
        lw=1.2,
        label=label,
        ls="--" if is_control(arm) else "-",
    )


def logarithmic(panel, axis: str = "y") -> None:
    """A log axis (x or y) with readable numbers: powers of ten over decades, plain numbers over less."""
    panel.set(**{f"{axis}scale": "log"})
    low, high = panel.get_ylim() if axis == "y" else panel.get_xlim()
    if low < FLOOR < high:
        panel.set(**{f"{axis}lim": (FLOOR, high)})
        low = FLOOR
    marks = panel.yaxis if axis == "y" else panel.xaxis
    if high / low < 100:
        marks.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low > 4 else (1, 1.5, 2, 3, 4, 5, 7)))
    marks.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    marks.set_minor_formatter(ticker.NullFormatter())


def legend(figure: Figure, panel) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4 if len(handles) == 4 else 3, fontsize=8)
