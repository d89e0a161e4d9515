"""The code of users' files that a run depends on, so that edited code never stands behind old numbers.

Parts of the package are identified by its version. The code of a part from an experiment file is: the statements that
put the part into its table, the definitions that these statements name, and so on; and whole modules that they import,
unless these are installed packages. Claims, plots, sweeps and `get_config` do not count: their effects on a run are in
its config. Comments, formatting and docstrings do not count either. A name counts as used if a function has a local
variable of that name: too much code counts rather than too little.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import json
import pathlib
import re
import sys
import sysconfig
import types
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from routed.layer.auxiliary import AUXILIARY
from routed.metrics.router import METRICS
from routed.plan.arms import ARMS
from routed.plan.config import PACKAGED, parts_of, variants_of
from routed.plan.experiment_files import LOADED
from routed.training.probes import PROBES

#: The version of this package.
VERSION = importlib.metadata.version("routed")

#: Folders whose code is identified by the version of its package.
_INSTALLED = tuple(
    pathlib.Path(folder).resolve()
    for folder in (str(importlib.resources.files("routed")), *map(sysconfig.get_path, ("stdlib", "platstdlib")))
)

#: Names of the folders of installed packages, in this environment and in others that it imports from.
_PACKAGES = {"site-packages", "dist-packages"}

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

#: Label of a part -> name of a file -> digest of the part's code in that file.
Code = dict[str, dict[str, str]]


def code_of(config: ConfigDict) -> Code:
    """Digests of the code of those parts of a run, in any phase, that users' files bring."""
    code, losses = Code(), {f"loss {name}": name for name in AUXILIARY}
    for phase in variants_of(config):
        active = {part.label: part.part for part in parts_of(phase)}
        parts = {label: part for label, part in active.items() if label not in losses}
        weighted = {label: AUXILIARY[name] for label, name in losses.items() if label in active and phase.losses[name]}
        code |= _digests(parts | weighted)
    return code


def code_of_metrics() -> Code:
    """Digests of the code of users' metrics and probes: no run depends on it, but the columns of its rows do."""
    metrics = {f"metric {name}": metric for name, metric in METRICS.items()}
    return _digests(metrics | {f"probe {name}": probe for name, probe in PROBES.items()})


def definition_of(arm: str) -> Code:
    """A digest of an arm's changes, its match and its transplant."""
    definition = ARMS[arm]
    # A function counts by its name: the values that it returns are in the config of each run.
    changes = {key: value.__qualname__ if callable(value) else value for key, value in definition.changes.items()}
    text = json.dumps([changes, definition.match, definition.transplants], sort_keys=True, default=list)
    return {f"arm {arm}": {"ARMS": _hash(text)}}


def texts_of(config: ConfigDict) -> list[str]:
    """The whole texts of the users' files with the code of a run's parts, comments and docstrings included."""
    parts = {part.label: part.part for part in parts_of(config) if not _is_packaged(part.part)}
    paths = set[pathlib.Path]().union(*(code_by_file(_name(label), part) for label, part in parts.items()))
    return sorted(LOADED[path].text if path in LOADED else path.read_text(encoding="utf-8") for path in paths)


def change(label: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Names a part and the files in which its code changed; empty if the code is the same, in files of any names."""
    if sorted(before.values()) == sorted(now.values()):
        return ""
    changed = [file for file, digest in now.items() if digest not in before.values()] or list(now)
    return f"{label} ({', '.join(sorted(changed))})"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(label: str) -> str:
    return re.split("[ =]", label, maxsplit=1)[-1]


def _is_packaged(part: Any) -> bool:
    """True if a part is of the package: in a table of the core, or a global of a loaded module of `papers`."""
    papers = [vars(module) for name, module in sys.modules.items() if name.startswith("routed.papers.")]
    return any(part is value for values in (PACKAGED, *(paper.values() for paper in papers)) for value in values)


def _digests(parts: Mapping[str, Any]) -> Code:
    """The digests of the parts that are not the package's; cached, as a plan asks thousands of times."""
    for label, part in parts.items():
        if _DIGESTS.get(id(part), (None,))[0] is not part:
            digests = None
            if not _is_packaged(part):
                code = code_by_file(_name(label), part)
                digests = {file.name: _hash("\0".join(sorted(statements))) for file, statements in code.items()}
            _DIGESTS[id(part)] = part, digests
    return {label: digests for label, part in parts.items() if (digests := _DIGESTS[id(part)][1]) is not None}


#: id of a part -> the part, and its digests; None: the part is the package's.
_DIGESTS: dict[int, tuple[Any, dict[str, str] | None]] = {}


def code_by_file(name: str, part: Any) -> dict[pathlib.Path, set[str]]:
    """The code of a part in users' files: file -> texts of statements without comments, formatting and docstrings.

    Follows the names that the part's statements use, and their imports. Statements with other effects than binding a
    name, such as a loop that registers several parts, count too; but TABLE["another"] = ... only if the part's code
    names TABLE.
    """
    code: dict[pathlib.Path, set[str]] = {}
    trees = {file: _parsed(source.text) for file, source in LOADED.items()}
    pending = [(file, node) for file, tree in trees.items() for node in tree.body if _reaches(name, node)]
    modules = [sys.modules.get(getattr(value, "__module__", "")) for value in part]
    while pending:
        file, statement = pending.pop()
        if (text := ast.unparse(statement)) in code.setdefault(file, set()):
            continue
        code[file].add(text)
        modules += _imported(statement, LOADED[file].module)
        used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        values = [vars(LOADED[file].module).get(name) for name in used]
        modules += [value for value in values if isinstance(value, types.ModuleType)]  # however it was loaded
        pending += [(file, node) for name in used for node in _bindings(name, trees[file])]
    while modules:
        imported = modules.pop()
        file = pathlib.Path(getattr(imported, "__file__", None) or "").resolve()
        if imported is None or file.suffix != ".py" or not file.is_file() or _is_installed(file):
            continue
        tree = _parsed(file.read_text(encoding="utf-8"))
        if (text := ast.unparse(tree)) not in code.setdefault(file, set()):
            code[file].add(text)
            modules += _imported(tree, imported)
    return code


def _is_installed(file: pathlib.Path) -> bool:
    """True for a module of an installed package, or of Python."""
    return bool(_PACKAGES & {*file.parts}) or any(file.is_relative_to(folder) for folder in _INSTALLED)


def _bindings(name: str, tree: ast.Module) -> list[ast.stmt]:
    """Returns the statements that bind a name or change its value; of an imported name, only its import."""
    nodes = [node for node in tree.body if name in _bound(node)]
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)] or nodes


def _reaches(name: str, node: ast.stmt) -> bool:
    """True if a statement binds the name, or has an effect that neither binds names nor adds a part of another name."""
    if name in _bound(node):
        return True
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return not isinstance(node, _DEFINITIONS | ast.Import | ast.ImportFrom)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    changed = [
        each for target in targets for each in ast.walk(target) if isinstance(each, ast.Subscript | ast.Attribute)
    ]
    slices = [each.slice for each in changed if isinstance(each, ast.Subscript)]
    keys = {each.value for each in slices if isinstance(each, ast.Constant)}
    return bool(changed) and name in (keys or {name})


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement binds outside of functions and classes, or whose value it changes (SIZES["a"] = 3)."""
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    nodes = [*ast.walk(statement)]
    names = {node.name for node in nodes if isinstance(node, _DEFINITIONS)}
    names |= {node.asname or node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    methods = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    changed = [getattr(node, "value", node) for node in (*stored, *methods)]  # the name whose attribute or item changes
    return names | {node.id for node in changed if isinstance(node, ast.Name)}


def _imported(tree: ast.AST, importer: types.ModuleType) -> list[types.ModuleType | None]:
    """The modules that the imports anywhere in a tree load, and those that they take out of a package."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            package = importlib.util.resolve_name(package, importer.__package__) if node.level else package
            names += [package, *(f"{package}.{alias.name}" for alias in node.names)]
    return [sys.modules.get(name) or _unloaded(name) for name in names]


def _unloaded(name: str) -> types.ModuleType | None:
    """Returns a module without content for one that a function will import, with its file; None: there is no file."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:  # looking for the file would import the package
        return None
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        if (spec := importlib.util.find_spec(name)) is not None and spec.origin:
            module = types.ModuleType(name)
            module.__file__, module.__package__ = spec.origin, spec.parent
            return module
    return None


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module:
    """The tree of a file without docstrings, with an import for each name that a statement imports."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS | ast.Module) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    tree.body = [part for node in tree.body for part in _single(node)]
    return tree


def _single(node: ast.stmt) -> list[ast.stmt]:
    if isinstance(node, ast.Import):
        return [ast.Import([alias]) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [ast.ImportFrom(node.module, [alias], node.level) for alias in node.names]
    return [node]
