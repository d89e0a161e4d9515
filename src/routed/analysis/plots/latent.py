"""What experts make of images: a map of their embeddings, and the images themselves as they are trained on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from sklearn.manifold import TSNE

from routed.analysis.plots.clusters import arrays_of
from routed.analysis.plots.frame import MARKERS, SHADES, Data
from routed.contracts import Batch
from routed.plan.config import base
from routed.settings.tree import node_of, override
from routed.tasks import TASKS, worlds
from routed.training.program import streams

#: Images a row of examples.
SHOWN = 10


def latent(spec: dict[str, Any], data: Data) -> Figure | None:
    """t-SNE of what its expert made of each of the first test images with one label, at the end of training (Chen et al. 2022, Fig. 7).

    `panels` maps words to [a point, the label that is shown, names of clusters by their numbers]; other clusters are grey. Left: colour says
    which expert computed an image; right: which cluster it is of.
    """
    found = {}
    for words, (point, label, names) in spec["panels"].items():
        arrays = arrays_of({"lines": {words: point}}, data, "choices", "embeddings")
        if arrays:
            found[words] = (*arrays[words], point, label, names)
    if not found:
        return None
    figure = Figure(figsize=(7.6, 3.4 * len(found) + 0.6))
    panels = figure.subplots(len(found), 2, squeeze=False)
    for line, (words, (choices, embeddings, point, label, names)) in zip(panels, found.items(), strict=True):
        chosen, test = choices[-1, :, 0], samples(data, point, choices.shape[1])
        shown = np.flatnonzero(np.asarray(test.y).argmax(1) == label)
        made = embeddings[-1][np.arange(len(chosen)), chosen][shown]
        place = TSNE(random_state=0, perplexity=min(30.0, (len(made) - 1) / 3)).fit_transform(made)
        kinds = {f"expert {e + 1}": chosen[shown] == e for e in range(embeddings.shape[2])}
        cluster = np.asarray(test.cluster)[shown]
        named = {"other classes": ~np.isin(cluster, [*names])} if len(names) else {}
        named |= {name: cluster == number for number, name in names.items()}
        for panel, groups, title in ((line[0], kinds, "by expert"), (line[1], named, "by class")):
            for i, (name, here) in enumerate(groups.items()):
                grey = name == "other classes"
                style = {"color": "#bbbbbb" if grey else SHADES[i % len(SHADES)], "marker": MARKERS[i % len(MARKERS)]}
                panel.scatter(*place[here].T, s=9, lw=0, label=name if here.any() else None, **style)
            panel.set_title(f"{words}, {title}", fontsize=9)
            panel.set_xticks([])
            panel.set_yticks([])
            panel.grid(visible=False)
            if groups:
                panel.legend(fontsize=6.5, loc="best")
    return figure


def samples(data: Data, point: dict[str, Any], count: int) -> Batch:
    """The first test samples of the base seed at a point, made again."""
    config = override(override(base(), data.base), point)
    task, own = TASKS[config.data.name], node_of(config).data
    world = worlds.draw_world(task, streams(config.seed, config)["world"], own, config.data.samples)
    world = world._replace(shared=task.shared(own), test=jax.tree.map(lambda a: a[:count], world.test))
    return worlds.test_batch(task, world, own)


def examples(spec: dict[str, Any], data: Data) -> Figure | None:
    """The first test images of the base seed, a row a line, as a router and its experts see them (Fig. 6).

    `lines` maps words to points.
    """
    found = {words: np.asarray(samples(data, point, SHOWN).x) for words, point in spec["lines"].items()}
    found = {words: images for words, images in found.items() if images.ndim == 4}  # rows of numbers are no pictures
    if not found:
        return None
    figure = Figure(figsize=(0.95 * SHOWN, 1.2 * len(found) + 0.3))
    panels = figure.subplots(len(found), SHOWN, squeeze=False)
    for line, (words, images) in zip(panels, found.items(), strict=True):
        low, high = images.min(), images.max()
        for panel, image in zip(line, images, strict=False):
            pixels = (image - low) / (high - low)
            panel.imshow(pixels if image.shape[-1] == 3 else pixels[..., 0], cmap="gray", interpolation="nearest")
            panel.set_xticks([])
            panel.set_yticks([])
            panel.grid(visible=False)
        line[0].set_title(words, fontsize=9, loc="left").set_in_layout(
            False
        )  # or its length would widen the first image
    return figure
