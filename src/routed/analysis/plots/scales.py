"""Axes: labels of swept keys, positions of their values, and the ends of axes of metrics."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from routed.analysis.plots.chart import Chart
from routed.analysis.plots.panels import Axis, Number, Panel
from routed.contracts import Column
from routed.engine.rows import format_value

#: Swept key -> its label on an axis.
KEYS = {
    "data.samples": "training samples",
    "data.separation": "separation c",
    "data.irrelevant_fraction": "irrelevant share s",
    "data.positions": "tokens of a sample",
    "data.clusters": "clusters",
    "experts.depth": "layers of an expert",
    "data.dim": "dimensions",
    "data.noise": "sigma",
    "experts.count": "experts",
    "experts.width": "width of an expert",
    "router.freeze_at": "share of training after which the router is frozen",
    "router.fit_at": "share of training after which k-means is fitted",
    "router.init_scale": "factor on the initial weights of the router",
    "router.table_seed": "table of the hash",
    "selection.patches": "patches that an expert takes (l)",
    "optimizer.weight_decay": "weight decay",
    "transformer.dim": "width of the trunk",
    "selection.competition_rate": "share of competing steps (lambda)",
    "selection.k": "experts a token (K)",
    "selection.distillation_coefficient": "coefficient of the loss that the contest teaches the router by",
}

#: Log axes end here: an oracle with constant experts reaches 1e-8 and would flatten everything else.
FLOOR = 1e-3

#: Pixels of a letter of a tick's label.
LETTER = 6.2

#: Unit of an axis: its label, and the factor from the setting's values to those of a paper.
Unit = tuple[str, float] | None


def label_of(key: str) -> str:
    """Returns the label of a setting on an axis."""
    return KEYS.get(key, key)


def value_label(value: Any, unit: Unit = None) -> str:
    """Returns the label of a setting's value, in the unit of a paper if there is one."""
    return format_value(value if unit is None else unit[1] * value)


def are_numbers(values: Iterable[Any]) -> bool:
    """True if all values are numbers, so that a line between them has a meaning."""
    return all(isinstance(value, (int, float, np.number)) and not isinstance(value, bool) for value in values)


def padded(low: Number, high: Number, log: bool = False, share: float = 0.05) -> tuple[float, float]:
    """Returns the ends of an axis with room beyond the outermost values."""
    if log:
        low, high = math.log(low), math.log(high)
    room = share * (high - low) or (0.1 if log else 0.5)
    ends = low - room, high + room
    return (math.exp(ends[0]), math.exp(ends[1])) if log else (float(ends[0]), float(ends[1]))


def sweep_axis(key: str, values: Sequence[Any], unit: Unit = None, width: int = 250) -> tuple[Axis, dict[Any, float]]:
    """Returns the axis of a swept key, and the positions of its values.

    The axis is logarithmic where numbers span a decade. Words stand side by side, as do numbers too uneven to be told
    apart otherwise (0, .001, .01, or .1, .5, .9, .99), and as does a single number, so that `dodge` has room.
    """
    numbers = are_numbers(values)
    log = bool(numbers and min(values) > 0 and max(values) / min(values) >= 10)
    steps = np.diff(np.log(values) if log else values) if numbers else np.array([])
    uneven = len(steps) and steps.min() < min(steps.sum() / (22 if log else 8), steps.mean() / 2)
    log = log and not uneven
    if not numbers or len(values) == 1 or uneven:
        positions = {value: float(index) for index, value in enumerate(values)}
        domain = (-0.5, len(values) - 0.5)
    else:
        positions = {value: float(value) for value in values}
        domain = padded(min(values), max(values), log)
    letters = width / LETTER
    labelled = _apart(values, letters) if log else values[:: -(-len(values) // 12)]
    ticks = {positions[value]: value_label(value, unit) for value in labelled}
    crowded = sum(len(label) + 2 for label in ticks.values()) > letters
    label = unit[0] if unit else label_of(key)
    return Axis(label, domain, log, ticks, angle=-40 if crowded else 0, all_labels=crowded), positions


def _apart(values: Sequence[Any], letters: float) -> list[Any]:
    """Returns the values of a log axis whose labels do not touch, on an axis as wide as `letters`; both ends among
    them.
    """
    offsets = letters * (np.log(values) - math.log(values[0])) / math.log(values[-1] / values[0])
    widths = [len(format_value(value)) + 1 for value in values]
    chosen = [0]
    for i in range(1, len(values) - 1):
        free = [abs(offsets[i] - offsets[j]) >= (widths[i] + widths[j]) / 2 for j in (chosen[-1], -1)]
        chosen += [i] if all(free) else []
    return [values[i] for i in [*chosen, len(values) - 1]]


def dodge(axis: Axis, positions: Mapping[Any, float], lines: Sequence[Any]) -> dict[Any, dict[Any, float]]:
    """Returns the position of each line at each value, so that no interval hides another.

    Above numbers lines are an eightieth of the axis apart, together no wider than two fifths of the least step: too
    close to be read as another number. At words, and at a single number, they take all the room.
    """
    if not lines:
        return {}
    at = np.array([*positions.values()], float)
    at = np.log(at) if axis.log else at
    steps = np.diff(np.sort(at)) if are_numbers(positions) else np.array([])
    apart = min(steps.sum() / 80, 0.4 * steps.min() / len(lines)) if len(steps) else 0.6 / len(lines)
    offsets = apart * (np.arange(len(lines)) - (len(lines) - 1) / 2)
    moved = [np.exp(at + offset) if axis.log else at + offset for offset in offsets]
    return {
        line: dict(zip(positions, map(float, shifted), strict=True)) for line, shifted in zip(lines, moved, strict=True)
    }


def set_value_axes(chart: Chart, panels: Sequence[Panel], column: Column, label: str = "", zero: bool = False) -> None:
    """Sets the shared axis of values of panels: that of a metric, no further than its means and bounds need.

    Intervals of two seeds may be a hundred times as long as the differences that a chart shows: an axis cuts them,
    with a note.
    """
    log = column.log
    rules = [
        row["value"]
        for panel in panels
        for row in panel.rows.get("rules", ())
        if row["axis"] == ("x" if panel.horizontal else "y")
    ]
    estimates = [estimate for panel in panels for estimate in panel.estimates]
    means = _scaled([*(estimate.mean for estimate in estimates), *rules, *([0.0] if zero else [])], log)
    ends = _scaled([end for estimate in estimates for end in (estimate.low, estimate.high)], log)
    if not len(means):
        return
    low, high = min([*means, *ends]), max([*means, *ends])
    floor = math.log10(FLOOR) if log and means.max() >= math.log10(FLOOR) else -math.inf
    means, low = np.maximum(means, floor), max(low, floor)
    room = max(np.ptp(means), 0.3 if log else 0.5 * np.abs(means).max()) or math.inf
    if low < means.min() - room or high > means.max() + room:
        low, high = max(low, means.min() - room), min(high, means.max() + room)
        chart.note("intervals are cut where an axis ends")
    low, high = padded(low, high, share=0.05) if low < high else (low - 0.1, high + 0.1)
    low = max(low, floor)
    domain = (10**low, 10**high) if log else bounded(low, high, column)
    for panel in panels:
        letters = int((panel.width if panel.horizontal else panel.height) / LETTER)
        axis = Axis("\n".join(line for part in label.split("\n") for line in textwrap.wrap(part, letters)), domain, log)
        setattr(panel, "x" if panel.horizontal else "y", axis)
        if math.isfinite(floor) and low <= floor:
            _name_hidden(panel)


def _scaled(values: Iterable[float], log: bool) -> np.ndarray:
    finite = np.array([value for value in values if np.isfinite(value) and (value > 0 or not log)])
    return np.log10(finite) if log else finite


def _name_hidden(panel: Panel) -> None:
    """Names the series of a panel with means below `FLOOR`."""
    hidden = dict.fromkeys(row["series"] for row in panel.rows.get("means", ()) if row["value"] < FLOOR)
    if hidden:
        panel.text(f"below {FLOOR:g}: {', '.join(hidden)}", "left", "bottom", align="left", dy=-3, fontSize=8)


def bounded(low: Number, high: Number, column: Column) -> tuple[float, float]:
    """Returns the ends of an axis of a column, no further beyond its bounds than symbols need."""
    least, most = (np.nan if end is None else end for end in column.bounds)
    margin = 0.03 * (np.fmin(high, most) - np.fmax(low, least))
    return float(np.fmax(low, least - margin)), float(np.fmin(high, most + margin))
