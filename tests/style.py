"""Measures of style: `python tests/style.py` prints them, and so does pytest before a whole suite.

tests/test_style.py holds the limits: a number may fall, never rise. Whoever lowers one lowers its limit here.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import tokenize
from collections import Counter

ROOT = pathlib.Path(__file__).parent.parent
#: The largest allowed value of each measure: what has been reached.
LIMITS = {
    "code: docstrings that begin with a question word": 309,
}
TOOLS = ("trace", "suite", "bench", "aot", "tools")
QUESTIONS = {"What", "Which", "Whether", "Where", "Who", "How", "When", "Of", "That", "As", "Does"}
PRONOUNS = {"one", "found", "own", "place", "places", "seen", "made", "kept", "told", "known", "words", "there"}
PRONOUNS |= {"held", "them", "those", "others", "other", "it"}
CODE_WIDTH, TEXT_WIDTH = 120, 100
LONGEST_FUNCTION, MOST_PARAMETERS, LONGEST_FILE = 60, 8, 300


def code_files() -> list[pathlib.Path]:
    """Returns the Python files of the package, the experiments and the tests."""
    return [path for folder in ("src", "experiments", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


def documents() -> list[pathlib.Path]:
    """Returns the documents that people write; pages of results are generated, except their README."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("launch/*.md"), *ROOT.glob("docs/**/*.md")]
    written = {"README.md", "without_page.md"}
    return sorted(path for path in pages if path.parent.name != "results" or path.name in written)


def room(path: pathlib.Path) -> str:
    """Returns the part of the repository that a Python file belongs to."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "src":
        return parts[0]
    return "papers" if parts[2] == "papers" else "tools" if parts[2].removesuffix(".py") in TOOLS else "core"


def names_bound(node: ast.AST) -> str | None:
    """Returns the name that a node of a syntax tree binds: a variable or a parameter."""
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None


def asks(node: ast.AST) -> bool:
    """Returns True if a node has a docstring that begins with a question word."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    text = ast.get_docstring(node) or ""
    return text.split(maxsplit=1)[:1] != [] and (text.split()[0] in QUESTIONS or text.startswith("Is it"))


def has_many_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns True if a function has too many parameters; keyword-only ones of public functions are free."""
    given = [*node.args.posonlyargs, *node.args.args, *(node.args.kwonlyargs if node.name.startswith("_") else [])]
    return len([arg for arg in given if arg.arg not in ("self", "cls")]) > MOST_PARAMETERS


def tests_a_key(node: ast.AST) -> bool:
    """Returns True for `"key" in config`, where the name on the right says that it is a config."""
    if not (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)):
        return False
    keyed = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
    return keyed and "config" in ast.unparse(node.comparators[0]).split("(")[0]


def count_code(path: pathlib.Path) -> Counter[str]:
    """Returns the counts of one Python file; names, docstrings, functions and keys are those of the package alone."""
    with tokenize.open(path) as file:
        text = file.read()
    lines, counts, where = text.splitlines(), Counter[str](), room(path)
    counts["code: lines over 120 characters"] = sum(len(line) > CODE_WIDTH for line in lines)
    counts[f"lines: {where}"] = len(lines)
    if where in ("tests", "experiments"):
        return counts
    counts["code: files over 300 lines"] = len(lines) > LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        counts["code: docstrings that begin with a question word"] += asks(node)
        counts["code: names that are pronouns"] += names_bound(node) in PRONOUNS
        counts['code: tests `"key" in config`'] += tests_a_key(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            counts["code: functions over 60 lines"] += (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
            counts["code: functions with more than 8 parameters"] += has_many_parameters(node)
    return counts


def count_text(path: pathlib.Path) -> Counter[str]:
    """Returns the counts of one document; tables, code, HTML, headings and the targets of links may be long."""
    text, fenced, long = path.read_text("utf-8"), False, 0
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        free = fenced or line.startswith(("|", "<", "    ", "#"))
        long += not free and len(re.sub(r"\]\([^)]*\)", "]", line)) > TEXT_WIDTH
    return Counter({"documents: lines over 100 characters": long, "documents: words": len(text.split())})


@functools.cache
def measure() -> dict[str, int]:
    """Returns every measure of the repository."""
    counts: Counter[str] = sum(map(count_code, code_files()), Counter())
    counts += sum(map(count_text, documents()), Counter[str]())
    counts["lines: all of src"] = sum(counts[f"lines: {name}"] for name in ("core", "papers", "tools"))
    return {name: counts[name] for name in sorted({*counts, *LIMITS})}


def table() -> str:
    """Returns the measures as text, a line each, beside their limits."""
    limits = {name: f"limit {limit:,}" for name, limit in LIMITS.items()}
    return "\n".join(f"{value:>7,} {limits.get(name, ''):>13}  {name}" for name, value in measure().items())


if __name__ == "__main__":
    print(table())
