"""Parts that the pages of traces and of surgery share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from routed.analysis import page, plots
from routed.trace.figures import Drawn


def embedded(figures: Iterable[Drawn]) -> list[dict[str, Any]]:
    """Returns figures with name, caption and inline SVG, for the template of a page."""
    return [
        {"name": name, "caption": caption, "svg": Markup(page.unique_ids(plots.svg(figure), name))}
        for name, figure, caption in figures
    ]
