"""Sweeps as tuples of points; a point is a dict of dotted config keys and values, which may set `arms` and `seeds`."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping

from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.plan.run import Point
from routed.settings.tree import flatten, override, parse, split_values, value_of

Sweep = Callable[[ConfigDict], tuple[Point, ...]]

#: The most points of a plan: the check of each takes about 5 ms.
POINTS = 20_000


def product(**axes) -> tuple[Point, ...]:
    """Makes every combination of values; `__` in a keyword stands for the dot: product(data__samples=(1, 2))."""
    names = [name.replace("__", ".") for name in axes]
    return tuple(dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values()))


def chain(*sweeps: tuple[Point, ...]) -> tuple[Point, ...]:
    """Joins sweeps, one after the other."""
    return tuple(itertools.chain(*sweeps))


def cross(first: tuple[Point, ...], second: tuple[Point, ...]) -> tuple[Point, ...]:
    """Combines every point of `first` with every point of `second`, whose values win."""
    return tuple(a | b for a in first for b in second)


def unique(config: ConfigDict, sweep: tuple[Point, ...]) -> tuple[Point, ...]:
    """Removes duplicate points; a point that repeats a value of the config is equal to one without that key."""
    flat, points = flatten(config), dict[str, Point]()
    for point in sweep:
        changes = {key: value for key, value in point.items() if key not in flat or value != flat[key]}
        points.setdefault(json.dumps(changes, sort_keys=True), point)
    return tuple(points.values())


def points_of_command(
    config: ConfigDict, sweep: Sweep, given: list[str], flags: list[str], computed: tuple[str, ...] = ()
) -> tuple[Point, ...]:
    """The points of a command: those of a figure's `sweep`, times those of its --sweep `flags`.

    The command wins: a key that is `given` as --config.KEY has its value, which `config` has, at every point, `arms`
    and `seeds` included. The exception are keys whose values the figure has `computed` from that value. A swept key
    wins too.

    Raises:
      UserError: a key that is both given and swept, or swept twice; a key from which the figure computes others; an
        error of `points_of_flags`.
    """
    points = sweep(config)
    if not isinstance(points, tuple | list) or not all(isinstance(point, Mapping) for point in points):
        raise UserError("the sweep of the figure must return a tuple of points, as in ({'data.samples': 512},)")
    swept = [flag.partition("=")[0] for flag in flags]
    for key in swept:
        if key in given:
            raise UserError(f"--config.{key} and --sweep={key}: one value or several? drop one of the two")
        if swept.count(key) > 1:
            raise UserError(f"--sweep={key}: given twice; give all its values to one: --sweep={key}=v1,v2,...")
    fixed = [key for key in dict.fromkeys(given) if key not in computed]
    for key in fixed:
        if any(point.get(key, value_of(config, key)) != value_of(config, key) for point in points):
            log.info("--config.%s holds at every point, in place of the figure's own values", key)
    if computed:
        _refuse_keys_of_computed(config, sweep, fixed, flags, computed)
    with_fixed = tuple(
        {key: value_of(config, key) if key in fixed else value for key, value in point.items()} for point in points
    )
    return unique(config, cross(with_fixed, points_of_flags(config, flags)))


def _refuse_keys_of_computed(
    config: ConfigDict, sweep: Sweep, fixed: list[str], flags: list[str], computed: tuple[str, ...]
) -> None:
    """Refuses fixed and swept keys from whose values the figure computes others, which would not follow the new value.

    Raises:
      UserError: names the option and the computed keys.
    """
    points, names = sweep(config), ", ".join(computed)

    def values(points: Iterable[Point]) -> list[str]:
        return sorted({json.dumps([point.get(key) for key in computed]) for point in points})

    for option in (*(f"--config.{key}" for key in fixed), *(f"--sweep={flag}" for flag in flags)):
        key = option.removeprefix("--config.").removeprefix("--sweep=").partition("=")[0]
        if key in (*computed, "arms", "seeds") or not all(key in point for point in points):
            continue
        by_value = [values(p for p in points if p[key] == value) for value in {point[key] for point in points}]
        if any(computed_values != by_value[0] for computed_values in by_value):
            raise UserError(
                f"{option}: the figure computes {names} for each of its own values of {key}: use one that has none"
            )
    for flag in flags:
        key = flag.partition("=")[0]
        if any(values(sweep(override(config, point))) != values(points) for point in points_of_flags(config, [flag])):
            raise UserError(
                f"--sweep={flag}: the figure computes {names} from it: run one value at a time, --config.{key}=VALUE"
            )


def points_of_flags(config: ConfigDict, flags: list[str]) -> tuple[Point, ...]:
    """The product of the sweeps in `KEY=v1,v2,...` texts.

    Raises:
      UserError: a text without `=`, an unknown key, a value of the wrong type.
    """
    axes: dict[str, tuple[Point, ...]] = {}
    for flag in flags:
        key, equals, values = flag.partition("=")
        if not equals or not values:
            raise UserError(f"--sweep={flag}: expected KEY=v1,v2,...")
        if key in ("arms", "seeds"):
            raise UserError(f"--sweep={flag}: {key} is no setting of a point; use --config.{key}=...")
        axes[flag] = tuple({key: parse(config, key, value)} for value in split_values(values))
    if (count := math.prod(map(len, axes.values()))) > POINTS:
        raise UserError(
            f"--sweep={max(axes, key=lambda flag: len(axes[flag]))}: makes {count:,} points, at most {POINTS:,}"
        )
    return functools.reduce(cross, axes.values(), ({},))
