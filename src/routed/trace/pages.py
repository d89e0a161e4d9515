"""The pages of traces and of surgery from their templates; a paragraph of a text template is one item of a list."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterable
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from routed.analysis import plots, wording


def paragraphs(template: str, **values: Any) -> list[str]:
    """Returns the paragraphs of a text template of this room, filled in and without line breaks."""
    folder = importlib.resources.files("routed.trace")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"spread": spread, "percent": percent, "digits": digits, "capital": capital}
    text = environment.get_template(template).render(**values)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def digits(value: float, count: int = 2) -> str:
    """Returns a number with so many significant digits."""
    return f"{value:.{count}g}"


def spread(values: pd.Series, form: str = "{:.2g}") -> str:
    """Returns the median over layers, with the least and the largest."""
    middle, low, high = (form.format(float(f(values))) for f in (np.median, np.min, np.max))
    return middle if low == high else f"{middle} ({low} to {high} over layers)"


def percent(values: pd.Series) -> str:
    """Returns the spread of shares in percent."""
    return spread(100 * values, "{:.0f} %")


def capital(text: str) -> str:
    """Returns a text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def embedded(figures: Iterable[tuple[str, plots.Chart, str]]) -> list[dict[str, Any]]:
    """Returns figures (name, chart, caption) for a template: name, caption, and the chart as inline SVG."""
    return [
        {"name": name, "caption": caption, "svg": Markup(wording.unique_ids(plots.svg(figure), name))}
        for name, figure, caption in figures
    ]


def page_of(template: str, figures: Iterable[tuple[str, plots.Chart, str]], **values: Any) -> str:
    """Returns the page of a template of this room, with figures (name, chart, caption) as inline SVG."""
    return wording.render(f"trace/{template}", figures=embedded(figures), **values)
