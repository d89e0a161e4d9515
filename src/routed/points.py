"""Sweeps as plain data: points, the runs they ask for, and which of them can share one compiled program.

A sweep is a tuple of points; a point is a dict of dotted config keys and values. A point may also set `arms` and `seeds`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed.arms import ARMS, TRANSPLANTED, source_of
from routed.config import NOT_IDENTITY, PLANNED, TRACED, flatten, nearest, override, parse
from routed.rules import TUNING_OFFSET
from routed.validate import validate
from routed.words import UserError

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


class Run(NamedTuple):
    """One arm of one point with one seed.

    `key` is a hash of everything that decides its result; `needs` are the keys of the runs that must be finished before it
    starts: the source of a matched or transplanted arm, and its tuning runs.
    """

    key: str
    point: Point
    arm: str
    seed: int
    tuning: bool
    config: ConfigDict
    needs: tuple[str, ...]
    transplant: str | None = None  # the run whose trained router it gets


def plan(config: ConfigDict, sweep: tuple[Point, ...]) -> list[Run]:
    """All runs that the sweep asks for, each once, tuning runs included; the arms a matched arm needs come with it.

    Raises:
      UserError: an unknown arm, an impossible value.
    """
    runs: dict[str, Run] = {}
    for point in sweep or ({},):
        settled = override(config, point)
        for arm in settled.arms:
            if arm not in ARMS:
                raise UserError(f"config key arms: unknown arm {arm!r}{nearest(arm, ARMS)}; known: {', '.join(ARMS)}")
        needed = [source for arm in settled.arms if (source := source_of(arm))]
        if any(arm in TRANSPLANTED for arm in settled.arms) and not settled.checkpoint.final:
            raise UserError(
                "config key arms: transplant takes a trained router; set checkpoint.final=true to keep them"
            )
        for arm in dict.fromkeys((*settled.arms, *needed)):
            for run in _runs(settled, {k: v for k, v in point.items() if k not in PLANNED}, arm):
                runs.setdefault(run.key, run)
    return list(runs.values())


def _runs(settled: ConfigDict, point: Point, arm: str) -> Iterator[Run]:
    """The runs of one arm at one point, tuning runs first."""
    validate(config := override(settled, ARMS[arm]))
    source, tried = source_of(arm), []
    if config.rates == "tuned":
        for multiplier in config.tune.multipliers:
            changes = {"optimizer.rate_scale": multiplier}
            seeds = range(config.seed + TUNING_OFFSET, config.seed + TUNING_OFFSET + config.tune.seeds)
            tried += _seeds(settled, point, arm, source, changes, seeds, tuning=True)
    yield from tried
    seeds = range(config.seed, config.seed + config.seeds)
    yield from _seeds(settled, point, arm, source, {}, seeds, tuning=False, needs=tuple(run.key for run in tried))


def _seeds(
    settled: ConfigDict,
    point: Point,
    arm: str,
    source: str | None,
    changes: dict[str, Any],
    seeds: range,
    tuning: bool,
    needs: tuple[str, ...] = (),
) -> list[Run]:
    """The runs of several seeds, which share a config: thousands of them are planned in a second."""
    changed = override(settled, ARMS[arm] | changes)
    own, other = decisive(changed), decisive(override(settled, ARMS[source] | changes)) if source else ""
    runs = []
    for seed in seeds:
        needed = identity(other, source, seed, tuning) if source else None
        before = needs if needed is None else (*needs, needed)
        transplant = needed if arm in TRANSPLANTED else None
        runs.append(Run(identity(own, arm, seed, tuning), point, arm, seed, tuning, changed, before, transplant))
    return runs


def decisive(config: ConfigDict) -> str:
    """All settings that a run's numbers depend on, as JSON."""
    flat = {k: v for k, v in flatten(config).items() if k not in NOT_IDENTITY}
    if config.held:
        flat["seed"] = config.seed
    return json.dumps(flat, sort_keys=True, default=list)


def identity(settings: str, arm: str, seed: int, tuning: bool) -> str:
    """A hash of the decisive settings of a run, of its arm and of its seed."""
    return hashlib.sha256(f"[{settings}, {json.dumps([arm, seed, tuning])[1:]}".encode()).hexdigest()[:16]


def static_key(config: ConfigDict) -> str:
    """Equal for configs that one compiled program can serve."""
    ignored = (*NOT_IDENTITY, *TRACED, "rates", "tune.multipliers", "tune.seeds")
    flat = {k: v for k, v in flatten(config).items() if k not in ignored}
    flat |= {"seed": config.seed if config.held else None, "batching": config.mesh.batching}
    return json.dumps(flat, sort_keys=True, default=list)


def groups(runs: list[Run]) -> list[list[Run]]:
    """Runs that differ only in traced settings, arm and seed, together."""
    by_key: dict[str, list[Run]] = {}
    keys = {id(run.config): run.config for run in runs}  # seeds share a config
    keys = {name: static_key(config) for name, config in keys.items()}
    for run in runs:
        by_key.setdefault(keys[id(run.config)], []).append(run)
    return list(by_key.values())
