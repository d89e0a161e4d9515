"""The declaration of a kind of chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from routed.analysis.plots.frame import Data, drawn

#: Keys that every figure may have, with their meaning.
COMMON = {
    "kind": "kind of chart",
    "name": "name of the figure and its files",
    "at": "settings of the point that is shown",
    "title": "words above the chart in place of the settings in `at`",
}


def named_axes(spec: dict[str, Any], data: Data) -> list[str]:
    """Returns the keys of a figure's axes, lines and panels, and the keys that tell its named points apart."""
    points = [*spec.get("methods", {}).values(), *spec.get("lines", {}).values()]
    return [*drawn(spec), *dict.fromkeys(key for point in points for key in point if key in data.own)]


def swept_in(spec: Any, data: Data) -> list[str]:
    """Returns the swept keys that a figure names: as a value, or in the settings of its sides, at any depth."""
    return [key for key in data.swept if _names(spec, key)]


def _names(spec: Any, key: str) -> bool:
    if not isinstance(spec, Mapping):
        return bool(spec == key)
    return key in spec or any(_names(part, key) for part in spec.values())


class Plot(NamedTuple):
    """A kind of chart: its drawing function, its caption, and the keys of a figure of this kind with their meaning.

    `draw(spec, data)` returns a chart (or a Vega-Lite spec, or an Altair chart), or None when its rows are missing.
    The caption is a text, or a function of spec and data. `axes(spec, data)` returns the swept keys of which the
    chart shows every value: title and caption name the value of each other key. A chart may be of the base seed
    `alone`.
    """

    draw: Callable[[dict[str, Any], Data], Any]
    caption: str | Callable[[dict[str, Any], Data], str]
    required: Mapping[str, str] = {}
    optional: Mapping[str, str] = {}
    axes: Callable[[dict[str, Any], Data], list[str]] = named_axes
    alone: bool = False

    @property
    def keys(self) -> dict[str, str]:
        """All keys of a figure of this kind."""
        return {**COMMON, **self.required, **self.optional}
