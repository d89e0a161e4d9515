"""Images as they are trained on (kind `examples`), and a map of their embeddings (kind `latent`)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from sklearn.manifold import TSNE

from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Series
from routed.analysis.plots.clusters import arrays_of
from routed.analysis.plots.frame import COLOURS, SHAPES
from routed.analysis.plots.scales import padded
from routed.contracts import Batch
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
        chosen, test = choices[-1, :, 0], samples(data, point, choices.shape[1])
        selected = np.flatnonzero(np.asarray(test.y).argmax(1) == label)
        vectors = embeddings[-1][np.arange(len(chosen)), chosen][selected]
        coordinates = TSNE(random_state=0, perplexity=min(30.0, (len(vectors) - 1) / 3)).fit_transform(vectors)
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


def samples(data: Data, point: dict[str, Any], count: int) -> Batch:
    """Returns the first test samples of the base seed at a point, made again."""
    config = override(override(base(), data.base), point)
    task, node = TASKS[config.data.name], node_of(config).data
    world = worlds.draw_world(task, streams(config.seed, config)["world"], node, config.data.samples)
    world = world._replace(shared=task.shared(node), test=jax.tree.map(lambda array: array[:count], world.test))
    return worlds.test_batch(task, world, node)


def examples(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the first test images of the base seed, a row for each line, as a router and its experts see them (Fig.
    6).
    """
    images_of = {name: np.asarray(samples(data, point, SHOWN).x) for name, point in spec["lines"].items()}
    images_of = {
        name: images for name, images in images_of.items() if images.ndim == 4
    }  # rows of numbers are no pictures
    panels = []
    for name, images in images_of.items():
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
    "t-SNE of the embedding of each test image with one label by its expert, base seed, at the end of training."
    " Left: the expert; right:"
    " the class; classes without a name are grey.",
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
