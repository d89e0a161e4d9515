"""Sentences of findings and limits from the text templates of this room: a paragraph is one item."""

from __future__ import annotations

import importlib.resources
import re
from typing import Any

import jinja2


def paragraphs(template: str, **values: Any) -> list[str]:
    """Returns the paragraphs of a text template of this room, filled in and without line breaks."""
    folder = importlib.resources.files("routed.trace")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"digits": digits, "capital": capital}
    text = environment.get_template(template).render(**values)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def digits(value: float, count: int = 2) -> str:
    """Returns a number with so many significant digits."""
    return f"{value:.{count}g}"


def capital(text: str) -> str:
    """Returns a text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
