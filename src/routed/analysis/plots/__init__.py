"""Figures from rows. A figure is asked for by a dict with a `kind`; PLOTS maps it to the function that draws it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from routed.analysis.plots.clusters import dispatch, embedding, products, series
from routed.analysis.plots.curves import curves, gap, success, training
from routed.analysis.plots.equal_cost import dearer, equal_cost
from routed.analysis.plots.foretold import axes, foretold
from routed.analysis.plots.frame import STYLE, Data, drawn
from routed.analysis.plots.latent import examples, latent
from routed.analysis.plots.maps import forest, methods, phase, routing
from routed.analysis.plots.paired import above, compared, languages, paired
from routed.analysis.plots.parts import parts
from routed.analysis.plots.powers import powers
from routed.analysis.plots.reached import ratios, reached
from routed.analysis.plots.sample import sample
from routed.analysis.plots.swept import against, multiples
from routed.contracts import UserError
from routed.settings.tree import nearest


def named_axes(spec: dict[str, Any], data: Data) -> list[str]:
    """The keys of a figure's axes, lines and panels, and those that tell the points apart that it names."""
    points = [*spec.get("methods", {}).values(), *spec.get("lines", {}).values()]
    return [*drawn(spec), *dict.fromkeys(key for point in points for key in point if key in data.own)]


class Plot(NamedTuple):
    """A kind of figure: `draw(spec, data)` gives it, or None when its rows are missing; and the caption below it, or what makes it.

    `axes(spec, data)` are the swept keys of which it shows every value; of the others it shows one, and its title and caption say so. It may show the base seed `alone`.
    """

    draw: Callable[[dict[str, Any], Data], Figure | None]
    caption: str | Callable[[dict[str, Any], Data], str]
    axes: Callable[[dict[str, Any], Data], list[str]] = named_axes
    alone: bool = False


#: kind -> plot. A user's file adds to it.
PLOTS: dict[str, Plot] = {
    "against": Plot(
        against,
        "A swept key: the loss of every arm, what frozen controls lose against the learned router (paired by seed; above 0 the learned router is better; the name is the fairest control there), and dead experts; means with 95 % intervals.",
    ),
    "multiples": Plot(
        multiples,
        "",
        lambda spec, data: [*drawn(spec), *drawn(spec["of"])],
    ),
    "curves": Plot(
        curves,
        "Means over seeds with 95 % intervals (geometric means on log axes).",
    ),
    "training": Plot(
        training,
        "Means over seeds with 95 % intervals during training (geometric means on log axes).",
    ),
    "gap": Plot(
        gap,
        "Log ratios of loss, paired by seed, with 95 % t intervals. Left: each step takes one confound away, starts where the one before ends, and the last ends at the whole gap. Right: the whole gap, and comparisons that are no part of it.",
    ),
    "success": Plot(
        success,
        "Share of runs with 95 % intervals (Wilson's); dotted: the probability predicted by the theorem.",
        lambda spec, data: [spec["x"], "data.clusters", "data.separation"],
    ),
    "phase": Plot(
        phase,
        "Mean paired advantage of the learned router; a star marks cells whose 95 % interval excludes 0; black: the zero contour; the name in a cell is the fairest frozen control there.",
    ),
    "forest": Plot(
        forest,
        "Mean paired log ratio of top-1 loss with 95 % t intervals; each line changes one choice of the protocol.",
        lambda spec, data: sorted(data.own),
    ),
    "methods": Plot(
        methods,
        "Means over seeds with 95 % intervals (geometric means on log axes), best first by the first panel.",
    ),
    "routing": Plot(
        routing,
        "Mean routing probability by cluster and expert for the base seed, ordered by the best match at the end: a specialised router is a diagonal. Crosses: dead experts. A frozen router is shown once.",
        alone=True,
    ),
    "paired": Plot(
        paired,
        lambda spec, data: (
            f"{compared(spec['metric'], data)} the learned router, paired by seed, with 95 % t intervals; {above(spec['metric'], data)}."
        ),
    ),
    "equal_cost": Plot(
        equal_cost,
        dearer,
        lambda spec, data: [spec["x"], "steps"],
    ),
    "languages": Plot(
        languages,
        "Mean difference of validation loss from the learned router, paired by seed, with 95 % t intervals; above 0 the learned router is better.",
    ),
    "parts": Plot(
        parts,
        "The loss of every arm as a sum, means over seeds (routed.metrics.regret): what its partition costs the best experts, how far its experts are from these, and what the weights of its gate add (hatched; below 0 it lies on the others, back to the measured loss). Black: the measured loss with its 95 % t interval; hollow: the loss of experts trained on a frozen copy of the partition, predicted from its cells and the number of samples (too low where the partition was learned from the same samples). Bars that are longer than the axis say what they are made of.",
    ),
    "reached": Plot(
        reached,
        "Means over seeds with 95 % intervals; dotted: the level. Last panel: the value at which the mean over seeds reaches it, linear between the logarithms of values, with 95 % percentile intervals of a bootstrap over seeds, cut at the largest value.",
        lambda spec, data: data.swept,
    ),
    "powers": Plot(
        powers,
        "Means over seeds with 95 % intervals; lines: least squares on the logarithms of the means, slopes with 95 % percentile intervals of a bootstrap over seeds; dotted: the power that was foretold.",
        lambda spec, data: data.swept,
    ),
    "ratios": Plot(
        ratios,
        "Ratios of the samples that a level needs, from means over seeds, with 95 % percentile intervals of a bootstrap over common seeds; slopes by least squares on logarithms; dotted: the bound's power, through 1 at 1.",
        lambda spec, data: data.swept,
    ),
    "axes": Plot(
        axes,
        "Gap of every point, mean over seeds with its 95 % interval, against each setting of the law; all others differ from point to point. Colour: the fairest control there. Line and band: the law at the centre of the design, with its 95 % interval. Points of few values are spread sideways; intervals are cut where the axis ends.",
        lambda spec, data: data.swept,
    ),
    "foretold": Plot(
        foretold,
        "Gaps at points that the law has not seen: expected before they ran (95 % prediction intervals, sideways) and measured (means over seeds with 95 % intervals); the line is where both are equal; intervals are cut where an axis ends. Colour: the fairest control there.",
        lambda spec, data: data.swept,
    ),
    "series": Plot(
        series,
        "Means over seeds with 95 % intervals (bands).",
    ),
    "dispatch": Plot(
        dispatch,
        "Test samples of each cluster (rows) that go to each expert (columns), learned router, base seed.",
        alone=True,
    ),
    "sample": Plot(
        sample,
        "Routing probabilities of each expert (rows) for the first tokens (columns, at most 64) of the first validation row, base seed, after training; above each panel the mean entropy of these tokens, at most the logarithm of the number of experts.",
        alone=True,
    ),
    "products": Plot(
        products,
        "Largest absolute product of an expert's filters, or of its router row, with each cluster's signals, for the base seed: a line an expert and cluster.",
        alone=True,
    ),
    "latent": Plot(
        latent,
        "t-SNE of what its expert made of each test image with one label, base seed, at the end of training. Left: the expert; right: the class; classes without a name are grey.",
        lambda spec, data: sorted({key for point, *_ in spec["panels"].values() for key in point if key in data.own}),
        alone=True,
    ),
    "examples": Plot(
        examples,
        "The first test images of the base seed, as routers and experts see them.",
        alone=True,
    ),
    "embedding": Plot(
        embedding,
        "t-SNE of test samples of the base seed; colour and marker: the expert; background: the predicted class, by a vote of the 15 nearest samples.",
        alone=True,
    ),
}


def check(spec: dict[str, Any]) -> None:
    """Refuses a figure that nothing can draw.

    Raises:
      UserError: an unknown kind.
    """
    if (kind := spec["kind"]) not in PLOTS:
        raise UserError(
            f"figure {spec.get('name', '')}: unknown kind {kind!r}{nearest(kind, PLOTS)}; known: {', '.join(PLOTS)}"
        )


def draw(spec: dict[str, Any], data: Data) -> Figure | None:
    """The figure that `spec` asks for, or None when its rows are missing."""
    check(spec)
    with matplotlib.rc_context(STYLE):
        return PLOTS[spec["kind"]].draw(spec, data)


def svg(figure: Figure, letters: str = "path") -> str:
    """The figure as SVG; the same rows give the same text. letters: path (looks the same everywhere), or none (a third of the bytes)."""
    with matplotlib.rc_context({"svg.fonttype": letters}):
        return _rendered(figure, format="svg", metadata={"Date": None}).decode()


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    return _rendered(figure, format="png", dpi=150)


def _rendered(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, **options)
    figure.set_layout_engine("none")  # laid out now: the next format would find the same places, in as much time again
    return buffer.getvalue()


__all__ = ["PLOTS", "STYLE", "Data", "Plot", "draw", "png", "svg"]
