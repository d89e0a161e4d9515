"""The code of users' files that a run depends on, so that edited code never stands behind old numbers.

Parts of the package are identified by its version. The code of a part from an experiment file is: the statements that
put the part into its table, the definitions that these statements name, and so on; and whole modules that they import,
unless these are installed packages. Claims, plots, sweeps and `get_config` do not count: their effects on a run are in
its config. Comments, formatting and docstrings do not count either.
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
from routed.plan.experiment_files import LOADED
from routed.training.phases import configs_of
from routed.training.probes import PROBES

#: The version of this package.
VERSION = importlib.metadata.version("routed")

#: Folders whose code is identified by the version of its package.
_INSTALLED = tuple(
    pathlib.Path(folder).resolve()
    for folder in (
        str(importlib.resources.files("routed")),
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)

#: Label of a part -> name of a file -> digest of the part's code in that file.
Code = dict[str, dict[str, str]]


def code_of(config: ConfigDict) -> Code:
    """Digests of the code of those parts of a run, in any phase, that users' files bring."""
    code, losses = Code(), {f"loss {name}": name for name in AUXILIARY}
    for phase in configs_of(config):
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
    parts = _users_parts({part.label: part.part for part in parts_of(config)})
    paths = set[pathlib.Path]().union(*(code_by_file(name, part) for name, part in parts.values()))
    return sorted(LOADED[path].text if path in LOADED else path.read_text(encoding="utf-8") for path in paths)


def change(label: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Names a part and the files in which its code changed; empty if the code is the same, in files of any names."""
    if sorted(before.values()) == sorted(now.values()):
        return ""
    changed = [file for file, digest in now.items() if digest not in before.values()] or list(now)
    return f"{label} ({', '.join(sorted(changed))})"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digests(parts: Mapping[str, Any]) -> Code:
    return {label: _digest(name, part) for label, (name, part) in _users_parts(parts).items()}


def _users_parts(parts: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The name and part, by label, of parts that are not the package's."""
    users = {label: part for label, part in parts.items() if not _is_packaged(part)}
    return {label: (re.split("[ =]", label, maxsplit=1)[-1], part) for label, part in users.items()}


def _is_packaged(part: Any) -> bool:
    """True if a part is of the package: in a table of the core, or a global of a loaded module of `papers`."""
    if any(part is packaged for packaged in PACKAGED):
        return True
    loaded = [module for name, module in sys.modules.items() if name.startswith("routed.papers.")]
    return any(part is value for module in loaded for value in vars(module).values())


def _digest(name: str, part: Any) -> dict[str, str]:
    """The digest of a part's code in each file; cached, as a plan asks thousands of times."""
    if (cached := _DIGESTS.get(id(part))) is None or cached[0] is not part:
        code = code_by_file(name, part)
        digests = {file.name: _hash("\0".join(sorted(statements))) for file, statements in code.items()}
        cached = _DIGESTS[id(part)] = part, digests
    return cached[1]


#: id of a part -> the part, and its digests.
_DIGESTS: dict[int, tuple[Any, dict[str, str]]] = {}


def code_by_file(name: str, part: Any) -> dict[pathlib.Path, set[str]]:
    """The code of a part in users' files: file -> texts of statements without comments, formatting and docstrings.

    Follows the names that the part's statements use, and their imports. Statements with other effects than binding a
    name, such as a loop that registers several parts, count too; but TABLE["another"] = ... only if the part's code
    names TABLE.
    """
    code: dict[pathlib.Path, set[str]] = {}
    trees = {file: _parsed(source.text) for file, source in LOADED.items()}
    pending = [(file, statement) for file, tree in trees.items() for statement in _effects(name, tree)]
    pending += [(file, statement) for file, tree in trees.items() for statement in _bindings(name, tree)]
    modules = [sys.modules.get(getattr(value, "__module__", "")) for value in part]
    while pending:
        file, statement = pending.pop()
        if (text := _text(statement)) in code.setdefault(file, set()):
            continue
        code[file].add(text)
        module = LOADED[file].module
        modules += _imported(statement, module)
        for used in _names(compile(ast.Module([statement], []), str(file), "exec", dont_inherit=True)):
            if isinstance(value := vars(module).get(used), types.ModuleType):  # however it was loaded
                modules.append(value)
            pending += [(file, binding) for binding in _bindings(used, trees[file])]
    while modules:
        imported = modules.pop()
        file = pathlib.Path(getattr(imported, "__file__", None) or "").resolve()
        if imported is None or not file.is_file() or any(file.is_relative_to(folder) for folder in _INSTALLED):
            continue
        tree = _parsed(file.read_text(encoding="utf-8"))
        if (text := _text(tree)) not in code.setdefault(file, set()):
            code[file].add(text)
            modules += _imported(tree, imported)
    return code


def _effects(name: str, tree: ast.Module) -> list[ast.stmt]:
    """The statements with other effects than binding a name, without those that register a part of another name."""
    return [statement for statement in tree.body if _has_effect(statement) and name in (_keys(statement) or {name})]


def _bindings(name: str, tree: ast.Module) -> list[ast.stmt]:
    """The statements that bind a name or change its value; if the name is imported, the import of that name alone."""
    statements = [statement for statement in tree.body if name in _bound(statement)]
    imports = [copy.copy(node) for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        node.names = [alias for alias in node.names if _local(alias) == name]
    return [*imports] or statements


def _keys(statement: ast.stmt) -> set[Any]:
    """The literal keys of TABLE[key] = ..."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    slices = [target.slice for target in targets if isinstance(target, ast.Subscript)]
    return {key.value for key in slices if isinstance(key, ast.Constant)}


def _has_effect(statement: ast.stmt) -> bool:
    """True if a statement does more than bind names."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(isinstance(node, ast.Subscript | ast.Attribute) for target in targets for node in ast.walk(target))
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    binds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    return not is_docstring and not isinstance(statement, binds)


def _bound(node: ast.AST) -> set[str]:
    """The names that a statement binds outside of functions and classes, or whose value it changes (SIZES["a"] = 3)."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {_local(alias) for alias in node.names}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    names: set[str] = set()
    changed = node.func if isinstance(node, ast.Call) else node
    if isinstance(changed, ast.Subscript | ast.Attribute) and (
        changed is not node or isinstance(changed.ctx, ast.Store)
    ):
        names = {changed.value.id} if isinstance(changed.value, ast.Name) else set()
    return names.union(*map(_bound, ast.iter_child_nodes(node)))


def _local(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


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
    return [sys.modules.get(name) for name in names]


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the global names that code reads, and code inside of it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_") and instruction.opname.endswith(("NAME", "GLOBAL", "GLOBALS")):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _text(tree: ast.AST) -> str:
    """The code of a tree without comments, formatting and docstrings."""
    bare = copy.deepcopy(tree)
    documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for node in ast.walk(bare):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(bare)


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)
