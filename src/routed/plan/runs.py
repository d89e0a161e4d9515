"""Runs: what a sweep asks for, and which of its runs can share one compiled program."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.plan.arms import ARMS, REFERENCE, changes_of, source_of
from routed.plan.checks import PLANNED, refuse_unread, validate
from routed.plan.code import VERSION, Code, code_of, code_of_metrics, definition_of
from routed.plan.config import canonical, declared, read_keys
from routed.plan.points import Point
from routed.plan.run_settings import TUNING_OFFSET
from routed.settings.setting import refuse
from routed.settings.tree import flatten, nearest, override, value_of
from routed.training.phases import configs_of

#: The most runs of a plan; as many take a minute to plan.
RUNS = 500_000


class Run(NamedTuple):
    """One arm with one seed, at every point at which it is the same run.

    `key` is a hash of everything that decides its result, and `config` what its parts read, nothing else. `needs` are the keys
    of the runs that must be finished before it starts: the source of a matched or transplanted arm, and its tuning runs.
    `places` are the whole configs, flat, at its `points`.
    """

    key: str
    points: tuple[Point, ...]
    arm: str
    seed: int
    tuning: bool
    config: ConfigDict
    needs: tuple[str, ...]
    places: tuple[Mapping[str, Any], ...]
    transplant: str | None = None  # the run whose trained router it gets


class _Side(NamedTuple):
    """One arm at one point: its whole config, and that which its runs have."""

    arm: str
    whole: ConfigDict
    read: ConfigDict


def plan_runs(config: ConfigDict, sweep: tuple[Point, ...], changed: Iterable[str] = ()) -> list[Run]:
    """All runs that the sweep asks for, each once, tuning runs included; the arms that a matched arm needs come with it.

    `changed` are further keys that somebody set, which some run must read, as it must those that are swept. Arms of a figure that
    cannot be made are left out (`left_out`); of arms that somebody named, and of all arms of a point, that is refused.

    Raises:
      UserError: an unknown arm, an impossible value, a key that nothing reads, an arm without effect.
    """
    runs: dict[str, Run] = {}
    wholes: list[ConfigDict] = []
    lacking: dict[str, list[str]] = {}
    changed = tuple(changed)
    for point in sweep or ({},):
        settled = override(config, point)
        sides = [_side(settled, arm) for arm in _arms_of(settled)]
        idle = _idle({side.arm: side.whole for side in sides})
        if idle and ("arms" in changed or len(idle) == len(sides)):
            arm, why = next(iter(idle.items()))
            refuse("arms", settled.arms, f"the arm {arm} {why}; drop the arm")
        place = flatten(settled)
        named = {key: value for key, value in point.items() if key not in PLANNED}
        for side in sides:
            if side.arm in idle:
                lacking.setdefault(side.arm, []).append(idle[side.arm])
                continue
            wholes.append(side.whole)
            for run in _runs(settled, named, place, side):
                known = runs.get(run.key, run)
                if named not in known.points:
                    known = known._replace(points=(*known.points, named), places=(*known.places, place))
                runs[run.key] = known
            if len(runs) > RUNS:
                raise UserError(
                    f"{len(sweep)} points, {len(sides)} arms and seeds={settled.seeds} make more than {RUNS:,} runs, which no"
                    " plan may have: sweep fewer values or lower seeds"
                )
    swept = _varying(config, sweep)
    refuse_unread((*changed, *sorted(swept)), wholes)
    _warn_of_arms(swept, {run.arm for run in runs.values()})
    _warn_of_evaluations(changed, wholes)
    for arm, why in _in_words(lacking, sweep).items():
        log.warning("the arm %s is left out: it %s", arm, why)
    return list(runs.values())


def left_out(config: ConfigDict, sweep: tuple[Point, ...]) -> dict[str, str]:
    """arm -> why a plan has no runs of it, and at how many of the points; such a control would equal what it is compared with.

    A router that has no rows to fill with examples has no arm `frozen_data`, say: the figure runs without it.
    """
    found: dict[str, list[str]] = {}
    for point in sweep or ({},):
        settled = override(config, point)
        wholes = {arm: override(settled, changes_of(arm, settled)) for arm in _arms_of(settled)}
        for arm, why in _idle(wholes).items():
            found.setdefault(arm, []).append(why)
    return _in_words(found, sweep)


def _in_words(lacking: dict[str, list[str]], sweep: tuple[Point, ...]) -> dict[str, str]:
    """arm -> its first reason, and at how many points it has one, unless at all."""
    count = max(len(sweep), 1)
    return {
        arm: why[0] + (f" (at {len(why)} of {count} points)" if len(why) < count else "")
        for arm, why in lacking.items()
    }


def _varying(config: ConfigDict, sweep: tuple[Point, ...]) -> set[str]:
    """The keys whose value is not the same at every point."""
    flat, keys = flatten(config), {key for point in sweep for key in point if key not in PLANNED}
    return {
        key for key in keys if len({json.dumps(point.get(key, flat.get(key)), default=list) for point in sweep}) > 1
    }


def read_by(config: ConfigDict, sweep: tuple[Point, ...], arms: Iterable[str] = ()) -> tuple[set[str], Code]:
    """The keys that some arm of a plan reads, or one of further `arms`; and what else decides its runs: users' code, the arms."""
    keys, code = set[str](), code_of_metrics()
    for point in sweep or ({},):
        settled = override(config, point)
        for arm in {*settled.arms, *arms} & ARMS.keys():
            whole = override(settled, changes_of(arm, settled))
            keys |= read_keys(whole)[1]
            code |= code_of(whole) | definition_of(arm)
    return keys, code


def _arms_of(settled: ConfigDict) -> list[str]:
    """The arms of a point, and those that they need.

    Raises:
      UserError: an unknown arm, or one that takes a router that nobody keeps.
    """
    for arm in settled.arms:
        if arm not in ARMS:
            labels = {one.label: name for name, one in ARMS.items()}
            hint = f" (did you mean {labels[arm]!r}?)" if arm in labels else nearest(arm, ARMS)
            raise UserError(f"config key arms: unknown arm {arm!r}{hint}; known: {', '.join(ARMS)}")
        if ARMS[arm].transplants and not settled.checkpoint.final:
            raise UserError(f"config key arms: {arm} takes a trained router; set checkpoint.final=true to keep them")
    return list(dict.fromkeys((*settled.arms, *(source for arm in settled.arms if (source := source_of(arm))))))


def _side(settled: ConfigDict, arm: str, changes: Mapping[str, Any] | None = None) -> _Side:
    """An arm at a point.

    Raises:
      UserError: its config is impossible.
    """
    whole = override(settled, changes_of(arm, settled) | dict(changes or {}))
    if changes is None:
        validate(whole)
    return _Side(arm, whole, canonical(whole))


def _idle(wholes: Mapping[str, ConfigDict]) -> dict[str, str]:
    """arm -> why it has no effect at a point, from the configs of its arms there.

    Nothing reads a key that the arm sets, an arm before it is the same in every phase, or it needs an arm of which one of these is true.
    """
    found: dict[str, str] = {}
    for arm, whole in wholes.items():
        match = ARMS[arm].match
        wanted = {*ARMS[arm].changes, *([match.setting] if match is not None else [])}
        for key in sorted(wanted - read_keys(whole)[1]):
            when = declared()[key].when
            why = f"it is read where {when.words}" if when is not None else "nothing reads it here"
            found.setdefault(arm, f"sets {key}, without effect: {why}")
    seen: list[tuple[str, list[dict[str, Any]]]] = []
    for arm in sorted(wholes.keys() - found.keys(), key=lambda arm: (arm != REFERENCE, [*wholes].index(arm))):
        phases = [flatten(phase) for phase in configs_of(wholes[arm])]
        if same := [one for one, its in seen if its == phases and _taken(one) == _taken(arm)]:
            keys = ", ".join({**ARMS[same[0]].changes, **ARMS[arm].changes})
            found[arm] = f"is {same[0]} here, as both have the same {keys}: it would be compared with itself"
        seen.append((arm, phases))
    needing = {arm: source for arm in wholes if (source := source_of(arm)) in found}
    return found | {arm: f"needs {source}, which {found[source]}" for arm, source in needing.items()}


def _taken(arm: str) -> tuple[Any, ...]:
    """What an arm has from a finished run of another one."""
    return ARMS[arm].match, ARMS[arm].transplants


def _runs(settled: ConfigDict, point: Point, place: Mapping[str, Any], side: _Side) -> list[Run]:
    """The runs of one arm at one point, tuning runs first."""
    config, tried = side.whole, list[Run]()
    if config.rates == "tuned":
        for multiplier in config.tune.multipliers:
            changes = {"optimizer.rate_scale": multiplier}
            seeds = range(config.seed + TUNING_OFFSET, config.seed + TUNING_OFFSET + config.tune.seeds)
            tried += _seeds(settled, point, place, _side(settled, side.arm, changes), changes, seeds, tuning=True)
    seeds, needs = range(config.seed, config.seed + config.seeds), tuple(run.key for run in tried)
    return tried + _seeds(settled, point, place, side, {}, seeds, tuning=False, needs=needs)


def _seeds(
    settled: ConfigDict,
    point: Point,
    place: Mapping[str, Any],
    side: _Side,
    changes: Mapping[str, Any],
    seeds: range,
    tuning: bool,
    needs: tuple[str, ...] = (),
) -> list[Run]:
    """The runs of several seeds, which share a config: thousands of them are planned in a second."""
    source, runs = source_of(side.arm), []
    own = decisive(side.read)
    other = decisive(_side(settled, source, changes).read) if source else ""
    for seed in seeds:
        needed = identity(other, source, seed, tuning) if source else ""
        before = (*needs, needed) if needed else needs
        transplant = needed if ARMS[side.arm].transplants else None
        key = identity(own, side.arm, seed, tuning, needed)
        runs.append(Run(key, (point,), side.arm, seed, tuning, side.read, before, (place,), transplant))
    return runs


def _warn_of_arms(swept: set[str], arms: set[str]) -> None:
    """Says which arms a sweep does not reach, as they set the swept key themselves."""
    for key in sorted(swept):
        if deaf := sorted(arm for arm in arms if key in ARMS[arm].changes):
            log.warning("the sweep over %s does not reach %s, which set it themselves", key, ", ".join(deaf))


def _warn_of_evaluations(changed: Collection[str], wholes: Iterable[ConfigDict]) -> None:
    """Says which settings that somebody changed are of training alone, where evaluations have another value."""
    for key in (key for key in changed if key.startswith("selection.")):
        of_evaluations = key.replace("selection.", "selection.eval.", 1)
        if of_evaluations not in declared() or of_evaluations in changed:
            continue
        for whole in wholes:
            trained, evaluated = value_of(whole, key), value_of(whole, of_evaluations)
            if trained != evaluated and of_evaluations in read_keys(whole)[1]:
                log.warning(
                    "%s=%s is of training; evaluations have %s=%s: set both to have it in both",
                    key,
                    trained,
                    of_evaluations,
                    evaluated,
                )
                break


def decisive(config: ConfigDict) -> str:
    """All that a run's numbers depend on but arm and seed, as JSON: settings, users' code, version; `config` is what a run reads."""
    flat = _decisive_settings(config)
    if config.held:
        flat["seed"] = config.seed
    code = {label: sorted(files.values()) for label, files in code_of(config).items()}
    return json.dumps([flat, code, VERSION], sort_keys=True, default=list)


def _decisive_settings(config: ConfigDict) -> dict[str, Any]:
    """The settings that change what a run computes; of those that came late the ones that are not at their default."""
    known, flat = declared(), flatten(config)
    return {
        key: value
        for key, value in flat.items()
        if known[key].identity and not (known[key].late and value == known[key].default)
    }


def identity(settings: str, arm: str, seed: int, tuning: bool, source: str = "") -> str:
    """A hash of what decides a run: `decisive`, its arm and seed, and the run that it takes something from, and what."""
    taken = [source, ARMS[arm].match, ARMS[arm].transplants] if source else []
    return hashlib.sha256(f"[{settings}, {json.dumps([arm, seed, tuning, *taken])}]".encode()).hexdigest()[:16]


def static_key(config: ConfigDict) -> str:
    """Equal for configs that one compiled program can serve; `config` is what a run reads."""
    known = declared()
    flat = {key: value for key, value in _decisive_settings(config).items() if not known[key].traced}
    for key in ("rates", "tune.multipliers", "tune.seeds"):
        flat.pop(key, None)
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
