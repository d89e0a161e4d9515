"""Points and clusters side by side: phase diagram, forest, methods, routing."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.paired_values import ANY_FAIR
from routed.analysis.plots.frame import Data, defined, legend, marker_of, mean, name_undefined
from routed.analysis.plots.histories import dead_at, diagonal, histories
from routed.analysis.plots.marks import Marks, Point, by_seed, intervals, keep
from routed.analysis.plots.paired import advantage, advantage_words, rivals
from routed.analysis.plots.scales import KEYS, bounded, logarithmic
from routed.engine.rows import shown
from routed.plan.arms import ARMS, UNTRAINED
from routed.routers import ROUTERS


def phase(spec: dict[str, Any], data: Data) -> Figure | None:
    """A map over (x, y) of what each control loses against the learned router, with the zero contour.

    The controls are those that `against` names, or the untrained router and the fairest frozen one. Blue: learned is better.
    A star marks cells whose 95 % interval excludes 0.
    """
    if spec["x"] not in data.swept or spec["y"] not in data.swept:
        return None
    rows = data.at_point(data.last, spec)
    xs, ys = sorted(rows[spec["x"]].unique()), sorted(rows[spec["y"]].unique())
    usual = (*([UNTRAINED] if UNTRAINED in set(rows.arm) else []), *rivals(data))
    named = [arm for arm in spec.get("against", ()) if arm in set(rows.arm)]
    compared = list(dict.fromkeys(named or usual))
    groups = dict(iter(rows.groupby([spec["y"], spec["x"]])))
    maps = {
        against: [[advantage(groups.get((y, x), rows.iloc[:0]), against, data) for x in xs] for y in ys]
        for against in compared
    }
    means_of = {
        against: np.array([[cell[0].mean for cell in line] for line in cells]) for against, cells in maps.items()
    }
    sizes = np.abs(np.concatenate([means.ravel() for means in means_of.values()] or [np.array([np.nan])]))
    if not np.isfinite(sizes).any():
        return None
    bound = np.nanmax(sizes) or 1.0
    width, height = min(max(3.4, 0.62 * len(xs) + 0.6), 9.0), min(max(3.9, 0.42 * len(ys) + 0.9), 9.0)
    readable = width / len(xs) > 0.5 and height / len(ys) > 0.35  # inches for the number in a cell
    figure = Figure(figsize=(width * len(maps) + 1.6, height))
    panels = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
    for panel, (against, cells) in zip(panels, maps.items(), strict=True):
        means = means_of[against]
        image = panel.imshow(means, origin="lower", aspect="auto", cmap="RdBu", vmin=-bound, vmax=bound)
        if min(means.shape) > 1 and (means < 0).any() and (means > 0).any():
            panel.contour(means, levels=[0], colors="black", linewidths=1.5)
        for (i, j), value in np.ndenumerate(means) if readable else ():
            estimate, arm = cells[i][j]
            star = "*" if estimate.low > 0 or estimate.high < 0 else ""
            name = f"\n{arm.removeprefix('frozen_')}" if arm and arm != against else ""
            words = f"{value:+.2f}{star}{name}" if np.isfinite(value) else "no rows"
            style = {"ha": "center", "va": "center", "fontsize": 7.5}
            panel.text(j, i, words, color="white" if abs(value) > 0.6 * bound else "black", **style)
        points = []
        for (i, j), value in np.ndenumerate(means):
            where = f"{KEYS.get(spec['x'], spec['x'])} {shown(xs[j])}, {KEYS.get(spec['y'], spec['y'])} {shown(ys[i])}"
            estimate, arm = cells[i][j]
            points += [Point((j, i), estimate, f"{where}; {arm or against}")] if np.isfinite(value) else []
        keep(panel, Marks("cells", "", "", points))
        for places, values in ((panel.set_xticks, xs), (panel.set_yticks, ys)):
            every = -(-len(values) // 15)
            places(range(0, len(values), every), [shown(value) for value in values[::every]])
        panel.set_xlabel(KEYS.get(spec["x"], spec["x"]))
        title = f"against {'the fairest frozen control' if against == ANY_FAIR else against}"
        panel.set_title(title + ("" if readable else " (numbers: see the table)"), fontsize=9)
        panel.grid(visible=False)
    panels[0].set_ylabel(KEYS.get(spec["y"], spec["y"]))
    figure.colorbar(image, ax=list(panels), label=f"{advantage_words('control', data)}\n(blue: learned is better)")
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
            one, name = advantage(rows, against, data)
            label = {UNTRAINED: "against frozen", ANY_FAIR: "against the fairest frozen control"}[against]
            style = {"color": colour, "marker": marker, "capsize": 2, "ls": ""}
            intervals(panel, [Point(place + offset, one, name or "")], label, style, horizontal=True, listed=not place)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlabel("log(frozen / learned) top-1 loss (right of 0: learned is better)")
    legend(figure, panel)
    return figure


def routing(spec: dict[str, Any], data: Data) -> Figure | None:
    """Mean routing probability of each expert for each cluster, at several moments of training, for the base seed.

    Clusters and experts are put into the order of the best one-to-one match at the end, so a specialised router is a
    diagonal. A router that never changes is shown once. Experts that are dead at a moment have a cross above their column.
    """
    found = [history for history in histories(data, spec) if history.row == "cluster"]
    if not found:
        return None
    count = len(found[0].values)
    moments = sorted({0, 1, count // 2, count - 1} & set(range(count)))
    figure = Figure(figsize=(2.05 * len(moments) + 0.9, 2.45 * len(found) + 0.4))
    panels = figure.subplots(len(found), len(moments), squeeze=False, sharex=True, sharey=True)
    for place, (line, history) in enumerate(zip(panels, found, strict=True)):
        still = bool((history.values == history.values[-1]).all())
        rows, columns = diagonal(history.values[-1])
        fair = 1 / history.values.shape[2]
        for panel, moment in zip(line, moments, strict=True):
            if still and moment:
                panel.set_visible(False)
                continue
            seen = np.maximum(history.values[moment][np.ix_(rows, columns)], 0.1 * fair)
            scale = LogNorm(vmin=0.1 * fair, vmax=1)  # a fresh router is near 1 / E everywhere: black on a linear scale
            image = panel.imshow(seen, norm=scale, cmap="cividis", aspect="auto", interpolation="nearest")
            step = "every step" if still else f"step {history.steps[moment]:,}"
            share = history.course["router/dead"].iloc[moment] if "router/dead" in history.course else np.nan
            panel.set_title(step + (f"\n{100 * share:.0f} % of experts dead" if np.isfinite(share) else ""), fontsize=8)
            if history.exact and np.isfinite(share):
                dead = np.flatnonzero(dead_at(history.load[moment])[columns])
                style = {"marker": "x", "s": 9, "lw": 0.8, "color": "#D55E00", "clip_on": False}
                panel.scatter(dead, np.full(len(dead), 1.015), transform=panel.get_xaxis_transform(), **style)
            panel.grid(visible=False)
            panel.set_xlabel("expert" if place == len(found) - 1 else "")
        line[0].set_ylabel("\n".join(textwrap.wrap(history.label, 20)) + "\ncluster")
    bar = figure.colorbar(image, ax=panels, label="mean routing probability", extend="min")
    bar.set_ticks([fair, 1], labels=["1 / E", "1"])
    return figure


#: Characters of a line of a method's name; inches of that line, and between two arms of a method.
NAME, LINE, APART = 32, 0.26, 0.11
#: Methods that have nothing to learn, whatever their arm is called: their marker and words.
FIXED = {"color": "black", "marker": "D", "label": "nothing to learn: fixed rule"}


def methods(spec: dict[str, Any], data: Data) -> Figure | None:
    """One line a method, best first by the first metric of its learned (else its frozen) arm; a panel a metric.

    `methods` maps names to points. Means over seeds with 95 % intervals, geometric on log axes.
    """
    found = {}
    for name, point in spec["methods"].items():
        rows = data.at(point)
        if len(rows):
            found[name] = rows[rows.status == "ok"]
    if not found:
        return None
    arms = [a for a in ARMS if any((rows.arm == a).any() for rows in found.values())]
    every = pd.concat(found.values())
    metrics = defined(spec["metrics"], every)
    if not metrics:
        return None
    first = data.axes[metrics[0]]

    def estimate(rows: pd.DataFrame, arm: str, metric: str) -> statistics.Estimate:
        values = rows.loc[rows.arm == arm, metric] if metric in rows else pd.Series(dtype=float)
        return mean(values, data.axes[metric])

    def rank(name: str) -> float:
        values = (estimate(found[name], arm, metrics[0]).mean for arm in arms)
        best = next((value for value in values if np.isfinite(value)), np.nan)
        return np.inf if np.isnan(best) else -best if first.higher_is_better else best

    def look(name: str, arm: str) -> dict[str, Any]:
        router = spec["methods"][name].get("router.name", data.base.get("router.name"))
        if arm == UNTRAINED and router in ROUTERS and not ROUTERS[router].learns:
            return FIXED
        return {"color": ARMS[arm].colour, "marker": marker_of(arm), "label": ARMS[arm].label}

    names = sorted(found, key=rank)
    words = [textwrap.fill(name, NAME) for name in names]
    room = 0.085 * min(NAME, max(map(len, names))) + 0.5  # inches, for the names
    beside = {name: [arm for arm in arms if (found[name].arm == arm).any()] for name in names}
    tall = [
        max(LINE * (1 + text.count("\n")), APART * (len(beside[name]) + 1))
        for name, text in zip(names, words, strict=True)
    ]
    places = np.cumsum(tall) - np.array(tall) / 2
    figure = Figure(figsize=(2.1 * len(metrics) + room, max(2.2, sum(tall) + 1.3)))
    panels = np.atleast_1d(figure.subplots(1, len(metrics), sharey=True))
    looks = {}
    for panel, metric in zip(panels, metrics, strict=True):
        for place, inches in list(zip(places, tall, strict=True))[1::2]:  # so that each arm is seen to be of one method
            panel.axhspan(place - inches / 2, place + inches / 2, color="black", alpha=0.04, lw=0)
        for place, name in zip(places, names, strict=True):
            for i, arm in enumerate(beside[name]):
                one = estimate(found[name], arm, metric)
                if np.isfinite(one.mean):
                    style = looks[arm, look(name, arm)["label"]] = look(name, arm)
                    height = place + APART * (i - (len(beside[name]) - 1) / 2)
                    seeds = by_seed(found[name][found[name].arm == arm], metric)
                    point = Point(height, one, name, seeds)
                    look_of = {**style, "ms": 4, "capsize": 2, "ls": ""}
                    intervals(panel, [point], look_of.pop("label"), look_of, horizontal=True, listed=False)
        if data.axes[metric].log:
            logarithmic(panel, "x")
        else:
            low, high = panel.get_xlim()
            panel.set_xlim(bounded(low, high, data.axes[metric]))
        panel.set_xlabel("\n".join(textwrap.wrap(data.axes[metric].label, 24)))
    panels[0].set_yticks(places, words)
    panels[0].set_ylim(sum(tall), 0)
    for _, style in sorted(looks.items(), key=lambda item: arms.index(item[0][0])):
        panels[0].errorbar([], [], **style, ls="")
    name_undefined(figure, spec["metrics"], every, data)
    legend(figure, panels[0])
    return figure
