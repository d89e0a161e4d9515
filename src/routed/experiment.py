"""An experiment is a Python file: a docstring, `FIGURES`, `get_config`, `get_sweep`, `get_claims` and `get_plots`."""

from __future__ import annotations

import importlib.util
import pathlib
import types

from ml_collections import ConfigDict

from routed.config import nearest, override, parse
from routed.words import UserError

PARTS = ("FIGURES", "get_config", "get_sweep", "get_claims", "get_plots")


def load(path: str) -> types.ModuleType:
    """The experiment file at `path`.

    Raises:
      UserError: no such file, not an experiment, or it does not import.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        known = [str(p) for p in sorted(file.parent.glob("*.py"))] if file.parent.is_dir() else []
        raise UserError(f"--config={path}: no such file{nearest(path, known)}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UserError(f"--config={path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--config={path}: the file does not import: {type(error).__name__}: {error}") from error
    missing = [part for part in PARTS if not hasattr(module, part)]
    if missing:
        raise UserError(f"--config={path}: not an experiment, it lacks {', '.join(missing)}")
    return module


def configure(spec: str, overrides: list[str]) -> tuple[types.ModuleType, ConfigDict]:
    """The module and the config, with `KEY=VALUE` overrides applied, of `FILE[:FIGURE[,SCALE]]`.

    Raises:
      UserError: anything wrong with the file, the figure or an override.
    """
    path, _, arg = spec.partition(":")
    module = load(path)
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
