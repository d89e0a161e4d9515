"""An experiment is a Python file: a docstring that states its question, `FIGURES`, and `get_config`."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed.contracts import UserError, nearest
from routed.plan.config import base
from routed.plan.experiment_files import find, load, portable_spec, split
from routed.plan.run import Point
from routed.settings.renamed import renamed_attributes
from routed.settings.tree import override, parse

__all__ = ["Figure", "configure", "figure_of", "find", "load", "make_config", "portable_spec", "split", "variant"]


class Figure(NamedTuple):
    """One figure of an experiment: its caption `line`, the settings that it changes, its points, claims and charts.

    `sweep(config)` returns its points, `claims(config)` the sentences that it tests, `plots(config)` the charts of its
    report (`routed.analysis.plots` for the kinds). `computed` names settings whose values at the points are computed
    from the config's value, such as twice the steps: a value from the command line changes the computation, where the
    value of any other setting from the command line holds at every point.
    """

    line: str
    changes: Mapping[str, Any] = {}
    sweep: Callable[[ConfigDict], tuple[Point, ...]] = lambda config: ({},)
    claims: Callable[[ConfigDict], tuple[Any, ...]] = lambda config: ()
    plots: Callable[[ConfigDict], tuple[dict[str, Any], ...]] = lambda config: ()
    computed: tuple[str, ...] = ()


#: The figures of the file that a command names, while its get_config makes a config.
_OWN_FIGURES: ContextVar[Mapping[str, Figure]] = ContextVar("own figures")

#: Scale -> further changes, from the config with the figure's changes.
Scales = Mapping[str, Callable[[ConfigDict], Mapping[str, Any]]]


def make_config(
    name: str, arg: str | None, figures: Mapping[str, Figure], protocol: Mapping[str, Any], scales: Scales
) -> ConfigDict:
    """Makes the config of FIGURE[,SCALE]: the base, then the file's protocol, the figure's changes, and the scale's.

    A file whose get_config calls that of another file may have figures of its own: their changes come last but for the
    scale's.

    Raises:
      UserError: unknown figure, scale or key, or a value of the wrong type.
    """
    asked = _OWN_FIGURES.get({})
    figure, scale = variant(arg, {**figures, **asked}, tuple(scales))
    config = override(base(), {"name": name, "figure": figure, "scale": scale, **protocol})
    for of_file in (figures, asked):
        config = override(config, of_file[figure].changes if figure in of_file else {})
    return override(config, scales[scale](config))


def configure(spec: str, overrides: list[str]) -> tuple[types.ModuleType, ConfigDict]:
    """Loads `NAME[:FIGURE[,SCALE]]`, and returns its module and its config with `KEY=VALUE` overrides applied.

    Raises:
      UserError: the file, the figure or an override is wrong.
    """
    path, arg = split(spec)
    try:
        module = load(path)
    except UserError as error:
        raise UserError(f"--config={error}") from error
    try:
        config = config_of(module, arg)
    except (AttributeError, KeyError, TypeError) as error:  # what ConfigDict raises for a wrong key or type
        raise UserError(f"--config={path}: get_config failed: {error}{renamed_attributes(str(error))}") from error
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


def config_of(module: types.ModuleType, arg: str | None) -> ConfigDict:
    """Returns the config of FIGURE[,SCALE] of a file, whose figures a get_config that it calls knows too.

    Raises:
      UserError: the file has no such figure or scale.
    """
    token = _OWN_FIGURES.set(module.FIGURES)
    try:
        config = module.get_config(arg or None)
    finally:
        _OWN_FIGURES.reset(token)
    if config.figure not in module.FIGURES:
        variant(config.figure, module.FIGURES)  # refuses it, and lists the figures of the file
    return config


def figure_of(module: types.ModuleType, config: ConfigDict) -> Figure:
    """The figure of a config."""
    return module.FIGURES[config.figure]


#: Scales of an experiment file that declares no SCALES of its own.
SCALES = ("smoke", "default", "paper")


def variant(arg: str | None, figures, scales: tuple[str, ...] = SCALES) -> tuple[str, str]:
    """Splits the text after `FILE:` into figure and scale; it is FIGURE, FIGURE,SCALE or SCALE.

    Raises:
      UserError: unknown figure or scale.
    """
    parts = [part for part in (arg or "").split(",") if part]
    if len(parts) == 1 and parts[0] in scales:
        parts = ["", parts[0]]
    if len(parts) > 2:
        raise UserError(f"--config=...:{arg}: unknown form; expected FILE[:FIGURE[,SCALE]]")
    figure, scale = parts + ["", "default"][len(parts) :]
    if figure in scales and scale in figures:
        raise UserError(f"--config=...:{arg}: the order is FIGURE,SCALE: use {scale},{figure}")
    if figure not in figures:
        names = ", ".join(f for f in figures if f)
        raise UserError(
            f"--config=...:{arg}: unknown figure {figure!r}{nearest(figure, [*figures, *scales])}; known: {names}; or"
            f" a scale: {', '.join(scales)}"
        )
    if scale not in scales:
        raise UserError(
            f"--config=...:{arg}: unknown scale {scale!r}{nearest(scale or '', scales)}; known: {', '.join(scales)}"
        )
    return figure, scale
