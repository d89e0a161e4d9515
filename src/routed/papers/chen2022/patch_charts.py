"""Experts and routers on patches: products with the signals (kind `products`), and a map of samples (kind
`embedding`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.manifold import TSNE
from sklearn.neighbors import KNeighborsClassifier

from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Series
from routed.analysis.plots.clusters import ARM, LINES, arrays_of
from routed.analysis.plots.frame import COLOURS, SHAPES
from routed.analysis.plots.scales import padded
from routed.papers.chen2022.image_charts import map_panel
from routed.plan.config import base
from routed.settings.tree import node_of, override
from routed.tasks import TASKS, worlds
from routed.training.program import streams

#: Nearest samples that vote on the class predicted at a position of the map, and positions along an axis.
NEIGHBOURS, GRID = 15, 120
#: Colours of the two predicted classes on the map (alternating with the vote), the same on light and dark grounds.
CLASSES = np.array([[243, 230, 218], [221, 233, 242]], np.uint8)
#: Titles of the products, in the order of `routed.data.patches.watch`.
PRODUCTS = ("expert and feature", "expert and centre", "router and feature", "router and centre")


def products(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns products of each expert's filters and router row with each signal over training, a colour for each
    cluster (base seed).
    """
    panels = []
    for name, (values,) in arrays_of(spec, data, "products").items():
        steps = sorted(data.at(spec["lines"][name], data.table).step.unique())[: len(values)]
        for i, title in enumerate(PRODUCTS):
            pair = values[
                :, i // 2 * 2 : i // 2 * 2 + 2
            ]  # a pair shares its scale: features and centres can be compared
            y = Axis("product", (0, 1.05 * float(pair.max()) or 1.0))
            panel = Panel(
                Axis("optimiser steps", padded(0, float(max(steps)))), y, f"{name}: {title}", width=180, height=170
            )
            for cluster in range(values.shape[-1]):
                colour = COLOURS[cluster % len(COLOURS)]
                panel.series[f"cluster {cluster + 1}"] = Series(f"cluster {cluster + 1}", colour)
                for expert in range(values.shape[-2]):
                    panel.line(steps, values[:, i, expert, cluster], colour=colour, width=0.9)
            panels.append(panel)
    return Chart(panels, columns=len(PRODUCTS)) if panels else None


def embedding(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns t-SNE maps of test samples (of the sum of their patches, the router's input), before and after training.

    Colour and shape show the expert of a sample, the background the class that a vote of the nearest samples predicts.
    """
    panels = []
    for name, (choices, right) in arrays_of(spec, data, "choices", "right").items():
        x, y = samples(data, spec["lines"][name], choices.shape[1])
        coordinates = TSNE(random_state=0, perplexity=30).fit_transform(x)
        for moment, when in ((0, "before"), (-1, "after")):
            title = f"{name}, {when} training:\n{100 * right[moment].mean():.1f} % right"
            panel = map_panel(coordinates, title)
            _add_votes(panel, coordinates, np.where(right[moment], y, ~y))
            for expert in np.unique(choices[:, :, 0]):
                mask = choices[moment, :, 0] == expert
                series = Series(f"expert {expert + 1}", COLOURS[expert % len(COLOURS)], SHAPES[expert % len(SHAPES)])
                panel.dots(series, *coordinates[mask].T)
            panels.append(panel)
    return Chart(panels, columns=2) if panels else None


def _add_votes(panel: Panel, coordinates: np.ndarray, predicted: np.ndarray) -> None:
    """Adds the predicted class at every position as a picture behind the samples."""
    if not predicted.any() or predicted.all():
        return
    assert panel.x.domain and panel.y.domain
    grid = np.stack(np.meshgrid(np.linspace(*panel.x.domain, GRID), np.linspace(*panel.y.domain[::-1], GRID)), -1)
    votes = (
        KNeighborsClassifier(NEIGHBOURS).fit(coordinates, predicted).predict(grid.reshape(-1, 2)).reshape(GRID, GRID)
    )
    panel.picture(CLASSES[votes.astype(int)])


def samples(data: Data, point: dict[str, Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first test samples of the base seed at a point, patches added up, and True where their class is the
    second.
    """
    config = override(override(base(), data.base), point)
    task, node = TASKS[config.data.name], node_of(config).data
    world = worlds.draw_world(task, streams(config.seed, config)["world"], node, config.data.samples)
    test = worlds.test_batch(task, world._replace(shared=task.shared(node)), node)
    return np.asarray(test.x[:count].sum(1)), np.asarray(test.y[:count, -1] > 0)


PRODUCTS_PLOT = Plot(
    products,
    "Largest absolute product of an expert's filters, or of its router row, with each cluster's signals, for the"
    " base seed: a line for"
    " each expert and cluster.",
    required=LINES,
    optional=ARM,
    alone=True,
)
EMBEDDING_PLOT = Plot(
    embedding,
    "t-SNE of test samples of the base seed; colour and shape: the expert; background: the predicted class, by a"
    " vote of the 15 nearest"
    " samples.",
    required=LINES,
    optional=ARM,
    alone=True,
)
