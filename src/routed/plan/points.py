"""Sweeps as plain data: a tuple of points; a point is a dict of dotted config keys and values, and may set `arms` and `seeds`."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.settings.tree import flatten, override, parse, value_of

Point = dict[str, Any]
Sweep = Callable[[ConfigDict], tuple[Point, ...]]

#: The most points that a plan may have: each is checked on its own, which takes some 5 ms.
POINTS = 20_000


def product(**axes) -> tuple[Point, ...]:
    """Every combination; `__` in a keyword stands for the dot: product(data__samples=(1, 2))."""
    names = [name.replace("__", ".") for name in axes]
    return tuple(dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values()))


def chain(*sweeps: tuple[Point, ...]) -> tuple[Point, ...]:
    """One sweep after the other."""
    return tuple(itertools.chain(*sweeps))


def cross(first: tuple[Point, ...], second: tuple[Point, ...]) -> tuple[Point, ...]:
    """Every point of `first` with every point of `second`, whose keys win."""
    return tuple(a | b for a in first for b in second)


def unique(config: ConfigDict, sweep: tuple[Point, ...]) -> tuple[Point, ...]:
    """Each point once, in order; a point that spells out a value of the config is the same as one that does not."""
    flat, found = flatten(config), dict[str, Point]()
    for point in sweep:
        changes = {key: value for key, value in point.items() if key not in flat or value != flat[key]}
        found.setdefault(json.dumps(changes, sort_keys=True), point)
    return tuple(found.values())


def of_command(
    config: ConfigDict, sweep: Sweep, given: list[str], flags: list[str], computed: tuple[str, ...] = ()
) -> tuple[Point, ...]:
    """The points of a command: those of a figure's `sweep`, times those of its --sweep `flags`.

    The command wins: the keys `given` as --config.KEY have their value, which `config` holds, at every point, `arms` and `seeds`
    included, but for keys whose own values the figure `computed` from it; so has a key that is swept.

    Raises:
      UserError: a key that is both given and swept, or swept twice; one that what is computed would not follow; what `from_flag` refuses.
    """
    own = sweep(config)
    swept = [flag.partition("=")[0] for flag in flags]
    for key in swept:
        if key in given:
            raise UserError(f"--config.{key} and --sweep={key}: one value or several? drop one of the two")
        if swept.count(key) > 1:
            raise UserError(f"--sweep={key}: given twice; give all its values to one: --sweep={key}=v1,v2,...")
    held = [key for key in dict.fromkeys(given) if key not in computed]
    for key in held:
        if any(point.get(key, value_of(config, key)) != value_of(config, key) for point in own):
            log.info("--config.%s holds at every point, in place of the figure's own values", key)
    _require_followed(config, sweep, own, held, flags, computed)
    settled = tuple(
        {key: value_of(config, key) if key in held else value for key, value in point.items()} for point in own
    )
    return unique(config, cross(settled, from_flag(config, flags)))


def _require_followed(
    config: ConfigDict,
    sweep: Sweep,
    own: tuple[Point, ...],
    held: list[str],
    flags: list[str],
    computed: tuple[str, ...],
) -> None:
    """Refuses keys whose values would replace those that something was `computed` for, or that it would be computed from again."""
    names = ", ".join(computed)

    def values(points: Iterable[Point]) -> list[str]:
        return sorted({json.dumps([point.get(key) for key in computed]) for point in points})

    for option in (*(f"--config.{key}" for key in held), *(f"--sweep={flag}" for flag in flags)):
        key = option.removeprefix("--config.").removeprefix("--sweep=").partition("=")[0]
        if key in (*computed, "arms", "seeds") or not all(key in point for point in own):
            continue
        alike = [values(point for point in own if point[key] == value) for value in {point[key] for point in own}]
        if any(one != alike[0] for one in alike):
            raise UserError(
                f"{option}: the figure computes {names} for each of its own values of {key}: use one that has none"
            )
    for flag in flags if computed else ():
        key = flag.partition("=")[0]
        if any(values(sweep(override(config, point))) != values(own) for point in from_flag(config, [flag])):
            raise UserError(
                f"--sweep={flag}: the figure computes {names} from it: run one value at a time, --config.{key}=VALUE"
            )


def from_flag(config: ConfigDict, flags: list[str]) -> tuple[Point, ...]:
    """The product of `KEY=v1,v2,...` texts.

    Raises:
      UserError: a text without `=`, an unknown key, a value of the wrong type.
    """
    axes: dict[str, tuple[Point, ...]] = {}
    for flag in flags:
        key, equals, values = flag.partition("=")
        if not equals or not values:
            raise UserError(f"--sweep={flag}: expected KEY=v1,v2,...")
        axes[flag] = tuple({key: parse(config, key, value)} for value in values.split(","))
    if (count := math.prod(map(len, axes.values()))) > POINTS:
        raise UserError(
            f"--sweep={max(axes, key=lambda flag: len(axes[flag]))}: makes {count:,} points, at most {POINTS:,}"
        )
    return functools.reduce(cross, axes.values(), ({},))
