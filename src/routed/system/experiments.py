"""The experiments that come with `routed`: their files, and what each of them asks."""

from __future__ import annotations

import ast
import pathlib


def packaged() -> dict[str, pathlib.Path]:
    """Their files by name: in the package of a wheel, at the top of a checkout."""
    package = pathlib.Path(__file__).parents[1]
    folder = package / "experiments"
    folder = folder if folder.is_dir() else package.parents[1] / "experiments"
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def list_experiments() -> str:
    """A line for each of them: its name and the question that it asks; none is imported."""
    documents = {name: ast.get_docstring(ast.parse(file.read_text("utf-8"))) for name, file in packaged().items()}
    width = max(map(len, documents))
    lines = [f"  {name:{width}}  {(text or '').partition(chr(10))[0]}" for name, text in documents.items()]
    return "\n".join(
        [*lines, "", "figures, scales and arms of one: routed list NAME; run it: routed run --config=NAME"]
    )
