"""Charts of images, and of data of patches (Chen et al. 2022)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Series
from routed.analysis.plots.frame import COLOURS, SHAPES
from routed.analysis.plots.scales import padded
from routed.contracts import Batch
from routed.papers.chen2022.cluster_charts import ARM, LINES, arrays_of
from routed.plan.config import base
from routed.settings.tree import node_of, override
from routed.tasks import TASKS, worlds
from routed.training.program import streams

#: Images in a row of examples, and pixels between them.
SHOWN, APART = 10, 2
#: Colour of clusters without a name.
GREY = "#bbbbbb"


def latent(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns t-SNE maps of the embedding of each of the first test images with one label, at the end of training
    (Chen et al. 2022, Fig. 7).

    `panels` maps titles to [a point, the label that is shown, names of clusters by their numbers]; other clusters are
    grey. The left map shows the expert that computed an image, the right one the cluster of the image.
    """
    panels = []
    for title, (point, label, names) in spec["panels"].items():
        arrays = arrays_of({"lines": {title: point}}, data, "choices", "embeddings")
        if not arrays:
            continue
        choices, embeddings = arrays[title]
        chosen, test = choices[-1, :, 0], first_samples(data, point, choices.shape[1])
        selected = np.flatnonzero(np.asarray(test.y).argmax(1) == label)
        vectors = embeddings[-1][np.arange(len(chosen)), chosen][selected]
        coordinates = _placed(vectors)
        experts = {f"expert {e + 1}": chosen[selected] == e for e in range(embeddings.shape[2])}
        cluster = np.asarray(test.cluster)[selected]
        classes = {"other classes": ~np.isin(cluster, [*names])} if len(names) else {}
        classes |= {name: cluster == number for number, name in names.items()}
        for groups, end, first in ((experts, "by expert", 0), (classes, "by class", 4)):  # looks of their own
            panel = map_panel(coordinates, f"{title}, {end}")
            for i, (name, mask) in enumerate(groups.items()):
                colour = GREY if name == "other classes" else COLOURS[(first + i) % len(COLOURS)]
                if mask.any():
                    panel.dots(Series(name, colour, SHAPES[(first + i) % len(SHAPES)]), *coordinates[mask].T)
            panels.append(panel)
    return Chart(panels, columns=2) if panels else None


def map_panel(coordinates: np.ndarray, title: str) -> Panel:
    """Returns an empty panel for points of a map, whose axes have no meaning. coordinates: [points, 2]."""
    ends = zip(coordinates.min(0), coordinates.max(0), strict=True)
    x, y = (Axis("", padded(low, high, share=0.04), ticks={}) for low, high in ends)
    return Panel(x, y, title, width=300, height=250)


def first_samples(data: Data, point: dict[str, Any], count: int) -> Batch:
    """Returns the first test samples of the base seed at a point, made again."""
    config = override(override(base(), data.base), point)
    task, node = TASKS[config.data.name], node_of(config).data
    world = worlds.draw_world(task, streams(config.seed, config)["world"], node, config.data.samples)
    world = world._replace(shared=task.shared(node), test=jax.tree.map(lambda array: array[:count], world.test))
    return worlds.test_batch(task, world, node)


def examples(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the first test images of the base seed, as a router and its experts see them: a row a line (Fig. 6)."""
    panels = []
    for name, point in spec["lines"].items():
        images = np.asarray(first_samples(data, point, SHOWN).x)
        if images.ndim != 4:  # rows of numbers are no pictures
            continue
        pixels = np.round(255 * (images - images.min()) / (images.max() - images.min())).astype(np.uint8)
        pixels = pixels if images.shape[-1] == 3 else pixels[..., :1].repeat(3, -1)
        framed = np.pad(pixels, ((0, 0), (0, 0), (0, APART), (0, 0)), constant_values=255)
        row = np.concatenate([*framed], axis=1)
        x, y = (Axis("", (-0.5, size - 0.5), ticks={}) for size in (row.shape[1], row.shape[0]))
        y.reverse = True
        panel = Panel(x, y, name, width=660, height=max(40, 660 * row.shape[0] // row.shape[1]))
        panel.image(row)
        panels.append(panel)
    return Chart(panels, columns=1) if panels else None


LATENT_PLOT = Plot(
    latent,
    "t-SNE of the embedding of each test image with one label by its expert, base seed, at the end of training. Left:"
    " the expert; right: the class; classes without a name are grey.",
    required={"panels": "title -> [settings of a point, label that is shown, number of a cluster -> its name]"},
    axes=lambda spec, data: sorted({key for point, *_ in spec["panels"].values() for key in point if key in data.own}),
    alone=True,
)
EXAMPLES_PLOT = Plot(
    examples,
    "The first test images of the base seed, as routers and experts see them.",
    required={"lines": "name of a line -> settings of its point"},
    alone=True,
)


#: Nearest samples that vote on the class predicted at a position of the map, and positions along an axis.
NEIGHBOURS, GRID = 15, 120
#: Colours of the two predicted classes on the map (alternating with the vote), the same on light and dark grounds.
CLASSES = np.array([[243, 230, 218], [221, 233, 242]], np.uint8)
#: Titles of the products, in the order of `patches.watch`.
PRODUCTS = ("expert and feature", "expert and centre", "router and feature", "router and centre")


def products(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns products of filters and router rows with each signal over training, a colour a cluster (base seed)."""
    panels = []
    for name, (values,) in arrays_of(spec, data, "products").items():
        steps = sorted(data.at(spec["lines"][name], data.table).step.unique())[: len(values)]
        for i, title in enumerate(PRODUCTS):
            first = i // 2 * 2  # a pair shares its scale: features and centres can be compared
            y = Axis("product", (0, 1.05 * float(values[:, first : first + 2].max()) or 1.0))
            x = Axis("optimiser steps", padded(0, float(max(steps))))
            panel = Panel(x, y, f"{name}: {title}", width=180, height=170)
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
        test = first_samples(data, spec["lines"][name], choices.shape[1])
        y = np.asarray(test.y[:, -1] > 0)
        coordinates = _placed(np.asarray(test.x.sum(1)))
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


def _placed(vectors: np.ndarray) -> np.ndarray:
    """Returns the positions of vectors on a map, by t-SNE."""
    from sklearn.manifold import TSNE  # here, as scikit-learn takes two seconds to load

    return TSNE(random_state=0, perplexity=min(30.0, (len(vectors) - 1) / 3)).fit_transform(vectors)


def _add_votes(panel: Panel, coordinates: np.ndarray, predicted: np.ndarray) -> None:
    """Adds the predicted class at every position as a picture behind the samples."""
    if not predicted.any() or predicted.all():
        return
    from sklearn.neighbors import KNeighborsClassifier

    assert panel.x.domain and panel.y.domain
    grid = np.stack(np.meshgrid(np.linspace(*panel.x.domain, GRID), np.linspace(*panel.y.domain[::-1], GRID)), -1)
    votes = KNeighborsClassifier(NEIGHBOURS).fit(coordinates, predicted).predict(grid.reshape(-1, 2))
    panel.picture(CLASSES[votes.reshape(GRID, GRID).astype(int)])


PRODUCTS_PLOT = Plot(
    products,
    "Largest absolute product of an expert's filters, or of its router row, with each cluster's signals, for the base"
    " seed: a line for each expert and cluster.",
    required=LINES,
    optional=ARM,
    alone=True,
)
EMBEDDING_PLOT = Plot(
    embedding,
    "t-SNE of test samples of the base seed; colour and shape: the expert; background: the predicted class, by a vote"
    " of the 15 nearest samples.",
    required=LINES,
    optional=ARM,
    alone=True,
)
