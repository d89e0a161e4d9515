"""The files of experiments: found by path or name, imported, and stored as texts, which may define parts."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import sys
import types
from typing import NamedTuple

from routed.contracts import UserError, nearest
from routed.plan.arms import ARMS, OWN
from routed.system.experiments import packaged

#: The names that an experiment file must define.
NAMES = ("FIGURES", "get_config")


class Source(NamedTuple):
    """A loaded file: the module, and its text at that time."""

    module: types.ModuleType
    text: str


#: The files that were loaded, among them files that an experiment file loads.
LOADED: dict[pathlib.Path, Source] = {}

#: Arms of the experiments that come with `routed`, which a user's file may load.
_PACKAGED_ARMS: set[str] = set()

#: The folders of the files that are being imported, the innermost last.
_IMPORTING: list[pathlib.Path] = []


def find(name: str) -> pathlib.Path:
    """Finds the file of an experiment: by its path, or else by the name of one of `routed`'s own experiments.

    A file that is being imported finds files beside it before those of the current folder.

    Raises:
      UserError: there is no such file or experiment.
    """
    packaged_files, file = packaged(), pathlib.Path(name)
    candidates = [*(folder / file for folder in _IMPORTING[-1:]), file, packaged_files.get(name, file)]
    for path in candidates:
        with contextlib.suppress(OSError):  # a name that no disk takes
            if path.is_file():
                return path
    siblings = [str(path) for path in sorted(file.parent.glob("*.py"))] if file.parent.is_dir() else []
    hint = nearest(name, [*packaged_files, *siblings])
    if file.stem in packaged_files:
        hint = f" (did you mean {file.stem!r}?)"
    names = f", nor an experiment of routed's: {', '.join(packaged_files)}" if name == file.stem else ""
    raise UserError(f"{name}: no such file{names}{hint}")


def load(name: str, needs: tuple[str, ...] = NAMES) -> types.ModuleType:
    """Imports the experiment file of this path, or `routed`'s own experiment of this name.

    `needs` are the names that the file must define; none for a file of parts.

    Raises:
      UserError: no such file, not an experiment (it lacks a name), or the file does not import.
    """
    file = find(name)
    spec = importlib.util.spec_from_file_location(f"experiment {file.stem}", file)  # a name that no import has
    if spec is None or spec.loader is None:
        raise UserError(f"{name}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    is_packaged = file.resolve() in {path.resolve() for path in packaged().values()}
    if not is_packaged and (folder := str(file.parent.resolve())) not in sys.path:
        sys.path.append(folder)  # the file may import modules beside it, also in its functions
    _IMPORTING.append(file.parent)
    before = {*ARMS}
    sys.modules[spec.name] = module  # while the file is imported, as dataclasses look there
    try:
        spec.loader.exec_module(module)
        LOADED[file.resolve()] = Source(module, file.read_text(encoding="utf-8"))
        (_PACKAGED_ARMS if is_packaged else OWN).update({*ARMS} - before - _PACKAGED_ARMS)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:
        raise UserError(f"{name}: the file does not import: {type(error).__name__}: {error}") from error
    finally:
        _IMPORTING.pop()
        sys.modules.pop(spec.name, None)
    if missing := [needed for needed in needs if not hasattr(module, needed)]:
        raise UserError(f"{name}: not an experiment, it lacks {', '.join(missing)}")
    return module


def split(spec: str) -> tuple[str, str]:
    """Splits `NAME[:FIGURE[,SCALE]]` at the colon; the path of a file may have further colons."""
    if spec.endswith(".py"):
        return spec, ""
    name, colon, arg = spec.rpartition(":")
    return (name, arg) if colon else (arg, "")


def portable_spec(spec: str) -> str:
    """Rewrites `NAME[:FIGURE[,SCALE]]` for any folder: a file that is not one of `routed`'s own gets its whole path."""
    name, arg = split(spec)
    file = find(name).resolve()
    names = {path.resolve(): name for name, path in packaged().items()}
    return ":".join(part for part in (names.get(file, str(file)), arg) if part)
