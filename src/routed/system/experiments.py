"""The experiments of `routed`: their files and their questions."""

from __future__ import annotations

import ast
import pathlib


def packaged() -> dict[str, pathlib.Path]:
    """The experiment files by name: in the package of a wheel, or at the top of a checkout."""
    package = pathlib.Path(__file__).parents[1]
    folder = package / "experiments"
    folder = folder if folder.is_dir() else package.parents[1] / "experiments"
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def list_experiments() -> str:
    """A line for each experiment: its name and its question, without importing the file."""
    documents = {name: ast.get_docstring(ast.parse(file.read_text("utf-8"))) for name, file in packaged().items()}
    width = max(map(len, documents))
    lines = [f"  {name:{width}}  {(text or '').partition(chr(10))[0]}" for name, text in documents.items()]
    return "\n".join(
        [*lines, "", "figures, scales and arms of one: routed list NAME; run it: routed run --config=NAME"]
    )
