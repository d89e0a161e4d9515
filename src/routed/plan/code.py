"""The code that users' files bring to a run, so that edited code never stands behind old numbers.

Packaged parts are known by the version of routed. Of an experiment file, a part has the statements that put it into its table, and
the definitions that these name, and so on; and whole modules that they import, unless these are installed. Claims, plots, sweeps and
`get_config` are not among them: what they change of a run is in its config. Comments, formatting and docstrings do not count.
"""

from __future__ import annotations

import ast
import copy
import dis
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
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from routed.layer.auxiliary import AUXILIARY
from routed.metrics.router import METRICS
from routed.plan.arms import ARMS
from routed.plan.config import PACKAGED, parts_of
from routed.plan.experiment import LOADED
from routed.training.phases import configs_of
from routed.training.probes import PROBES

#: The version of this package.
VERSION = importlib.metadata.version("routed")

#: Code in these folders is known by the version of its package.
_INSTALLED = tuple(
    pathlib.Path(folder).resolve()
    for folder in (
        str(importlib.resources.files("routed")),
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)

#: label of a part -> name of a file -> digest of what the part has there.
Code = dict[str, dict[str, str]]


def code_of(config: ConfigDict) -> Code:
    """The code of the parts that take part in a run of a config, in any phase, and that are not packaged."""
    found, losses = Code(), {f"loss {name}": name for name in AUXILIARY}
    for phase in configs_of(config):
        active = {one.label: one.part for one in parts_of(phase)}
        parts = {label: part for label, part in active.items() if label not in losses}
        counted = {label: AUXILIARY[name] for label, name in losses.items() if label in active and phase.losses[name]}
        found |= _digests(parts | counted)
    return found


def code_of_metrics() -> Code:
    """The code of metrics and probes that are not packaged: no run depends on it, but what its rows hold does."""
    metrics = {f"metric {name}": metric for name, metric in METRICS.items()}
    return _digests(metrics | {f"probe {name}": probe for name, probe in PROBES.items()})


def definition_of(arm: str) -> Code:
    """What an arm changes, and what it takes from another."""
    one = ARMS[arm]
    # A function by its name: what it returns stands in the config of each run.
    changes = {key: value.__qualname__ if callable(value) else value for key, value in one.changes.items()}
    text = json.dumps([changes, one.match, one.transplants], sort_keys=True, default=list)
    return {f"arm {arm}": {"ARMS": hashlib.sha256(text.encode()).hexdigest()[:16]}}


def texts_of(config: ConfigDict) -> list[str]:
    """The whole texts of the users' files that the code of a run's parts is in: comments, docstrings and all else."""
    brought = _brought({one.label: one.part for one in parts_of(config)})
    files = set[pathlib.Path]().union(*(reached(name, part) for name, part in brought.values()))
    return sorted(LOADED[file].text if file in LOADED else file.read_text(encoding="utf-8") for file in files)


def change(label: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A part with the files in which its code is not what it was; empty if it is the same, in files of whatever names."""
    if sorted(before.values()) == sorted(now.values()):
        return ""
    files = [file for file, digest in now.items() if digest not in before.values()] or list(now)
    return f"{label} ({', '.join(sorted(files))})"


def _digests(parts: Mapping[str, Any]) -> Code:
    return {label: _digest(name, part) for label, (name, part) in _brought(parts).items()}


def _brought(parts: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """label -> name and part of those that are not packaged."""
    others = {label: part for label, part in parts.items() if not any(part is one for one in PACKAGED)}
    return {label: (re.split("[ =]", label, maxsplit=1)[-1], part) for label, part in others.items()}


def _digest(name: str, part: Any) -> dict[str, str]:
    if (known := _KNOWN.get(id(part))) is None or known[0] is not part:
        texts = {file.name: "\0".join(sorted(found)) for file, found in reached(name, part).items()}
        digests = {file: hashlib.sha256(text.encode()).hexdigest()[:16] for file, text in texts.items()}
        known = _KNOWN[id(part)] = part, digests
    return known[1]


#: id of a part -> the part, and its digests: a plan asks thousands of times.
_KNOWN: dict[int, tuple[Any, dict[str, str]]] = {}


def reached(name: str, part: Any) -> dict[pathlib.Path, set[str]]:
    """What a part has of users' files: file -> statements without comments, formatting and docstrings.

    It has what they call by its name, and what these files do beside naming things, as a loop that makes several parts does, but for
    what they do for another name: TABLE["another"] = ... counts only if something that the part names reads that table.
    """
    found: dict[pathlib.Path, set[str]] = {}
    acts = [(file, one) for file, source in LOADED.items() for one in _parsed(source.text).body if _acts(one)]
    waiting = [(file, one) for file, one in acts if name in (_keys(one) or {name})]
    waiting += [(file, one) for file, source in LOADED.items() for one in _binding(name, _parsed(source.text))]
    modules = [sys.modules.get(getattr(value, "__module__", "")) for value in part]
    while waiting:
        file, statement = waiting.pop()
        if (text := _text(statement)) in found.setdefault(file, set()):
            continue
        found[file].add(text)
        module, whole = LOADED[file].module, _parsed(LOADED[file].text)
        modules += _imported(statement, module)
        for used in _names(compile(ast.Module([statement], []), str(file), "exec", dont_inherit=True)):
            if isinstance(value := vars(module).get(used), types.ModuleType):  # however it was loaded
                modules.append(value)
            waiting += [(file, one) for one in _binding(used, whole)]
    while modules:
        file = pathlib.Path(getattr(further := modules.pop(), "__file__", None) or "").resolve()
        if further is None or not file.is_file() or any(file.is_relative_to(folder) for folder in _INSTALLED):
            continue
        whole = _parsed(file.read_text(encoding="utf-8"))
        if (text := _text(whole)) not in found.setdefault(file, set()):
            found[file].add(text)
            modules += _imported(whole, further)
    return found


def _binding(name: str, tree: ast.Module) -> list[ast.stmt]:
    """The statements that bind a name, or fill its value; if it is imported, the import of that name alone."""
    found = [one for one in tree.body if name in _bound(one)]
    alone = [copy.copy(one) for one in found if isinstance(one, ast.Import | ast.ImportFrom)]
    for one in alone:
        one.names = [alias for alias in one.names if _local(alias) == name]
    return [*alone] or found


def _keys(statement: ast.stmt) -> set[Any]:
    """The keys of TABLE[key] = ... that are written out."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    slices = [target.slice for target in targets if isinstance(target, ast.Subscript)]
    return {key.value for key in slices if isinstance(key, ast.Constant)}


def _acts(statement: ast.stmt) -> bool:
    """Does it do more than give a name to something?"""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(isinstance(node, ast.Subscript | ast.Attribute) for target in targets for node in ast.walk(target))
    documents = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    names = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    return not documents and not isinstance(statement, names)


def _bound(node: ast.AST) -> set[str]:
    """The names that a statement binds, outside of functions and classes, or whose value it fills, as in SIZES["a"] = 3."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {_local(alias) for alias in node.names}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    found: set[str] = set()
    filled = node.func if isinstance(node, ast.Call) else node
    if isinstance(filled, ast.Subscript | ast.Attribute) and (filled is not node or isinstance(filled.ctx, ast.Store)):
        root = filled.value
        found = {root.id} if isinstance(root, ast.Name) else set()
    return found.union(*map(_bound, ast.iter_child_nodes(node)))


def _local(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _imported(node: ast.AST, by: types.ModuleType) -> list[types.ModuleType | None]:
    """The modules that imports anywhere in a node load, and those that they take out of a package."""
    names: list[str] = []
    for one in ast.walk(node):
        if isinstance(one, ast.Import):
            names += [alias.name for alias in one.names]
        elif isinstance(one, ast.ImportFrom):
            package = "." * one.level + (one.module or "")
            package = importlib.util.resolve_name(package, by.__package__) if one.level else package
            names += [package, *(f"{package}.{alias.name}" for alias in one.names)]
    return [sys.modules.get(name) for name in names]


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names that code reads, and code inside of it."""
    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD_") and one.opname.endswith(("NAME", "GLOBAL", "GLOBALS")):
            yield one.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _text(node: ast.AST) -> str:
    """Code without comments, formatting and docstrings."""
    bare = copy.deepcopy(node)
    for one in ast.walk(bare):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
            one
        ):
            one.body = one.body[1:] or [ast.Pass()]
    return ast.unparse(bare)


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)
