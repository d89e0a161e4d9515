"""The runs of a plan: those that a sweep asks for, and the groups of them that share one compiled program."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError, nearest
from routed.plan.arms import ARMS, REFERENCE, changes_of, source_of
from routed.plan.checks import PLANNED, refuse_unread, validate
from routed.plan.code import VERSION, Code, code_of, code_of_metrics, definition_of
from routed.plan.config import canonical, declared, read_keys, variants_of
from routed.plan.run import Point, Run
from routed.plan.run_settings import TUNING_OFFSET
from routed.plan.tuning import candidates
from routed.settings.renamed import old_name, with_old_names
from routed.settings.setting import refuse
from routed.settings.tree import flatten, override, value_of

#: The most runs of a plan; as many take a minute to plan.
RUNS = 500_000


class _Setup(NamedTuple):
    """One point of a sweep: its config, its values of swept keys, and its whole config, flat."""

    config: ConfigDict
    values: Point
    flat: Mapping[str, Any]


class _Side(NamedTuple):
    """One arm at one point: its whole config, and the config of its runs, with the settings that they read."""

    arm: str
    whole: ConfigDict
    read: ConfigDict


def plan_runs(config: ConfigDict, sweep: tuple[Point, ...], changed: Iterable[str] = ()) -> list[Run]:
    """Plans all runs of a sweep, each once, with tuning runs, and with the runs of the arms that matched arms need.

    Some run must read each swept key, and each key in `changed`, the keys that the user set. Arms of a figure that
    cannot be made at a point are left out (`left_out`); arms that the user named, and all arms of a point, are refused
    instead.

    Raises:
      UserError: an unknown arm, an impossible value, a key that nothing reads, an arm without effect.
    """
    runs: dict[str, Run] = {}
    wholes: list[ConfigDict] = []
    reasons: dict[str, list[str]] = {}
    changed = tuple(changed)
    for point in sweep or ({},):
        point_config = override(config, point)
        sides = [_side(point_config, arm) for arm in _arms_of(point_config)]
        ineffective = _ineffective({side.arm: side.whole for side in sides})
        if ineffective and ("arms" in changed or len(ineffective) == len(sides)):
            arm, reason = next(iter(ineffective.items()))
            refuse("arms", point_config.arms, f"the arm {arm} {reason}; drop the arm")
        values = {key: value for key, value in point.items() if key not in PLANNED}
        setup = _Setup(point_config, values, flatten(point_config))
        for side in sides:
            if side.arm in ineffective:
                reasons.setdefault(side.arm, []).append(ineffective[side.arm])
                continue
            wholes.append(side.whole)
            for run in _runs(setup, side):
                runs[run.key] = _with_point(runs.get(run.key, run), setup)
            if len(runs) > RUNS:
                raise UserError(
                    f"{len(sweep)} points, {len(sides)} arms and seeds={point_config.seeds} make more than {RUNS:,}"
                    " runs, which no plan may have: sweep fewer values or lower seeds"
                )
    swept = _varying(config, sweep)
    refuse_unread((*changed, *sorted(swept)), wholes)
    _warn_of_arms({*swept, *changed}, {run.arm for run in runs.values()})
    _warn_of_evaluations(changed, wholes)
    for arm, reason in _summarise(reasons, sweep).items():
        log.warning("the arm %s is left out: it %s", arm, reason)
    return list(runs.values())


def _with_point(run: Run, setup: _Setup) -> Run:
    """The run with a further point, unless it has that point."""
    if setup.values in run.points:
        return run
    return run._replace(points=(*run.points, setup.values), flat_configs=(*run.flat_configs, setup.flat))


def left_out(config: ConfigDict, sweep: tuple[Point, ...]) -> dict[str, str]:
    """The arms without runs in a plan, each with the reason and the number of points: such a control has no effect.

    For example, a router without rows to fill with examples has no arm `frozen_data`: the figure runs without that arm.
    """
    reasons: dict[str, list[str]] = {}
    for point in sweep or ({},):
        point_config = override(config, point)
        wholes = {arm: override(point_config, changes_of(arm, point_config)) for arm in _arms_of(point_config)}
        for arm, reason in _ineffective(wholes).items():
            reasons.setdefault(arm, []).append(reason)
    return _summarise(reasons, sweep)


def _summarise(reasons: dict[str, list[str]], sweep: tuple[Point, ...]) -> dict[str, str]:
    """The first reason of each arm, with the number of points that have one, unless all have."""
    count = max(len(sweep), 1)
    return {
        arm: at_points[0] + (f" (at {len(at_points)} of {count} points)" if len(at_points) < count else "")
        for arm, at_points in reasons.items()
    }


def _varying(config: ConfigDict, sweep: tuple[Point, ...]) -> set[str]:
    """The keys whose value is not the same at every point."""
    flat, keys = flatten(config), {key for point in sweep for key in point if key not in PLANNED}
    return {key for key in keys if len({json.dumps(p.get(key, flat.get(key)), default=list) for p in sweep}) > 1}


def read_by(config: ConfigDict, sweep: tuple[Point, ...], arms: Iterable[str] = ()) -> tuple[set[str], Code]:
    """The keys that the arms of a plan, or the further `arms`, read; and digests of users' code and of the arms."""
    keys, code = set[str](), code_of_metrics()
    for point in sweep or ({},):
        point_config = override(config, point)
        for arm in {*point_config.arms, *arms} & ARMS.keys():
            whole = override(point_config, changes_of(arm, point_config))
            keys |= read_keys(whole)[1]
            code |= code_of(whole) | definition_of(arm)
    return keys, code


def _arms_of(config: ConfigDict) -> list[str]:
    """The arms of a point, and the arms that they need.

    Raises:
      UserError: an unknown arm, or an arm that needs a trained router that no run saves.
    """
    for arm in config.arms:
        if arm not in ARMS:
            named = next((name for name, definition in ARMS.items() if definition.label == arm), "")
            hint = f" (did you mean {named!r}?)" if named else nearest(arm, ARMS)
            raise UserError(f"config key arms: unknown arm {arm!r}{hint}; known: {', '.join(ARMS)}")
        if ARMS[arm].transplants and not config.checkpoint.final:
            raise UserError(f"config key arms: {arm} takes a trained router; set checkpoint.final=true to keep them")
    needed = [source for arm in config.arms if (source := source_of(arm))]
    if unknown := next((arm for arm in needed if arm not in ARMS), ""):
        raise UserError(f"config key arms: an arm needs the unknown arm {unknown!r}{nearest(unknown, ARMS)}")
    return list(dict.fromkeys((*config.arms, *needed)))


def _side(config: ConfigDict, arm: str, changes: Mapping[str, Any] | None = None) -> _Side:
    """An arm at a point with this config.

    Raises:
      UserError: the arm's config is impossible.
    """
    whole = override(config, changes_of(arm, config) | dict(changes or {}))
    if changes is None or "steps" in changes:
        validate(whole)
    return _Side(arm, whole, canonical(whole))


def _ineffective(wholes: Mapping[str, ConfigDict]) -> dict[str, str]:
    """The arms without effect at a point, each with the reason, from the configs of all arms there.

    Nothing reads a key that the arm sets, it equals an earlier arm in every phase, or it needs an arm without effect.
    """
    reasons: dict[str, str] = {}
    for arm, whole in wholes.items():
        match = ARMS[arm].match
        set_keys = {*ARMS[arm].changes, *([match.setting] if match is not None else [])}
        for key in sorted(set_keys - read_keys(whole)[1]):
            when = declared()[key].when
            reason = f"it is read where {when.description}" if when is not None else "nothing reads it here"
            reasons.setdefault(arm, f"sets {key}, without effect: {reason}")
    earlier: list[tuple[str, list[dict[str, Any]]]] = []
    for arm in sorted(wholes.keys() - reasons.keys(), key=lambda arm: (arm != REFERENCE, [*wholes].index(arm))):
        phases = [flatten(phase) for phase in variants_of(wholes[arm])]
        if same := [name for name, config in earlier if config == phases and _taken(name) == _taken(arm)]:
            keys = ", ".join({**ARMS[same[0]].changes, **ARMS[arm].changes})
            reasons[arm] = f"is {same[0]} here, as both have the same {keys}: it would be compared with itself"
        earlier.append((arm, phases))
    needing = {arm: source for arm in wholes if (source := source_of(arm)) in reasons}
    return reasons | {arm: f"needs {source}, which {reasons[source]}" for arm, source in needing.items()}


def _taken(arm: str) -> tuple[Any, ...]:
    """The values that an arm takes from a finished run of another arm."""
    return ARMS[arm].match, ARMS[arm].transplants


def _runs(setup: _Setup, side: _Side) -> list[Run]:
    """The runs of one arm at one point, tuning runs first."""
    config, tuning_runs = side.whole, list[Run]()
    if config.rates == "tuned":
        if (scale := config.optimizer.rate_scale) != 1:
            refuse("optimizer.rate_scale", scale, "rates=tuned chooses it; set tune.multipliers")
        for rates in candidates(config):
            changes = rates | ({"steps": config.tune.steps} if config.tune.steps else {})
            seeds = range(config.seed + TUNING_OFFSET, config.seed + TUNING_OFFSET + config.tune.seeds)
            tuned_side = _side(setup.config, side.arm, changes)
            tuning_runs += _seeds(setup, tuned_side, seeds, changes, tuning=True)
    seeds, needs = range(config.seed, config.seed + config.seeds), tuple(run.key for run in tuning_runs)
    return tuning_runs + _seeds(setup, side, seeds, {}, needs=needs)


def _seeds(
    setup: _Setup,
    side: _Side,
    seeds: range,
    changes: Mapping[str, Any],
    tuning: bool = False,
    needs: tuple[str, ...] = (),
) -> list[Run]:
    """The runs of several seeds, which share a config: thousands of them are planned in a second."""
    source, runs = source_of(side.arm), []
    settings = decisive(side.read)
    settings_of_source = decisive(_side(setup.config, source, changes).read) if source else ""
    for seed in seeds:
        needed = identity(settings_of_source, source, seed, tuning) if source else ""
        key = identity(settings, side.arm, seed, tuning, needed)
        awaited = (*needs, needed) if needed else needs
        transplant = needed if ARMS[side.arm].transplants else None
        runs.append(Run(key, (setup.values,), side.arm, seed, tuning, side.read, awaited, (setup.flat,), transplant))
    return runs


def _warn_of_arms(keys: set[str], arms: set[str]) -> None:
    """Warns of arms that a setting or a sweep does not reach, as they set the key themselves; refuses it if all do."""
    for key in sorted(keys):
        if fixed := sorted(arm for arm in arms if key in ARMS[arm].changes):
            text = f"{key} does not reach {', '.join(fixed)}, which set it themselves"
            if arms == {*fixed}:
                raise UserError(f"{text}: leave it out, or add an arm that reads it")
            log.warning("%s", text)


def _warn_of_evaluations(changed: Collection[str], wholes: Iterable[ConfigDict]) -> None:
    """Warns of changed settings that apply to training alone, where evaluations have another value."""
    form = "%s=%s is of training; evaluations have %s=%s: set both to have it in both"
    for key in (key for key in changed if key.startswith("selection.")):
        eval_key = key.replace("selection.", "selection.eval.", 1)
        if eval_key not in declared() or eval_key in changed:
            continue
        for whole in wholes:
            value, eval_value = value_of(whole, key), value_of(whole, eval_key)
            if value != eval_value and eval_key in read_keys(whole)[1]:
                log.warning(form, key, value, eval_key, eval_value)
                break


def decisive(config: ConfigDict) -> str:
    """Everything but arm and seed that decides a run's numbers, as JSON: the settings that it reads, code, version."""
    flat = with_old_names(_decisive_settings(config))
    if config.shared_streams:
        flat["seed"] = config.seed
    code = {label: sorted(files.values()) for label, files in code_of(config).items()}
    return json.dumps([flat, code, VERSION], sort_keys=True, default=list)


def _decisive_settings(config: ConfigDict) -> dict[str, Any]:
    """The settings that decide the results of a run; without defaults that are omitted from identities."""
    settings, flat = declared(), flatten(config)
    return {
        key: value
        for key, value in flat.items()
        if settings[key].identity and not (settings[key].omit_default_from_identity and value == settings[key].default)
    }


def identity(settings: str, arm: str, seed: int, tuning: bool, source: str = "") -> str:
    """A hash of everything that decides a run: `decisive` settings, arm, seed, and the run whose values it takes."""
    match = [old_name(part) for part in ARMS[arm].match or ()] or None
    taken = [source, match, ARMS[arm].transplants] if source else []
    return hashlib.sha256(f"[{settings}, {json.dumps([arm, seed, tuning, *taken])}]".encode()).hexdigest()[:16]


def static_key(config: ConfigDict) -> str:
    """A text that is equal for configs that one compiled program serves; `config` has the settings that a run reads."""
    settings = declared()
    flat = {key: value for key, value in _decisive_settings(config).items() if not settings[key].traced}
    flat = {key: value for key, value in flat.items() if key != "rates" and not key.startswith("tune.")}
    flat |= {"seed": config.seed if config.shared_streams else None, "batching": config.mesh.batching}
    return json.dumps(flat, sort_keys=True, default=list)


def groups(runs: list[Run]) -> list[list[Run]]:
    """Groups runs that differ only in traced settings, arm and seed."""
    by_key: dict[str, list[Run]] = {}
    configs = {id(run.config): run.config for run in runs}  # seeds share a config
    keys = {name: static_key(config) for name, config in configs.items()}
    for run in runs:
        by_key.setdefault(keys[id(run.config)], []).append(run)
    return list(by_key.values())
