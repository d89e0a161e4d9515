"""All figures of a report: those of the experiment file, and those that its swept keys need beside them, with captions.

A swept key that no figure of the file shows gets figures of its own. A figure that shows one of several values of a
key names the value, and the figures with the other values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging as log

from routed.analysis.plots import PLOTS, draw
from routed.analysis.plots.chart import Chart
from routed.analysis.plots.frame import Data, defined
from routed.analysis.plots.scales import label_of
from routed.analysis.plots.swept import MOST, ONTO
from routed.analysis.wording import listed, paragraphs
from routed.contracts import UserError
from routed.engine.rows import format_value
from routed.training.probes import own_columns

Spec = dict[str, Any]

#: Settings that a figure's title names, at most.
NAMED = 3


class Drawn(NamedTuple):
    """A figure of the report with its number."""

    number: int
    name: str
    drawn: Chart
    caption: str


def draw_all(specs: Sequence[Spec], data: Data) -> tuple[list[Drawn], list[str]]:
    """Returns the figures of `specs` after the automatic ones, then those of columns that none shows, and the names of
    figures without rows.
    """
    drawn = lambda some: [(spec, chart) for spec in some if (chart := _drawn(spec, data)) is not None]  # noqa: E731
    asked = drawn(specs)
    added = automatic([spec for spec, _ in asked], data)
    pairs = [*drawn(added), *asked, *drawn(own_figures([*added, *specs], data))]
    for spec, chart in pairs:
        chart.title = "; ".join([title(spec, data), *chart.notes])
    texts = captions(pairs, data)
    figures = [
        Drawn(number, spec["name"], chart, text)
        for number, ((spec, chart), text) in enumerate(zip(pairs, texts, strict=True), 1)
    ]
    names = {figure.name for figure in figures}
    return figures, [spec["name"] for spec in specs if spec["name"] not in names]


def _drawn(spec: Spec, data: Data) -> Chart | None:
    """Returns the chart of a figure; one that fails, such as a user's, costs no other figure."""
    try:
        return draw(spec, data)
    except UserError:
        raise
    except Exception as error:
        log.exception("figure %s cannot be drawn: %s: %s", spec["name"], type(error).__name__, error)
        return None


def title(spec: Spec, data: Data) -> str:
    """Returns a title for a figure outside of its page: its `title`, the values that neither that nor an axis says,
    its seeds.
    """
    point = data.settled(axes_of(spec, data), spec.get("at", {}))
    parts = [spec["title"]] if "title" in spec else []
    unsaid = [key for key in point if not (parts and key in spec.get("at", {}))]
    named = [key for key in unsaid if key in data.varying] or unsaid[:NAMED]
    parts += [f"{label_of(key)} = {format_value(point[key])}" for key in named[:NAMED]]
    parts += [f"{len(named) - NAMED} more settings as in the caption"] if len(named) > NAMED else []
    if PLOTS[spec["kind"]].alone:
        return ", ".join([*parts, f"seed {data.base['seed']}"])
    rows = data.last[data.last.status == "ok"]
    for key, value in point.items():
        rows = rows[rows[key] == value]
    seeds = rows.groupby([*data.swept, "arm"]).seed.nunique()
    count = f"{seeds.min()} to {seeds.max()}" if len(seeds) and seeds.min() < seeds.max() else f"{seeds.max()}"
    return ", ".join([*parts, f"n = {count} seed{'s' * (count != '1')}" if len(seeds) else "no finished run"])


def automatic(specs: Sequence[Spec], data: Data) -> list[Spec]:
    """Returns the figures of the swept keys that no figure of `specs` shows.

    Each key gets `against`; two keys that were swept together get a map; figures with an axis of their own get
    `multiples`.
    """
    keys = unshown(specs, data)
    figures: list[Spec] = [{"kind": "against", "name": f"by-{key}", "x": key} for key in keys]
    for x, y in itertools.combinations(keys, 2):
        if not (data.goes_with(x, [y]) or data.goes_with(y, [x])):
            figures.append({"kind": "phase", "name": f"map-{x}-{y}", "x": x, "y": y})
    for key, spec in itertools.product(keys, specs):
        if key in spec.get("at", {}):  # one value
            continue
        if spec["kind"] in ONTO and spec.get("x") in data.swept and (values := _values_with_axis(key, spec, data)):
            chosen = _spread(values)
            figure = {"kind": "multiples", "name": f"{spec['name']}-by-{key}", "of": spec, "over": key}
            figures.append(figure | {"values": chosen, "left_out": sorted({*values} - {*chosen})})
    return figures


def own_figures(specs: Sequence[Spec], data: Data) -> list[Spec]:
    """Returns figures of users' columns and of accuracy that no figure shows: against swept keys, or over training."""
    shown = {name for spec in specs for name in (*spec.get("metrics", ()), spec.get("metric"))}
    columns = [name for name in ("test/accuracy", *own_columns()) if name not in shown]
    if not (metrics := defined(columns, data.last)):
        return []
    by_key = [{"kind": "curves", "name": f"own-by-{key}", "x": key, "metrics": metrics} for key in data.varying]
    return by_key or [{"kind": "training", "name": "own", "metrics": metrics}]


def unshown(specs: Sequence[Spec], data: Data) -> list[str]:
    """Returns the varying keys of which no figure shows every value: as its axis, or as named points or figures.

    Of keys that determine each other the first stands for all.
    """
    axes = [axes_of(spec, data) for spec in specs]
    keys: list[str] = []
    for key in data.varying:
        named = {value for spec in specs for value in _named_values(key, spec, data)}
        if named >= {*data.last[key]} or any(key in figure for figure in axes):
            continue
        if not any(data.goes_with(key, figure) for figure in (*axes, *([chosen] for chosen in keys))):
            keys.append(key)
    return keys


def axes_of(spec: Spec, data: Data) -> list[str]:
    """Returns the swept keys of which a figure shows every value."""
    return [key for key in PLOTS[spec["kind"]].axes(spec, data) if key in data.swept]


def captions(pairs: Sequence[tuple[Spec, Chart]], data: Data) -> list[str]:
    """Returns the captions of figures: that of the kind, notes, and where to find the values that a figure leaves
    out.
    """
    specs = [spec for spec, _ in pairs]
    shows = [{*axes_of(spec, data), *spec.get("at", {})} for spec in specs]
    texts = []
    for number, (spec, chart) in enumerate(pairs, 1):
        caption = PLOTS[spec["kind"]].caption
        point = data.settled(axes_of(spec, data), spec.get("at", {}))
        settled = {key: value for key, value in point.items() if key in data.varying}
        beside = [index for index, keys in enumerate(shows, 1) if keys & {*settled} and index != number]
        sentences = paragraphs(
            "analysis/caption.j2",
            spec={"title": "", "left_out": [], **spec},
            caption=caption if isinstance(caption, str) else caption(spec, data),
            notes=chart.notes,
            of=specs.index(spec["of"]) + 1 if spec.get("of") in specs else None,
            settled=settled,
            beside=beside,
            listed=listed(beside),
        )
        texts.append(" ".join(sentences))
    return texts


def _named_values(key: str, spec: Spec, data: Data) -> list[Any]:
    """Returns the values of a key at the points that a figure names, or in its `at`."""
    points = [*spec.get("methods", {}).values(), *spec.get("lines", {}).values()]
    settled = [spec["at"][key]] if key in spec.get("at", {}) else []
    return [point.get(key, data.base[key]) for point in points] + settled


def _values_with_axis(key: str, spec: Spec, data: Data) -> list[Any]:
    """Returns the values of a key at which a figure's x axis has several values, if these are several."""
    lengths = data.last.groupby(key)[spec["x"]].nunique()
    values = [value for value in data.values(key) if lengths[value] > 1]
    return values if len(values) > 1 else []


def _spread(values: list[Any]) -> list[Any]:
    """Returns at most `MOST` of the values, spread evenly over them, with both ends."""
    indices = np.linspace(0, len(values) - 1, min(MOST, len(values))).round().astype(int)
    return [values[index] for index in indices]
