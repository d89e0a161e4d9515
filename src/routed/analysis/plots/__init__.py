"""Charts from rows. A figure is a dict with a `kind`; PLOTS maps kinds to what draws them. One description gives
page, SVG and PNG.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from routed.analysis.plots.chart import Chart
from routed.analysis.plots.curves import CURVES, TRAINING
from routed.analysis.plots.frame import Data
from routed.analysis.plots.gap import GAP
from routed.analysis.plots.kind import COMMON, Plot
from routed.analysis.plots.maps import PHASE, ROUTING
from routed.analysis.plots.methods import FOREST, METHODS
from routed.analysis.plots.paired import PAIRED
from routed.analysis.plots.panels import Axis, Panel, Point, Series
from routed.analysis.plots.rendering import png, svg
from routed.analysis.plots.swept import AGAINST, MULTIPLES, ONTO
from routed.analysis.plots.tokens import SAMPLE_PLOT
from routed.contracts import UserError, nearest
from routed.plan.arms import ARMS
from routed.plan.config import declared, problem_of

#: kind -> plot. A paper's file and a user's file add to it.
PLOTS: dict[str, Plot] = {
    "curves": CURVES,
    "training": TRAINING,
    "gap": GAP,
    "paired": PAIRED,
    "methods": METHODS,
    "forest": FOREST,
    "phase": PHASE,
    "routing": ROUTING,
    "against": AGAINST,
    "multiples": MULTIPLES,
    "sample": SAMPLE_PLOT,
}


def check(spec: Mapping[str, Any]) -> None:
    """Refuses a figure that cannot be drawn, before anything is trained.

    Raises:
      UserError: an unknown kind; a missing or an unknown key.
    """
    name, kind = spec.get("name", "(without a name)"), spec.get("kind")
    if kind not in PLOTS:
        raise UserError(
            f"figure {name}: unknown kind {kind!r}{nearest(str(kind), PLOTS)}; known:"
            f" {', '.join(PLOTS)}; an import of routed.papers.NAME adds the kinds of a paper"
        )
    plot = PLOTS[kind]
    keys = f"keys of this kind: {', '.join(plot.keys)}"
    if missing := [key for key in ("name", *plot.required) if key not in spec]:
        raise UserError(f"figure {name}: kind {kind!r} needs the key {missing[0]!r}; {keys}")
    if not re.fullmatch(r"\w[\w.-]{0,79}", str(name), re.ASCII):
        raise UserError(f"figure {name!r}: a name has 1 to 80 letters, digits, _, . and -, the first no . or -")
    if "of" in spec and (not isinstance(spec["of"], Mapping) or spec["of"].get("kind") not in ONTO):
        raise UserError(f"figure {name}: the figure in 'of' must have one of the kinds {', '.join(ONTO)}")
    if unknown := [key for key in spec if key not in plot.keys]:
        key = unknown[0]
        raise UserError(f"figure {name}: kind {kind!r} has no key {key!r}{nearest(key, plot.keys)}; {keys}")


def check_names(spec: Mapping[str, Any], config: ConfigDict) -> None:
    """Refuses settings, arms and columns that do not exist, in a figure of a kind that comes with `routed`.

    Raises:
      UserError: names the figure and the wrong name.
    """
    if not PLOTS[spec["kind"]].draw.__module__.startswith("routed."):
        return
    columns, of = problem_of(config).columns(config), lambda *keys: [spec[key] for key in keys if key in spec]
    for role, listed, existing in (
        ("setting", [*of("x", "y", "by", "over"), *spec.get("at", {})], declared()),
        ("arm", [*of("arm"), *itertools.chain(*of("arms", "against"))], ARMS),
        ("column", [*of("metric"), *itertools.chain(*of("metrics"))], columns),
    ):
        for name in listed:
            if name not in existing and name.rpartition("/")[0] not in columns:
                raise UserError(f"figure {spec['name']}: there is no {role} {name!r}{nearest(name, existing)}")
    if "of" in spec:
        check_names({**spec["of"], "name": spec["name"]}, config)


def draw(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the chart of a figure, or None when its rows are missing.

    Raises:
      UserError: the figure cannot be drawn.
    """
    check(spec)
    chart = PLOTS[spec["kind"]].draw(spec, data)
    if chart is not None and not isinstance(chart, Chart):  # Vega-Lite, or Altair
        chart = Chart([], spec=dict(chart) if isinstance(chart, Mapping) else chart.to_dict())
    if chart is None:
        return None
    if chart.spec is None:
        chart.panels = [panel for panel in chart.panels if panel.rows]  # Vega-Lite refuses a panel without marks
        if not chart.panels:
            return None
    chart.explain_intervals()
    return chart


__all__ = [
    "COMMON", "PLOTS", "Axis", "Chart", "Data", "Panel", "Plot", "Point", "Series", "check", "check_names", "draw",
    "png", "svg",
]  # fmt: skip
