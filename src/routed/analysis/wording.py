"""Sentences and pages from the package's templates: a writer edits those, and Python hands over numbers."""

from __future__ import annotations

import hashlib
import importlib.resources
import re
from collections.abc import Callable, Sequence
from typing import Any

import jinja2

from routed.engine.rows import format_value


def render(template: str, **values: Any) -> str:
    """Returns a template of the package, such as analysis/report.html, filled in.

    A page of HTML escapes each text that is no `Markup`.
    """
    package = importlib.resources.files("routed")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: package.joinpath(name).read_text("utf-8")),
        autoescape=lambda name: str(name).endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"share": shown_share, "shown": format_value}
    return environment.get_template(template).render(**values)


def paragraphs(template: str, **values: Any) -> list[str]:
    """Returns the paragraphs of a text template, filled in and without line breaks; empty ones are left out."""
    return [" ".join(text.split()) for text in re.split(r"\n\s*\n", render(template, **values)) if text.strip()]


def listed(numbers: Sequence[int], name: Callable[[int], str] = str) -> str:
    """Returns the names of numbers as text: 1, 2 and 5 to 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        part for run in runs for part in ([f"{name(run[0])} to {name(run[-1])}"] if len(run) > 2 else map(name, run))
    ]
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def shown_share(part: dict[str, Any]) -> str:
    """Returns a part's share of the whole gap in percent with its interval; without what is NaN of these."""
    if part["share"] != part["share"]:
        return ""
    text = f"{100 * part['share']:z.0f} %"
    if part["share_low"] != part["share_low"]:
        return text
    return f"{text} [{100 * part['share_low']:z.0f}, {100 * part['share_high']:z.0f}]"


def unique_ids(svg: str, name: str) -> str:
    """Returns an SVG whose ids and references begin with a hash of a name: inline SVGs share the page's name space."""
    svg, prefix = svg[svg.index("<svg") :], f"f{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    for mark in ('id="', 'href="#', "url(#"):
        svg = svg.replace(mark, f"{mark}{prefix}-")
    return svg
