"""Sweeps as plain data: points, the runs they ask for, and which of them can share one compiled program.

A sweep is a tuple of points; a point is a dict of dotted config keys and values. A point may also set `arms`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed.arms import ARMS, TRANSPLANTED, source_of
from routed.config import NOT_IDENTITY, TRACED, flatten, nearest, override, parse
from routed.validate import TUNING_OFFSET, validate
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
            for run in _runs(settled, {k: v for k, v in point.items() if k != "arms"}, arm):
                runs.setdefault(run.key, run)
    return list(runs.values())


def _runs(settled: ConfigDict, point: Point, arm: str) -> Iterator[Run]:
    """The runs of one arm at one point, tuning runs first."""
    validate(config := override(settled, ARMS[arm]))

    def run(changes: dict[str, Any], seed: int, tuning: bool, needs: tuple[str, ...] = ()) -> Run:
        source = source_of(arm)
        if source is not None:
            source = identity(override(settled, ARMS[source] | changes), source, seed, tuning)
            needs += (source,)
        changed = override(config, changes)
        key = identity(changed, arm, seed, tuning)
        return Run(key, point, arm, seed, tuning, changed, needs, source if arm in TRANSPLANTED else None)

    tried = []
    if config.rates == "tuned":
        for multiplier in config.tune.multipliers:
            for seed in range(config.tune.seeds):
                tried.append(run({"optimizer.rate_scale": multiplier}, config.seed + TUNING_OFFSET + seed, tuning=True))
    yield from tried
    for seed in range(config.seed, config.seed + config.seeds):
        yield run({}, seed, tuning=False, needs=tuple(one.key for one in tried))


def identity(config: ConfigDict, arm: str, seed: int, tuning: bool) -> str:
    """A hash of all settings that a run's numbers depend on, of its arm and of its seed."""
    flat = {k: v for k, v in flatten(config).items() if k not in NOT_IDENTITY}
    if config.held:
        flat["seed"] = config.seed
    text = json.dumps([flat, arm, seed, tuning], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def static_key(config: ConfigDict) -> str:
    """Equal for configs that one compiled program can serve."""
    ignored = (*NOT_IDENTITY, *TRACED, "rates", "tune.multipliers", "tune.seeds")
    flat = {k: v for k, v in flatten(config).items() if k not in ignored}
    flat |= {"seed": config.seed if config.held else None, "batching": config.mesh.batching}
    return json.dumps(flat, sort_keys=True, default=list)


def groups(runs: list[Run]) -> list[list[Run]]:
    """Runs that differ only in traced settings, arm and seed, together."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        by_key.setdefault(static_key(run.config), []).append(run)
    return list(by_key.values())
