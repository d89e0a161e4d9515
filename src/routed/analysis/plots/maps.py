"""Points and clusters side by side: phase diagram, forest, methods, routing."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment

from routed.analysis import statistics
from routed.analysis.plots.frame import KEYS, Data, legend, logarithmic, marker_of, mean
from routed.analysis.sides import ANY_FAIR, fair_gap, paired
from routed.engine.rows import shown
from routed.plan.arms import ARMS, REFERENCE, UNTRAINED


def phase(spec: dict[str, Any], data: Data) -> Figure | None:
    """Two maps over (x, y): paired log(frozen / learned) and log(fairest frozen / learned), with the zero contour.

    Blue: learned is better. A star marks cells whose 95 % interval excludes 0.
    """
    if spec["x"] not in data.swept or spec["y"] not in data.swept:
        return None
    rows = data.at_point(data.last, spec)
    xs, ys = sorted(rows[spec["x"]].unique()), sorted(rows[spec["y"]].unique())
    figure = Figure(figsize=(8.6, 3.9))
    panels = figure.subplots(1, 2, sharey=True)
    maps = []
    for against in (UNTRAINED, ANY_FAIR):
        cells = [[_cell(rows[(rows[spec["x"]] == x) & (rows[spec["y"]] == y)], against) for x in xs] for y in ys]
        maps.append(cells)
    bound = max(
        (abs(c[0].mean) for cells in maps for line in cells for c in line if np.isfinite(c[0].mean)), default=1.0
    )
    for panel, cells, title in zip(panels, maps, ("against frozen", "against the fairest frozen control"), strict=True):
        means = np.array([[c[0].mean for c in line] for line in cells])
        image = panel.imshow(means, origin="lower", aspect="auto", cmap="RdBu", vmin=-bound, vmax=bound)
        if min(means.shape) > 1 and np.nanmin(means) < 0 < np.nanmax(means):
            panel.contour(means, levels=[0], colors="black", linewidths=1.5)
        for (i, j), value in np.ndenumerate(means):
            one, arm = cells[i][j]
            star = "*" if one.low > 0 or one.high < 0 else ""
            name = f"\n{arm.removeprefix('frozen_')}" if arm and arm != UNTRAINED else ""
            panel.text(
                j,
                i,
                f"{value:+.2f}{star}{name}",
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if abs(value) > 0.6 * bound else "black",
            )
        panel.set_xticks(range(len(xs)), [shown(x) for x in xs])
        panel.set_yticks(range(len(ys)), [shown(y) for y in ys])
        panel.set_xlabel(KEYS.get(spec["x"], spec["x"]))
        panel.set_title(title, fontsize=9)
        panel.grid(visible=False)
    panels[0].set_ylabel(KEYS.get(spec["y"], spec["y"]))
    figure.colorbar(image, ax=list(panels), label="log(frozen / learned) top-1 loss\n(blue: learned is better)")
    return figure


def forest(spec: dict[str, Any], data: Data) -> Figure | None:
    """One line a point: log(frozen / learned) and log(fairest frozen / learned), with 95 % intervals."""
    points = data.last[data.swept].drop_duplicates().sort_values(data.swept)
    base = points.mode().iloc[0]
    points = points.iloc[(points != base).any(axis=1).argsort(kind="stable")]  # the protocol first
    figure = Figure(figsize=(7.2, 0.42 * len(points) + 1.2))
    panel = figure.subplots()
    names = []
    for place, (_, point) in enumerate(points.iterrows()):
        rows = data.last[(data.last[data.swept] == point).all(axis=1)]
        changed = [f"{KEYS.get(key, key)} = {shown(point[key])}" for key in data.swept if point[key] != base[key]]
        names.append(", ".join(changed) or "the protocol")
        for against, colour, marker, offset in ((UNTRAINED, "#D55E00", "o", 0.12), (ANY_FAIR, "#0072B2", "s", -0.12)):
            one, _ = _cell(rows, against)
            bars = [[one.mean - one.low], [one.high - one.mean]] if np.isfinite(one.low) else None
            label = (
                {UNTRAINED: "against frozen", ANY_FAIR: "against the fairest frozen control"}[against]
                if not place
                else None
            )
            panel.errorbar(
                one.mean, place + offset, xerr=bars, color=colour, marker=marker, capsize=2, ls="", label=label
            )
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlabel("log(frozen / learned) top-1 loss (right of 0: learned is better)")
    legend(figure, panel)
    return figure


def routing(spec: dict[str, Any], data: Data) -> Figure | None:
    """Mean routing probability of each expert for each cluster, at several moments of training, for the base seed.

    Clusters and experts are put into the order of the best one-to-one match at the end, so a specialised router is a
    diagonal.
    """
    rows = data.at_point(data.last, spec | {"x": None})
    shown = [
        (arm, data.heatmaps[run])
        for arm in spec["arms"]
        for run in rows[rows.arm == arm].run
        if run in data.heatmaps and np.isfinite(data.heatmaps[run]).all()  # not of a run that diverged at once
    ]
    if not shown:
        return None
    count = len(shown[0][1])
    moments = sorted({0, 1, count // 2, count - 1} & set(range(count)))
    every = int(data.table.step.max() // (count - 1)) if count > 1 else 0
    figure = Figure(figsize=(2.05 * len(moments) + 0.9, 2.2 * len(shown) + 0.4))
    panels = figure.subplots(len(shown), len(moments), squeeze=False, sharex=True, sharey=True)
    for line, (arm, maps) in zip(panels, shown, strict=True):
        maps = maps.astype(float)
        order = _diagonal(maps[-1])
        for panel, moment in zip(line, moments, strict=True):
            image = panel.imshow(
                maps[moment][np.ix_(*order)], vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest"
            )
            if panel in panels[0]:
                panel.set_title(f"step {moment * every}", fontsize=8)
            panel.grid(visible=False)
        line[0].set_ylabel("\n".join(textwrap.wrap(ARMS[arm].label, 20)) + "\ncluster")
    for panel in panels[-1]:
        panel.set_xlabel("expert")
    figure.colorbar(image, ax=panels, label="mean routing probability")
    return figure


def _diagonal(final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orders of clusters and experts that put the best match on the diagonal, the surest clusters first."""
    rows, columns = linear_sum_assignment(-final)
    best = np.argsort(-final[rows, columns], kind="stable")
    rows, columns = rows[best], columns[best]
    rest = lambda size, used: np.concatenate([used, np.setdiff1d(np.arange(size), used)])  # noqa: E731
    return rest(final.shape[0], rows), rest(final.shape[1], columns)


def _cell(rows: pd.DataFrame, against: str) -> tuple[statistics.Estimate, str | None]:
    """log(control / learned) at one point, and which control it is."""
    if against != ANY_FAIR:
        return statistics.estimate(paired(rows, against, REFERENCE, "test/loss")), against
    found = fair_gap(rows)
    return (found.estimate, found.name) if found else (statistics.estimate([]), None)


def methods(spec: dict[str, Any], data: Data) -> Figure | None:
    """One line a method, best first by the first metric of its learned (else its frozen) arm; a panel a metric.

    `methods` maps names to points. Means over seeds with 95 % t intervals, geometric on log axes.
    """
    found = {}
    for name, point in spec["methods"].items():
        rows = data.at(point)
        if len(rows):
            found[name] = rows[rows.status == "ok"]
    if not found:
        return None
    metrics, arms = spec["metrics"], [a for a in ARMS if any((rows.arm == a).any() for rows in found.values())]

    def estimate(rows: pd.DataFrame, arm: str, metric: str) -> statistics.Estimate:
        return mean(rows.loc[rows.arm == arm, metric], data.axes[metric][1])

    def rank(name: str) -> float:
        values = [estimate(found[name], arm, metrics[0]).mean for arm in arms]
        return next((v for v in values if np.isfinite(v)), np.inf)

    names = sorted(found, key=rank)
    room = 0.085 * max(map(len, names)) + 0.5  # inches, for the names
    figure = Figure(figsize=(2.1 * len(metrics) + room, 0.32 * len(names) + 1.3))
    panels = np.atleast_1d(figure.subplots(1, len(metrics), sharey=True))
    for panel, metric in zip(panels, metrics, strict=True):
        label, log = data.axes[metric]
        for i, arm in enumerate(arms):
            for place, name in enumerate(names):
                one = estimate(found[name], arm, metric)
                if np.isfinite(one.mean):
                    bars = [[one.mean - one.low], [one.high - one.mean]] if np.isfinite(one.low) else None
                    panel.errorbar(
                        one.mean, place + 0.2 * (i - (len(arms) - 1) / 2), xerr=bars, color=ARMS[arm].colour,
                        marker=marker_of(arm), ms=4, capsize=2, ls="",
                    )  # fmt: skip
        if log:
            logarithmic(panel, "x")
        panel.set_xlabel("\n".join(textwrap.wrap(label, 24)))
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    for arm in arms:
        panels[0].errorbar([], [], color=ARMS[arm].colour, marker=marker_of(arm), ls="", label=ARMS[arm].label)
    legend(figure, panels[0])
    return figure
