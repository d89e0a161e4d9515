"""All figures of a report: those that the file asks for, and those that its swept keys need beside them, with captions.

Nothing is left out in silence: a swept key that no figure of the file shows gets figures of its own, computed from the rows, and a
figure that shows one value of a key of several says so, and where the others are.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from routed.analysis.plots import PLOTS, draw
from routed.analysis.plots.frame import Data
from routed.analysis.plots.marks import notes
from routed.analysis.plots.scales import KEYS
from routed.analysis.plots.swept import MOST, ONTO
from routed.engine.rows import shown

Spec = dict[str, Any]

#: Settings that a figure's title names, at most.
NAMED = 3


class Drawn(NamedTuple):
    """A figure of the report, by its place in it."""

    number: int
    name: str
    drawn: Figure
    caption: str


def draw_all(specs: Sequence[Spec], data: Data) -> tuple[list[Drawn], list[str]]:
    """The figures that `specs` ask for, after those of the swept keys that none of them shows; and the names of those without rows."""
    own = [(spec, figure) for spec in specs if (figure := draw(spec, data)) is not None]
    added = further([spec for spec, _ in own], data)
    pairs = [(spec, figure) for spec in added if (figure := draw(spec, data)) is not None] + own
    for spec, figure in pairs:
        words = textwrap.fill("; ".join([title(spec, data), *notes(figure)]), int(17 * figure.get_figwidth()))
        figure.suptitle(words, fontsize=8, x=0.01, ha="left", color="#444444")
    texts = captions(pairs, data)
    figures = [
        Drawn(number, spec["name"], figure, text)
        for number, ((spec, figure), text) in enumerate(zip(pairs, texts, strict=True), 1)
    ]
    names = {figure.name for figure in figures}
    return figures, [spec["name"] for spec in specs if spec["name"] not in names]


def title(spec: Spec, data: Data) -> str:
    """What a figure shows when it has left its page: its `title`, the values of what neither that (its `at`) nor an axis says, and its seeds."""
    point = data.settled(axes_of(spec, data), spec.get("at", {}))
    words = [spec["title"]] if "title" in spec else []
    unsaid = [key for key in point if not (words and key in spec.get("at", {}))]
    told = [key for key in unsaid if key in data.varying] or unsaid[:NAMED]
    words += [f"{KEYS.get(key, key)} = {shown(point[key])}" for key in told[:NAMED]]
    words += [f"{len(told) - NAMED} more settings as in the caption"] if len(told) > NAMED else []
    if PLOTS[spec["kind"]].alone:
        return ", ".join([*words, f"seed {data.base['seed']}"])
    rows = data.last
    for key, value in point.items():
        rows = rows[rows[key] == value]
    seeds = rows.groupby([*data.swept, "arm"]).seed.nunique()
    count = f"{seeds.min()} to {seeds.max()}" if len(seeds) and seeds.min() < seeds.max() else f"{seeds.max()}"
    return ", ".join([*words, f"n = {count} seeds" if len(seeds) else "no finished run"])


def further(specs: Sequence[Spec], data: Data) -> list[Spec]:
    """The figures that the swept keys need which no figure of `specs` shows: everything against the key, and more.

    A map for two keys that were swept together, and the figures that have an axis of their own at each value of the key.
    """
    keys = unshown(specs, data)
    figures: list[Spec] = [{"kind": "against", "name": f"by-{key}", "x": key} for key in keys]
    for x, y in itertools.combinations(keys, 2):
        if not (data.goes_with(x, [y]) or data.goes_with(y, [x])):
            figures.append({"kind": "phase", "name": f"map-{x}-{y}", "x": x, "y": y})
    for key, spec in itertools.product(keys, specs):
        if key in spec.get("at", {}):  # it has one value there
            continue
        if spec["kind"] in ONTO and spec.get("x") in data.swept and (values := _values_with_axis(key, spec, data)):
            figure = {"kind": "multiples", "name": f"{spec['name']}-by-{key}", "of": spec, "over": key}
            figures.append(figure | {"values": (kept := _spread(values)), "left_out": sorted({*values} - {*kept})})
    return figures


def unshown(specs: Sequence[Spec], data: Data) -> list[str]:
    """The varying keys of which no figure shows every value: as its axis, or as points or figures that have names.

    Of keys that go with each other the first stands for all.
    """
    axes = [axes_of(spec, data) for spec in specs]
    keys: list[str] = []
    for key in data.varying:
        named = {value for spec in specs for value in _named_values(key, spec, data)}
        if named >= {*data.last[key]} or any(key in figure for figure in axes):
            continue
        if not any(data.goes_with(key, figure) for figure in (*axes, *([other] for other in keys))):
            keys.append(key)
    return keys


def axes_of(spec: Spec, data: Data) -> list[str]:
    """The swept keys of which a figure shows every value."""
    return [key for key in PLOTS[spec["kind"]].axes(spec, data) if key in data.swept]


def captions(pairs: Sequence[tuple[Spec, Figure]], data: Data) -> list[str]:
    """What stands below each figure: the words of its kind, what it leaves out, and where to look for that."""
    specs = [spec for spec, _ in pairs]
    shows = [{*axes_of(spec, data), *spec.get("at", {})} for spec in specs]
    texts = []
    for number, (spec, figure) in enumerate(pairs, 1):
        caption = PLOTS[spec["kind"]].caption
        sentences = [f"{spec['title']}."] if "title" in spec else []
        sentences.append(caption if isinstance(caption, str) else caption(spec, data))
        sentences += [f"{words[0].upper()}{words[1:]}." for words in notes(figure)]
        if "of" in spec:
            sentences.append(f"Figure {specs.index(spec['of']) + 1} at each value of {spec['over']}, on shared axes.")
        if spec.get("left_out"):
            sentences.append(f"Left out, and in the table: {spec['over']} = {', '.join(map(shown, spec['left_out']))}.")
        point = data.settled(axes_of(spec, data), spec.get("at", {}))
        if settled := {key: value for key, value in point.items() if key in data.varying}:
            others = [other for other, keys in enumerate(shows, 1) if keys & {*settled} and other != number]
            where = f"figure{'s' * (len(others) > 1)} {_listed(others)}" if others else "the table"
            words = ", ".join(f"{key} = {shown(value)}" for key, value in settled.items())
            sentences.append(f"At {words}; the others: {where}.")
        texts.append(" ".join(filter(None, sentences)))
    return texts


def _named_values(key: str, spec: Spec, data: Data) -> list[Any]:
    """The values of a key at the points that a figure names, or at its own."""
    points = [*spec.get("methods", {}).values(), *spec.get("lines", {}).values()]
    own = [spec["at"][key]] if key in spec.get("at", {}) else []
    return [point.get(key, data.base[key]) for point in points] + own


def _values_with_axis(key: str, spec: Spec, data: Data) -> list[Any]:
    """The values of a key at which a figure's own axis goes on, if there are several."""
    lengths = data.last.groupby(key)[spec["x"]].nunique()
    values = [value for value in data.values(key) if lengths[value] > 1]
    return values if len(values) > 1 else []


def _spread(values: list[Any]) -> list[Any]:
    """At most `MOST` of the values, spread evenly over them, with both ends."""
    places = np.linspace(0, len(values) - 1, min(MOST, len(values))).round().astype(int)
    return [values[place] for place in places]


def _listed(numbers: list[int]) -> str:
    """Numbers in words: 1, 2 and 5 to 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
