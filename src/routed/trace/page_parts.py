"""Parts that the pages of traces and of surgery share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from routed.analysis import page, plots
from routed.trace.figures import Drawn


def page_of(template: str, figures: Iterable[Drawn], **values: Any) -> str:
    """Returns the page of a template of this room, with figures as inline SVG."""
    embedded = [
        {"name": name, "caption": caption, "svg": Markup(page.unique_ids(plots.svg(figure), name))}
        for name, figure, caption in figures
    ]
    return page.render(f"trace/{template}", figures=embedded, **values)
