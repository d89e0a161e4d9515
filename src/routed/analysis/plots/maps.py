"""Matrices: the phase diagram of two swept keys, and routing probabilities by cluster."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from routed.analysis import digits
from routed.analysis.paired_values import ANY_FAIR
from routed.analysis.plots.chart import Chart
from routed.analysis.plots.frame import Data
from routed.analysis.plots.histories import History, dead_at, diagonal, histories
from routed.analysis.plots.kind import Plot
from routed.analysis.plots.paired import advantage, advantage_label, rivals
from routed.analysis.plots.panels import Axis, Panel
from routed.analysis.plots.pictures import Scheme
from routed.analysis.plots.scales import label_of
from routed.engine.rows import format_value
from routed.plan.arms import UNTRAINED

#: Pixels of the side of a cell with a number, and of a map at most.
CELL, LARGEST = (46, 34), 520


def phase(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns maps over (x, y) of the learned router's advantage over each control, with the border between signs.

    The controls are those that `against` names, or the untrained router and the fairest frozen one.
    """
    if spec["x"] not in data.swept or spec["y"] not in data.swept:
        return None
    rows = data.at_point(data.last, spec)
    xs, ys = sorted(rows[spec["x"]].unique()), sorted(rows[spec["y"]].unique())
    usual = (*([UNTRAINED] if UNTRAINED in set(rows.arm) else []), *rivals(data))
    named = [arm for arm in spec.get("against", ()) if arm in set(rows.arm)]
    groups = dict(iter(rows.groupby([spec["y"], spec["x"]])))
    maps = {
        control: [[advantage(groups.get((y, x), rows.iloc[:0]), control, data) for x in xs] for y in ys]
        for control in dict.fromkeys(named or usual)
    }
    sizes = [abs(cell.mean) for lines in maps.values() for line in lines for cell, _ in line if np.isfinite(cell.mean)]
    if not sizes:
        return None
    bound = max(sizes) or 1.0
    scheme = Scheme("redblue", (-bound, bound), f"{advantage_label('control', data)}\n(blue: learned is better)")
    panels = [_map(control, cells, scheme, (spec["x"], xs), (spec["y"], ys)) for control, cells in maps.items()]
    return Chart(panels, columns=2)


def _map(control: str, cells: list, scheme: Scheme, x: tuple[str, list], y: tuple[str, list]) -> Panel:
    """Returns the map of one control."""
    (x_key, xs), (y_key, ys) = x, y
    width, height = (max(230, min(CELL[i] * len(values), LARGEST)) for i, values in enumerate((xs, ys)))
    readable = width / len(xs) > 36 and height / len(ys) > 26
    title = f"against {'the fairest frozen control' if control == ANY_FAIR else control}"
    title += "" if readable else " (numbers: see the table)"
    panel = Panel(_cell_axis(x_key, xs), _cell_axis(y_key, ys), title, width=width, height=height)
    means = np.array([[cell.mean for cell, _ in line] for line in cells])
    filled = []
    for (i, j), value in np.ndenumerate(means):
        estimate, arm = cells[i][j]
        at = f"{label_of(x_key)} {format_value(xs[j])}, {label_of(y_key)} {format_value(ys[i])}"
        if not np.isfinite(value):
            panel.text("no rows", j, i, align="center", baseline="middle", fontSize=8)
            continue
        star = "*" if estimate.low > 0 or estimate.high < 0 else ""
        name = f"\n{arm.removeprefix('frozen_')}" if arm and arm != control else ""
        text = digits.with_interval(estimate[:3])
        fields = {
            "label": f"{value:+.2f}{star}{name}" if readable else "",
            "at": at,
            "text": text,
            "n": int(estimate.n),
            "note": arm or control,
        }
        filled.append((float(j), float(i), value, fields))
    panel.cells(scheme, filled)
    panel.segments(_borders(means > 0, np.isfinite(means)))
    return panel


def _borders(positive: np.ndarray, finite: np.ndarray) -> list[tuple[float, float, float, float]]:
    """Returns the edges between neighbouring cells of different sign, as (x, y, x2, y2)."""
    edges = []
    rows, columns = positive.shape
    for i in range(rows):
        for j in range(columns):
            if j + 1 < columns and finite[i, j] and finite[i, j + 1] and positive[i, j] != positive[i, j + 1]:
                edges.append((j + 0.5, i - 0.5, j + 0.5, i + 0.5))
            if i + 1 < rows and finite[i, j] and finite[i + 1, j] and positive[i, j] != positive[i + 1, j]:
                edges.append((j - 0.5, i + 0.5, j + 0.5, i + 0.5))
    return edges


def _cell_axis(key: str, values: list[Any]) -> Axis:
    every = -(-len(values) // 15)
    ticks = {float(index): format_value(value) for index, value in enumerate(values)}
    chosen = {index: label for index, label in ticks.items() if index % every == 0}
    return Axis(label_of(key), (-0.5, len(values) - 0.5), ticks=chosen, grid=False)


def routing(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns maps of routing probability by cluster and expert at several moments of training, for the base seed.

    Clusters and experts have the order of the best one-to-one match at the end, so a specialised router is a
    diagonal. A router that never changes is shown once. A cross stands above the column of a dead expert.
    """
    routers = [history for history in histories(data, spec) if history.row == "cluster"]
    if not routers:
        return None
    count = max(len(_moments_of(history)) for history in routers)
    routers.sort(key=lambda history: len(_moments_of(history)) < count)  # so that rows of moments are whole
    return Chart([panel for history in routers for panel in _moments(history)], columns=count)


def _moments_of(history: History) -> list[int]:
    """Returns the evaluations that are shown: the first two, the middle and the last; of a router that never changes
    the first.
    """
    count = len(history.values)
    if (history.values == history.values[-1]).all():
        return [0]
    return sorted({0, 1, count // 2, count - 1} & set(range(count)))


def _moments(history: History) -> list[Panel]:
    """Returns a panel for each moment of one router."""
    rows, columns = diagonal(history.values[-1])
    clusters, experts = history.values.shape[1:]
    fair = 1 / experts
    scheme = Scheme("cividis", (0.1 * fair, 1), "mean routing probability", True, {fair: "1 / E", 1.0: "1"})
    moments = _moments_of(history)
    panels: list[Panel] = []
    for moment in moments:
        x = Axis("expert", (-0.5, experts - 0.5), ticks={0.0: "1", experts - 1.0: f"{experts}"}, grid=False)
        y = Axis(
            "cluster", (-0.5, clusters - 0.5), ticks={0.0: "1", clusters - 1.0: f"{clusters}"}, reverse=True, grid=False
        )
        y.label = "\n".join([*textwrap.wrap(history.label, 26), "cluster"])
        title = "every step" if len(moments) == 1 else f"step {history.steps[moment]:,}"
        share = history.course["router/dead"].iloc[moment] if "router/dead" in history.course else np.nan
        title += f"\n{100 * share:.0f} % of experts dead" if np.isfinite(share) else ""
        panel = Panel(x, y, title, width=140, height=140)
        panel.image(np.maximum(history.values[moment][np.ix_(rows, columns)], 0.1 * fair), scheme)
        if history.exact and np.isfinite(share):
            for expert in np.flatnonzero(dead_at(history.load[moment])[columns]):
                panel.text(
                    "×", float(expert), "top", fontSize=11, fontWeight="bold", color="#D55E00", align="center", dy=0
                )
        panels.append(panel)
    return panels


PHASE = Plot(
    phase,
    lambda spec, data: (
        f"Mean {advantage_label('control', data)}, paired by seed; a star marks cells whose 95 % interval excludes 0;"
        " black: the border between signs; a name in a cell: its fairest frozen control."
    ),
    required={"x": "swept key on the x axis", "y": "swept key on the y axis"},
    optional={"against": "controls, a map each"},
)
ROUTING = Plot(
    routing,
    "Mean routing probability by cluster and expert for the base seed, ordered by the best match at the end: a"
    " specialised router is a diagonal. Crosses: dead experts. A frozen router is shown once.",
    optional={"arms": "arms that are drawn"},
    alone=True,
)
