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
    "code: docstrings that begin with a question word": 0,
    "code: files over 300 lines": 5,
    "code: functions over 60 lines": 0,
    "code: functions with more than 8 parameters": 0,
    "code: lines over 120 characters": 0,
    "code: longest chain of imports": 20,
    "code: names that are pronouns": 18,
    'code: tests `"key" in config`': 4,
    "documents: lines over 100 characters": 0,
    "documents: sentences over 28 words": 2,
    "documents: words": 53_900,
    "experiments: docstrings over 40 lines": 0,
    "lines: all of src": 46_220,
    "lines: core": 25_700,
}
TOOLS = {"publish", "trace", "suite", "bench", "aot", "tools"}
QUESTIONS = ("What ", "Which ", "Whether ", "Where ", "Who ", "How ", "When ", "Of ", "That ", "As ", "Does ", "Is it ")
PRONOUNS = {"one", "found", "own", "place", "places", "seen", "made", "kept", "told", "known", "words", "there"}
PRONOUNS |= {"held", "them", "those", "others", "other", "it"}


def code_files() -> list[pathlib.Path]:
    """Returns the Python files of the package, the experiments and the tests."""
    return [path for folder in ("src", "experiments", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


def documents() -> list[pathlib.Path]:
    """Returns the documents that people write; pages of results are generated, except their README."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("launch/*.md"), *ROOT.glob("docs/**/*.md")]
    return [path for path in pages if path.parent.name != "results" or path.stem in ("README", "without_page")]


def room(path: pathlib.Path) -> str:
    """Returns the part of the repository that a Python file belongs to."""
    top, _, name = [part.removesuffix(".py") for part in (*path.relative_to(ROOT).parts, "", "")[:3]]
    return top if top != "src" else "papers" if name == "papers" else "tools" if name in TOOLS else "core"


def asks(node: ast.AST) -> bool:
    """Returns True if a node has a docstring that begins with a question word."""
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return documented and (ast.get_docstring(node) or "").startswith(QUESTIONS)


def has_many_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns True if a function has too many parameters; keyword-only ones of public functions are free."""
    given = [*node.args.posonlyargs, *node.args.args, *(node.args.kwonlyargs if node.name.startswith("_") else [])]
    return len([arg for arg in given if arg.arg not in ("self", "cls")]) > 8


def tests_a_key(node: ast.AST) -> bool:
    """Returns True for `"key" in config`, where the name on the right is that of a config or of a node of one."""
    if not (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)):
        return False
    nodes = {"config", "node", "router", "selection", "training", "evaluation", "own"}
    return isinstance(node.left, ast.Constant) and ast.unparse(node.comparators[0]).split(".")[-1] in nodes


def count_code(path: pathlib.Path) -> Counter[str]:
    """Returns the counts of one Python file; names, docstrings, functions and keys are those of the package alone."""
    with tokenize.open(path) as file:
        text = file.read()
    lines, counts, where = text.splitlines(), Counter[str](), room(path)
    counts["code: lines over 120 characters"] = sum(len(line) > 120 for line in lines)
    counts[f"lines: {where}"] = len(lines)
    if where == "experiments":
        counts["experiments: docstrings over 40 lines"] = (
            len((ast.get_docstring(ast.parse(text)) or "").splitlines()) > 40
        )
    if where in ("tests", "experiments"):
        return counts
    counts["code: files over 300 lines"] = len(lines) > 300
    for node in ast.walk(ast.parse(text)):
        counts["code: docstrings that begin with a question word"] += asks(node)
        bound = isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        counts["code: names that are pronouns"] += bound and getattr(node, "arg", getattr(node, "id", "")) in PRONOUNS
        counts['code: tests `"key" in config`'] += tests_a_key(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            counts["code: functions over 60 lines"] += (node.end_lineno or 0) - node.lineno >= 60
            counts["code: functions with more than 8 parameters"] += has_many_parameters(node)
    return counts


def count_text(path: pathlib.Path) -> Counter[str]:
    """Returns the counts of one document; tables, code, HTML, headings and the targets of links may be long."""
    text, fenced, prose = path.read_text("utf-8"), False, []
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        free = fenced or line.startswith(("|", "<", "    ", "#", "```"))
        prose.append("" if free else re.sub(r"\]\([^)]*\)", "]", line))
    sentences = re.split(r"[.?!][)*\"]*\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.) ", "\n".join(prose))
    return Counter(
        {
            "documents: lines over 100 characters": sum(len(line) > 100 for line in prose),
            "documents: sentences over 28 words": sum(len(sentence.split()) > 28 for sentence in sentences),
            "documents: words": len(text.split()),
        }
    )


def imports() -> dict[str, set[str]]:
    """Returns the modules of the package that each module imports at its top; a package counts as its __init__.py."""
    src = ROOT / "src"
    paths = {".".join(path.relative_to(src).with_suffix("").parts): path for path in (src / "routed").rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        nodes = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
        pairs = [(node.module or "", f"{node.module}.{alias.name}") for node in nodes for alias in node.names]
        graph[name] = {whole if whole in paths else module for module, whole in pairs} & {*paths} - {name}
    return graph


def longest_chain() -> list[str]:
    """Returns the longest chain of modules of the package, each of which imports the next one."""
    graph = imports()

    @functools.cache
    def below(name: str) -> list[str]:
        return [name, *max(map(below, graph[name]), key=len, default=[])]

    return max(map(below, graph), key=len)


@functools.cache
def measure() -> dict[str, int]:
    """Returns every measure of the repository."""
    counts: Counter[str] = sum(map(count_code, code_files()), Counter())
    counts += sum(map(count_text, documents()), Counter[str]())
    counts["code: longest chain of imports"] = len(longest_chain())
    counts["lines: all of src"] = sum(counts[f"lines: {name}"] for name in ("core", "papers", "tools"))
    return {name: counts[name] for name in sorted({*counts, *LIMITS})}


def table() -> str:
    """Returns the measures as text, a line each, beside their limits."""
    limits = {name: f"limit {limit:,}" for name, limit in LIMITS.items()}
    return "\n".join(f"{value:>7,} {limits.get(name, ''):>13}  {name}" for name, value in measure().items())


if __name__ == "__main__":
    print(table())
    print(f"longest chain of imports: {' > '.join(name.removeprefix('routed.') for name in longest_chain())}")
