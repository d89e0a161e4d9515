"""What experts and router make of cluster structure: curves of points, dispatch tables, products with the signals, a map of samples.

All take `lines`, names of points: {"cubic": {"experts.activation": "cubic"}}, say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from sklearn.neighbors import KNeighborsClassifier

from routed.analysis.plots.frame import MARKERS, SHADES, Data, defined, legend, mean, name_undefined
from routed.analysis.plots.marks import Marks, Point, keep
from routed.analysis.plots.scales import logarithmic
from routed.plan.arms import REFERENCE
from routed.plan.config import base
from routed.settings.tree import node_of, override
from routed.tasks import TASKS, worlds
from routed.training.program import streams

#: Neighbours that vote on which class is predicted at a place of the map, and places along an axis.
NEIGHBOURS, GRID = 15, 120


def series(spec: dict[str, Any], data: Data) -> Figure | None:
    """Metrics against optimiser steps, a panel each, a line a point; bands are 95 % intervals over seeds."""
    found = {name: data.at(point, data.table) for name, point in spec["lines"].items()}
    arm = spec.get("arm", REFERENCE)
    found = {name: rows[(rows.status == "ok") & (rows.arm == arm)] for name, rows in found.items() if len(rows)}
    every = pd.concat(found.values()) if found else data.table.iloc[:0]
    metrics = defined(spec["metrics"], every)
    if not metrics:
        return None
    columns = min(3, len(metrics))
    figure = Figure(figsize=(3.4 * columns + 0.3, 3.0 * -(-len(metrics) // columns) + 0.6))
    panels = figure.subplots(-(-len(metrics) // columns), columns, squeeze=False).flat
    for panel in list(panels)[len(metrics) :]:
        panel.set_visible(False)
    for panel, metric in zip(figure.axes, metrics, strict=False):
        column = data.axes[metric]
        for i, (name, rows) in enumerate(found.items()):
            estimates = [(step, mean(group[metric], column)) for step, group in rows.groupby("step")]
            estimates = [(step, one) for step, one in estimates if np.isfinite(one.mean)]
            if not estimates:
                continue
            steps = [step for step, _ in estimates]
            colour = SHADES[i if len(found) <= len(SHADES) else i // 2 % len(SHADES)]  # of many, neighbours share one
            panel.plot(steps, [e.mean for _, e in estimates], color=colour, lw=1.3, ls=("-", "--")[i % 2], label=name)
            keep(
                panel,
                Marks("points", name, colour, [Point(*one) for one in estimates], joined=True, dashed=bool(i % 2)),
            )
            panel.fill_between(
                steps, [e.low for _, e in estimates], [e.high for _, e in estimates], color=colour, alpha=0.2, lw=0
            )
        if column.log:
            logarithmic(panel)
        panel.set_ylabel(column.label)
        panel.set_xlabel("optimiser steps")
        panel.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    name_undefined(figure, spec["metrics"], every, data)
    legend(figure, figure.axes[0])
    return figure


def arrays_of(spec: dict[str, Any], data: Data, *names: str) -> dict[str, list[np.ndarray]]:
    """The arrays `names` of the learned router (or spec's `arm`) and the base seed for each line that has them."""
    found = {}
    for line, point in spec["lines"].items():
        rows = data.at(point)
        for run in rows[rows.arm == spec.get("arm", REFERENCE)].run:
            if all(f"{run}/{name}" in data.heatmaps for name in names):
                found[line] = [data.heatmaps[f"{run}/{name}"] for name in names]
    return found


def dispatch(spec: dict[str, Any], data: Data) -> Figure | None:
    """Test samples of each cluster that go to each expert, before and after training."""
    found = arrays_of(spec, data, "counts")
    if not found:
        return None
    sizes = [counts.shape[1:] for (counts,) in found.values()]  # lines may be of other tasks
    heights = [0.3 * clusters + 0.9 for clusters, _ in sizes]
    figure = Figure(figsize=(2 * (0.42 * max(experts for _, experts in sizes) + 0.9), sum(heights)))
    panels = figure.subplots(len(found), 2, squeeze=False, height_ratios=heights)
    for line, (name, (counts,)), (clusters, experts) in zip(panels, found.items(), sizes, strict=True):
        for panel, table, when in zip(line, (counts[0], counts[-1]), ("before", "after"), strict=True):
            panel.imshow(table, cmap="Blues", vmin=0, vmax=counts.sum(2).max(), aspect="auto")
            for (cluster, expert), number in np.ndenumerate(table):
                dark = number > 0.6 * counts.sum(2).max()
                panel.text(
                    expert,
                    cluster,
                    f"{number}",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white" if dark else "black",
                )
            panel.set_xticks(range(experts), range(1, experts + 1))
            panel.set_yticks(range(clusters), range(1, clusters + 1))
            panel.set_title(f"{name},\n{when} training", fontsize=9)
            panel.grid(visible=False)
        line[0].set_ylabel("cluster")
    for panel in panels[-1]:
        panel.set_xlabel("expert")
    return figure


#: What `products` holds, in the order of `routed.data.patches.watch`.
PRODUCTS = ("expert and feature", "expert and centre", "router and feature", "router and centre")


def products(spec: dict[str, Any], data: Data) -> Figure | None:
    """Products of each expert's filters and router row with each signal over training, a colour a cluster (base seed)."""
    found = arrays_of(spec, data, "products")
    if not found:
        return None
    figure = Figure(figsize=(10.4, 2.5 * len(found) + 0.5))
    panels = figure.subplots(len(found), len(PRODUCTS), squeeze=False, sharex=True)
    for line, (name, (values,)) in zip(panels, found.items(), strict=True):
        steps = sorted(data.at(spec["lines"][name], data.table).step.unique())
        for i, (panel, words) in enumerate(zip(line, PRODUCTS, strict=True)):
            for cluster in range(values.shape[-1]):
                for expert in range(values.shape[-2]):
                    panel.plot(
                        steps[: len(values)], values[:, i, expert, cluster], color=SHADES[cluster % len(SHADES)], lw=0.9, alpha=0.8,
                        label=f"cluster {cluster + 1}" if not expert else None,
                    )  # fmt: skip
            panel.set_title(f"{name}: {words}", fontsize=8.5)
            panel.set_ylim(bottom=0)
        line[0].set_ylabel("product")
    for pair in ((0, 1), (2, 3)):  # a pair shares its scale, so that features and centres can be compared
        for line in panels:
            top = max(line[i].get_ylim()[1] for i in pair)
            for i in pair:
                line[i].set_ylim(0, top)
    for panel in panels[-1]:
        panel.set_xlabel("optimiser steps")
    legend(figure, panels[0][0])
    return figure


def embedding(spec: dict[str, Any], data: Data) -> Figure | None:
    """t-SNE of test samples (of the sum of their patches, which is what the router sees), before and after training.

    Colour and marker say which expert a sample goes to; background and line say which class is predicted, by a vote among the
    nearest samples.
    """
    found = arrays_of(spec, data, "choices", "right")
    if not found:
        return None
    figure = Figure(figsize=(7.6, 3.5 * len(found) + 0.5))
    panels = figure.subplots(len(found), 2, squeeze=False)
    for line, (name, (choices, right)) in zip(panels, found.items(), strict=True):
        x, y = _samples(data, spec["lines"][name], choices.shape[1])
        place = TSNE(random_state=0, perplexity=30).fit_transform(x)
        low, high = place.min(0) - 3, place.max(0) + 3
        grid = np.stack(np.meshgrid(*np.linspace(low, high, GRID).T), -1)
        for panel, row, when in zip(line, (0, -1), ("before", "after"), strict=True):
            predicted = np.where(right[row], y, ~y)
            if predicted.any() and not predicted.all():
                vote = KNeighborsClassifier(NEIGHBOURS).fit(place, predicted).predict_proba(grid.reshape(-1, 2))[:, 1]
                vote = vote.reshape(GRID, GRID)
                panel.contourf(
                    grid[..., 0], grid[..., 1], vote, levels=[0, 0.5, 1], cmap=ListedColormap(["#f3e6da", "#dde9f2"])
                )
                panel.contour(grid[..., 0], grid[..., 1], vote, levels=[0.5], colors="black", linewidths=0.7)
            for expert in np.unique(choices[:, :, 0]):
                here = choices[row, :, 0] == expert
                panel.scatter(
                    *place[here].T, s=9, lw=0, color=SHADES[expert % len(SHADES)], marker=MARKERS[expert % len(MARKERS)],
                    label=f"expert {expert + 1}",
                )  # fmt: skip
            panel.set_title(f"{name}, {when} training: {100 * right[row].mean():.1f} % right", fontsize=9)
            panel.set_xticks([])
            panel.set_yticks([])
            panel.grid(visible=False)
    legend(figure, panels[0][0])
    return figure


def _samples(data: Data, point: dict[str, Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first test samples of the base seed at a point, patches added up, and whether their class is the second; made again."""
    config = override(override(base(), data.base), point)
    task, data_node = TASKS[config.data.name], node_of(config).data
    world = worlds.draw_world(task, streams(config.seed, config)["world"], data_node, config.data.samples)._replace(
        shared=task.shared(data_node)
    )
    test = worlds.test_batch(task, world, data_node)
    return np.asarray(test.x[:count].sum(1)), np.asarray(test.y[:count, -1] > 0)
