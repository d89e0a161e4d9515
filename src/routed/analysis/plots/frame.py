"""What every figure shares: the rows it draws, axes and their words, a line with intervals."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.plots.marks import Point, by_seed, intervals, note
from routed.contracts import Column
from routed.engine.rows import at_base, last, plain, shown
from routed.plan.arms import ARMS, is_control

#: swept key -> its words on an axis.
KEYS = {
    "data.samples": "training samples",
    "data.separation": "separation c",
    "data.share": "irrelevant share s",
    "data.positions": "tokens of a sample",
    "data.clusters": "clusters",
    "experts.depth": "layers of an expert",
    "data.dim": "dimensions",
    "data.noise": "sigma",
    "experts.count": "experts",
    "selection.patches": "patches that an expert takes (l)",
    "optimizer.weight_decay": "weight decay",
    "transformer.dim": "width of the trunk",
    "selection.share": "share of competing steps (lambda)",
    "selection.k": "experts a token (K)",
    "selection.distil": "coefficient of the loss that the contest teaches the router by",
}

#: Log axes end here: an oracle with constant experts reaches 1e-8 and would flatten everything else.
FLOOR = 1e-3

#: Why no run may have a metric.
UNDEFINED = {"router/dead": "undefined: fewer than 100 test tokens an expert"}

#: The label of lines that arms are compared with; no legend shows it.
REFERENCE_LINE = "_reference"

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


def are_numbers(values: Iterable[Any]) -> bool:
    """Are the values of a swept key numbers, so that a line between them means something?"""
    return all(isinstance(value, (int, float, np.number)) and not isinstance(value, bool) for value in values)


def beside(panel, places: Mapping[Any, float], lines: Sequence[Any]) -> dict[Any, dict[Any, float]]:
    """Where each line stands at each value, so that no interval hides another: words, or one value, have room for all side by side.

    Above numbers they are an eightieth of the axis apart, together no wider than two fifths of the least step: too close to be read as another number.
    """
    if not lines:
        return {}
    scale = panel.xaxis.get_transform()
    at = scale.transform(np.array([*places.values()], float))
    steps = np.diff(np.sort(at)) if are_numbers(places) else np.array([])
    apart = min(steps.sum() / 80, 0.4 * steps.min() / len(lines)) if len(steps) else 0.6 / len(lines)
    moved = (scale.inverted().transform(at + apart * (i - (len(lines) - 1) / 2)) for i in range(len(lines)))
    return {line: dict(zip(places, map(float, there), strict=True)) for line, there in zip(lines, moved, strict=True)}


def told(value: Any, axis: tuple[str, float] | None = None) -> str:
    """A value of a swept key as an x axis has it: `axis` is its words and what it multiplies values by, where a paper counts in a unit of its own."""
    return shown(value if axis is None else axis[1] * value)


def lay_out(panel, key: str, values: Sequence[Any], axis: tuple[str, float] | None = None) -> dict[Any, float]:
    """Where the values of a swept key stand on an x axis, which is labelled with them and is logarithmic where they span decades.

    Words stand side by side, and so do numbers too uneven to be told apart otherwise (0, .001, .01); so has one number room for `beside`.
    """
    numbers = are_numbers(values)
    steps = np.diff(values) if numbers else np.array([])
    places: dict[Any, float] = {value: float(value) for value in values} if numbers else {}
    if numbers and min(values) > 0 and max(values) / min(values) >= 10:
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(ticker.NullLocator())
    elif not numbers or len(values) == 1 or (len(steps) and steps.min() < min(steps.sum() / 8, steps.mean() / 2)):
        places = {value: float(place) for place, value in enumerate(values)}
        panel.set_xlim(-0.5, len(values) - 0.5)
    kept = _apart(values) if panel.get_xscale() == "log" else values[:: -(-len(values) // 12)]
    labels = [told(value, axis) for value in kept]
    crowded = sum(len(label) + 2 for label in labels) > 34
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    panel.set_xticks([places[value] for value in kept], labels, **turned)
    panel.set_xlabel(axis[0] if axis else KEYS.get(key, key))
    return places


def _apart(values: Sequence[Any]) -> list[Any]:
    """The values of a logarithmic axis whose labels do not touch, on an axis as wide as 34 letters; both ends are among them."""
    letters = 34 * (np.log(values) - math.log(values[0])) / math.log(values[-1] / values[0])
    wide = [len(shown(value)) + 1 for value in values]
    kept = [0]
    for i in range(1, len(values) - 1):
        free = [abs(letters[i] - letters[other]) >= (wide[i] + wide[other]) / 2 for other in (kept[-1], -1)]
        kept += [i] if all(free) else []
    return [values[i] for i in [*kept, len(values) - 1]]


def finish(panel, column: Column) -> None:
    """The y axis of a metric, when all is drawn: logarithmic if its column is, and no further than its means and bounds need.

    Intervals of two seeds may be a hundred times as long as what they are about: where they leave the axis, it says so.
    """
    if column.log:
        logarithmic(panel)
    low, high = np.log10(panel.get_ylim()) if column.log else panel.get_ylim()
    sharing = panel.get_shared_y_axes().get_siblings(panel)
    lines = [bar.lines[0] for other in sharing for bar in other.containers if isinstance(bar, ErrorbarContainer)]
    lines += [line for other in sharing for line in other.lines if line.get_label() == REFERENCE_LINE]
    if not lines or not np.isfinite([low, high]).all():
        return
    means = np.concatenate([line.get_ydata() for line in lines]).astype(float)
    means = np.log10(np.maximum(means, 10**low)) if column.log else means
    room = max(np.ptp(means), 0.3 if column.log else 0.5 * np.abs(means).max()) or np.inf
    if low < means.min() - room or high > means.max() + room:
        low, high = max(low, means.min() - room), min(high, means.max() + room)
        note(panel.figure, "intervals are cut where an axis ends")
    if not column.log:  # nothing lies beyond a bound, but the markers at it need room
        low, high = bounded(low, high, column)
    if low < high:
        panel.set_ylim(*(10 ** np.array([low, high]) if column.log else (low, high)))
    if column.log:
        _tick(panel)


def bounded(low: float, high: float, column: Column) -> tuple[float, float]:
    """The ends of an axis of a column, no further beyond its bounds than markers need."""
    least, most = (np.nan if end is None else end for end in column.bounds)
    margin = 0.03 * (np.fmin(high, most) - np.fmax(low, least))
    return float(np.fmax(low, least - margin)), float(np.fmin(high, most + margin))


def logarithmic(panel, axis: str = "y") -> None:
    """A log axis (x or y) with readable numbers: powers of ten over decades, plain numbers over less. What lies below `FLOOR` is named, if not all does."""
    panel.set(**{f"{axis}scale": "log"})
    low, high = panel.get_ylim() if axis == "y" else panel.get_xlim()
    sharing = getattr(panel, f"get_shared_{axis}_axes")().get_siblings(panel)
    above = any((one >= FLOOR).any() for other in sharing for one in _values(other, axis).values())
    if low <= FLOOR < high and above:  # equal where another panel has set the limits that they share
        panel.set(**{f"{axis}lim": (FLOOR, high)})
        low = FLOOR
        if hidden := _below(panel, axis):
            panel.text(0.02, 0.01, f"below {FLOOR:g}: {hidden}", transform=panel.transAxes, fontsize=6.5, va="bottom")
    _tick(panel, axis)


def _tick(panel, axis: str = "y") -> None:
    """Numbers beside a log axis, as its ends are now."""
    marks = panel.yaxis if axis == "y" else panel.xaxis
    low, high = panel.get_ylim() if axis == "y" else panel.get_xlim()
    if high / low < 100:
        marks.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low > 4 else (1, 1.5, 2, 3, 4, 5, 7)))
    marks.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    marks.set_minor_formatter(ticker.NullFormatter())


def _below(panel, axis: str) -> str:
    """The names of what has means below `FLOOR`."""
    return ", ".join(name for name, one in _values(panel, axis).items() if (one < FLOOR).any())


def _values(panel, axis: str) -> dict[str, np.ndarray]:
    """The means of what has a name, along an axis."""
    lines = {str(one.get_label()): one.lines[0] for one in panel.containers if isinstance(one, ErrorbarContainer)}
    lines |= {str(one.get_label()): one for one in panel.lines}
    values = {name: one.get_ydata() if axis == "y" else one.get_xdata() for name, one in lines.items()}
    return {name: np.asarray(one, float) for name, one in values.items() if not name.startswith("_")}


def legend(figure: Figure, *panels) -> None:
    """One legend below the figure, for all of `panels`, with as many columns as fit."""
    found = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    entry = 0.075 * max(map(len, found), default=0) + 0.6  # inches
    columns = max(1, min(4 if len(found) == 4 else 3, int(figure.get_figwidth() / entry)))
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns, fontsize=8)
