"""Figures from rows. A figure is asked for by a dict with a `kind`; KINDS maps it to the function that draws it."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from routed.plots.clusters import dispatch, embedding, products, series
from routed.plots.curves import curves, gap, success, training
from routed.plots.frame import AXES, STYLE, Data
from routed.plots.maps import forest, methods, phase, routing
from routed.plots.paired import languages, paired

KINDS = {
    "curves": curves, "training": training, "gap": gap, "success": success, "phase": phase, "forest": forest, "methods": methods,
    "routing": routing, "paired": paired, "languages": languages, "series": series, "dispatch": dispatch, "products": products,
    "embedding": embedding,
}  # fmt: skip


def draw(spec: dict[str, Any], data: Data) -> Figure | None:
    """The figure that `spec` asks for, or None when its rows are missing."""
    with matplotlib.rc_context(STYLE):
        return KINDS[spec["kind"]](spec, data)


def svg(figure: Figure) -> str:
    """The figure as SVG; the same rows give the same text."""
    return _rendered(figure, format="svg", metadata={"Date": None}).decode()


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    return _rendered(figure, format="png", dpi=150)


def _rendered(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, **options)
    return buffer.getvalue()


__all__ = ["AXES", "KINDS", "STYLE", "Data", "draw", "png", "svg"]
