"""The pages of traces and of surgery from their templates, with figures as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from routed.analysis import plots, wording


def embedded(figures: Iterable[tuple[str, plots.Chart, str]]) -> list[dict[str, Any]]:
    """Returns figures (name, chart, caption) for a template: name, caption, and the chart as inline SVG."""
    return [
        {"name": name, "caption": caption, "svg": Markup(wording.unique_ids(plots.svg(figure), name))}
        for name, figure, caption in figures
    ]


def page_of(template: str, figures: Iterable[tuple[str, plots.Chart, str]], **values: Any) -> str:
    """Returns the page of a template of this room, with figures (name, chart, caption) as inline SVG."""
    return wording.render(f"trace/{template}", figures=embedded(figures), **values)
