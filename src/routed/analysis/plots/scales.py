"""The axes of figures: their words and scales, where values stand on them, and what they end at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.container import ErrorbarContainer

from routed.analysis.plots.marks import note
from routed.contracts import Column
from routed.engine.rows import shown

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

#: The label of lines that arms are compared with; no legend shows it.
REFERENCE_LINE = "_reference"


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
    above = any((values >= FLOOR).any() for other in sharing for _, values in _means(other, axis))
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
    low = [name for name, values in _means(panel, axis) if (values < FLOOR).any() and not name.startswith("_")]
    return ", ".join(dict.fromkeys(low))


def _means(panel, axis: str) -> list[tuple[str, np.ndarray]]:
    """The means along an axis of all that has intervals, and of lines with a name, by their labels."""
    lines = [(str(one.get_label()), one.lines[0]) for one in panel.containers if isinstance(one, ErrorbarContainer)]
    lines += [(str(one.get_label()), one) for one in panel.lines if not str(one.get_label()).startswith("_")]
    return [(name, np.asarray(one.get_ydata() if axis == "y" else one.get_xdata(), float)) for name, one in lines]
