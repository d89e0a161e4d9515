"""An experiment is a Python file: a docstring that states its question, `FIGURES`, and `get_config`."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.plan.config import base
from routed.plan.points import Point
from routed.settings.tree import nearest, override, parse
from routed.system.experiments import packaged

#: What an experiment file has to have.
NAMES = ("FIGURES", "get_config")


class Source(NamedTuple):
    """A loaded file: the module, and its text at that time."""

    module: types.ModuleType
    text: str


#: The experiment files that were loaded, among them those that another one loads: their code may be that of a part.
LOADED: dict[pathlib.Path, Source] = {}


class Figure(NamedTuple):
    """One figure of an experiment: a line that says what it shows, what it changes, and what is made of its runs.

    `sweep(config)` gives its points, `claims(config)` the sentences that it tests, `plots(config)` what the report draws
    (`routed.analysis.plots` for the kinds). `computed` names settings that points compute from the config's own value (twice the steps,
    half of them): given on the command line they have their effect there, where any other setting holds at every point.
    """

    line: str
    changes: Mapping[str, Any] = {}
    sweep: Callable[[ConfigDict], tuple[Point, ...]] = lambda config: ({},)
    claims: Callable[[ConfigDict], tuple[Any, ...]] = lambda config: ()
    plots: Callable[[ConfigDict], tuple[dict[str, Any], ...]] = lambda config: ()
    computed: tuple[str, ...] = ()


#: scale -> further changes, from the config with the figure's changes.
Scales = Mapping[str, Callable[[ConfigDict], Mapping[str, Any]]]


def make_config(
    name: str, arg: str | None, figures: Mapping[str, Figure], protocol: Mapping[str, Any], scales: Scales
) -> ConfigDict:
    """The config of FIGURE[,SCALE]: the base config, then the file's protocol, then the figure's changes, then the scale's.

    Raises:
      UserError: unknown figure, scale or key, or a value of the wrong type.
    """
    figure, scale = variant(arg, figures, tuple(scales))
    config = override(base(), {"name": name, "figure": figure, "scale": scale, **protocol})
    config = override(config, figures[figure].changes)
    return override(config, scales[scale](config))


#: The folders of the files that are being imported, the innermost last.
_IMPORTING: list[pathlib.Path] = []


def find(name: str) -> pathlib.Path:
    """The file of an experiment, by its path or, if there is no such file, by the name of one of `routed`'s own.

    A file that is being imported finds those beside it before those of the current folder.

    Raises:
      UserError: neither.
    """
    own, file = packaged(), pathlib.Path(name)
    for path in (*(folder / file for folder in _IMPORTING[-1:]), file, *([own[name]] if name in own else [])):
        with contextlib.suppress(OSError):  # a name that no disk takes
            if path.is_file():
                return path
    beside = [str(path) for path in sorted(file.parent.glob("*.py"))] if file.parent.is_dir() else []
    hint = f" (did you mean {file.stem!r}?)" if file.stem in own else nearest(name, [*own, *beside])
    known = f", nor an experiment of routed's: {', '.join(own)}" if name == file.stem else ""
    raise UserError(f"{name}: no such file{known}{hint}")


def load(name: str, needs: tuple[str, ...] = NAMES) -> types.ModuleType:
    """The experiment file of this path, or `routed`'s own experiment of this name; of a file of parts only, `needs` is empty.

    Raises:
      UserError: no such file, not an experiment (it lacks what it `needs`), or it does not import.
    """
    file = find(name)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{name}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    _IMPORTING.append(file.parent)
    try:
        spec.loader.exec_module(module)
        LOADED[file.resolve()] = Source(module, file.read_text(encoding="utf-8"))
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:
        raise UserError(f"{name}: the file does not import: {type(error).__name__}: {error}") from error
    finally:
        _IMPORTING.pop()
    missing = [name for name in needs if not hasattr(module, name)]
    if missing:
        raise UserError(f"{name}: not an experiment, it lacks {', '.join(missing)}")
    return module


def split(spec: str) -> tuple[str, str]:
    """The two sides of `NAME[:FIGURE[,SCALE]]`; the path of a file may have colons of its own."""
    if spec.endswith(".py"):
        return spec, ""
    name, colon, arg = spec.rpartition(":")
    return (name, arg) if colon else (arg, "")


def lasting(spec: str) -> str:
    """`NAME[:FIGURE[,SCALE]]` as it can be found again from any folder: `routed`'s own by name, others by their whole path."""
    name, arg = split(spec)
    file = find(name).resolve()
    own = {path.resolve(): name for name, path in packaged().items()}
    return ":".join(part for part in (own.get(file, str(file)), arg) if part)


def configure(spec: str, overrides: list[str]) -> tuple[types.ModuleType, ConfigDict]:
    """The module and the config, with `KEY=VALUE` overrides applied, of `NAME[:FIGURE[,SCALE]]`.

    Raises:
      UserError: anything wrong with the file, the figure or an override.
    """
    path, arg = split(spec)
    try:
        module = load(path)
    except UserError as error:
        raise UserError(f"--config={error}") from error
    try:
        config = module.get_config(arg or None)
    except (AttributeError, KeyError, TypeError) as error:  # what ConfigDict raises for a wrong key or type
        raise UserError(f"--config={path}: get_config failed: {error}") from error
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--config.{text}: expected --config.KEY=VALUE")
        if key in ("figure", "scale"):
            raise UserError(
                f"--config.{text}: figure and scale are named behind the file: --config={path}:FIGURE,SCALE"
            )
        config = override(config, {key: parse(config, key, value)})
    return module, config


def figure_of(module: types.ModuleType, config: ConfigDict) -> Figure:
    """The figure that a config is of."""
    return module.FIGURES[config.figure]


#: Scales of an experiment file that declares no SCALES of its own.
SCALES = ("smoke", "default", "paper")


def variant(arg: str | None, figures, scales: tuple[str, ...] = SCALES) -> tuple[str, str]:
    """Splits the part behind `FILE:` into figure and scale: FIGURE, FIGURE,SCALE or SCALE alone.

    Raises:
      UserError: unknown figure or scale.
    """
    parts = [part for part in (arg or "").split(",") if part]
    if len(parts) == 1 and parts[0] in scales:
        parts = ["", parts[0]]
    if len(parts) > 2:
        raise UserError(f"--config=...:{arg}: unknown form; expected FILE[:FIGURE[,SCALE]]")
    figure, scale = parts + ["", "default"][len(parts) :]
    if figure not in figures:
        known = ", ".join(f for f in figures if f)
        raise UserError(
            f"--config=...:{arg}: unknown figure {figure!r}{nearest(figure, [*figures, *scales])}; known: {known}; or a scale:"
            f" {', '.join(scales)}"
        )
    if scale not in scales:
        raise UserError(
            f"--config=...:{arg}: unknown scale {scale!r}{nearest(scale or '', scales)}; known: {', '.join(scales)}"
        )
    return figure, scale
