"""Sweeps as plain data: a tuple of points; a point is a dict of dotted config keys and values, and may set `arms` and `seeds`."""

from __future__ import annotations

import itertools
import json
from typing import Any

from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.settings.tree import parse

Point = dict[str, Any]


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


def unique(sweep: tuple[Point, ...]) -> tuple[Point, ...]:
    """Each point once, in order."""
    return tuple({json.dumps(point, sort_keys=True): point for point in sweep}.values())


def from_flag(config: ConfigDict, flags: list[str]) -> tuple[Point, ...]:
    """The product of `KEY=v1,v2,...` texts.

    Raises:
      UserError: a text without `=`, an unknown key, a value of the wrong type.
    """
    sweep: tuple[Point, ...] = ({},)
    for flag in flags:
        key, equals, values = flag.partition("=")
        if not equals or not values:
            raise UserError(f"--sweep={flag}: expected KEY=v1,v2,...")
        sweep = cross(sweep, tuple({key: parse(config, key, value)} for value in values.split(",")))
    return sweep
