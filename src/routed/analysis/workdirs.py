"""Workdirs that belong together: parts of one sweep, or disjoint runs of one config."""

from __future__ import annotations

import json
import pathlib
import shlex
import types
from collections.abc import Sequence
from typing import Any

import pandas as pd
from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.engine import results
from routed.engine.rows import LEADING, plain_value
from routed.plan import experiment, shards
from routed.plan.arms import ARMS
from routed.plan.config import problem_of
from routed.plan.workdir import ELSEWHERE
from routed.settings.tree import flatten, override, value_of
from routed.system.experiments import packaged

#: Settings that are places on a machine, and what a command that others read has there.
PATHS = {"data.directory": "DIR", "initial.workdir": "WORKDIR"}
#: Settings that may differ between workdirs that are joined: disjoint seeds or arms of one config.
APART = ("seed", "seeds", "arms")
#: Settings of a machine, which change no number: the data's digest says whether these are the same.
MACHINE = ("mesh.", "checkpoint.", "trace.", *ELSEWHERE)


def merged(folders: list[pathlib.Path]) -> list[list[pathlib.Path]]:
    """Returns folders by groups that belong together: parts of one sweep, or runs of one config and commit.

    Raises:
      UserError: no workdir, or a part whose config or commit is not that of the other parts.
    """
    groups: dict[str, list[pathlib.Path]] = {}
    stored_of: dict[pathlib.Path, dict[str, Any]] = {}
    for folder in folders:
        stored_of[folder] = stored = results.stored_config(folder)
        shared = {k: v for k, v in stored["config"].items() if k not in APART and not k.startswith(MACHINE)}
        alike = {name: stored.get(name) for name in ("format", "commit", "code", "data")}
        alike |= {f"version of {name}": stored.get("versions", {}).get(name) for name in ("routed", "jax")}
        path, arg = experiment.split(stored.get("experiment", ""))
        alike |= {"swept keys": stored["swept"], "experiment": f"{pathlib.Path(path).name}:{arg}"}
        stored_of[folder]["same"] = shared | alike
        group_key: Any = stored_of[folder]["same"]
        if "shard" in stored:  # with whatever claims to be of the same sweep, so that a stranger is seen
            group_key = [stored["config"].get(key) for key in ("name", "figure", "scale")]
            group_key += [shards.parse(stored["shard"], f"{folder / 'config.json'}: shard ")[1]]
        groups.setdefault(json.dumps(group_key, sort_keys=True), []).append(folder)
    for group in groups.values():
        first, *rest = (stored_of[folder] for folder in group)
        for folder, stored in zip(group[1:], rest, strict=True):
            for key, value in first["same"].items():
                if stored["same"].get(key) != value:
                    raise UserError(
                        f"{folder} is no part of the sweep of {group[0]}: its {key} is {stored['same'].get(key)},"
                        f" there it is {value}; report them apart, or run the part again"
                    )
            digests = stored.get("further_data", {})
            for where, digest in first.get("further_data", {}).items():
                if digests.get(where, digest) != digest:
                    raise UserError(
                        f"at {where}, {folder} has other data than {group[0]}: report them apart, or run {folder} again"
                    )
        if "shard" in first:
            names, (_, parts) = [stored_of[folder]["shard"] for folder in group], shards.parse(first["shard"])
            if twice := [folder for folder, name in zip(group, names, strict=True) if names.count(name) > 1]:
                raise UserError(f"{twice[0]} and {twice[1]} are the same part of a sweep: name one of them only")
            if missing := [part for i in range(parts) if (part := f"{i + 1}/{parts}") not in names]:
                text = ", ".join(missing[:9]) + ", ..." * (len(missing) > 9)
                log.warning("%s: of the sweep's parts %s is missing", group[0], text)
    return list(groups.values())


def joined_table(group: list[pathlib.Path], loss: str = "") -> pd.DataFrame:
    """Returns the rows of folders that belong together, which have a column `loss`.

    Raises:
      UserError: two of them hold the same run; one lacks a column, or has rows of an arm that it says is left out.
    """
    tables = [results.read_table(folder) for folder in group]
    owner: dict[str, pathlib.Path] = {}
    for folder, table in zip(group, tables, strict=True):
        if len(table):
            _check_rows(folder, table, tables, loss)
        for run in set(table.run) if len(table) else ():
            if run in owner:
                raise UserError(f"{owner[run]} and {folder} hold the same run {run}: name one of them only")
            owner[run] = folder
    return pd.concat(tables, ignore_index=True)


def _check_rows(folder: pathlib.Path, table: pd.DataFrame, tables: Sequence[pd.DataFrame], loss: str) -> None:
    described = results.stored_config(folder)
    if absent := [name for name in (*LEADING, *described["swept"], *filter(None, [loss])) if name not in table]:
        raise UserError(f"{folder}: its results have no column {absent[0]!r}: run it again")
    out = described.get("left_out", {}) if "shard" in described else {}
    if ran := [arm for arm, reason in out.items() if "(at " not in reason and (table.arm == arm).any()]:
        raise UserError(f"{folder}: config.json says that the arm {ran[0]} is left out, but it ran: restore the file")
    points = table[[*described["swept"], "arm"]].drop_duplicates()
    for each in tables:
        same = each.merge(points) if len(each) else each
        if lacking := [name for name in same.dropna(axis=1, how="all") if name not in table]:
            raise UserError(f"{folder} has no column {lacking[0]}, which parts beside it have: run it again")


def experiment_of(folder: pathlib.Path, named: Sequence[str] = ()) -> tuple[types.ModuleType, ConfigDict]:
    """Returns the experiment file that a workdir was run from, and the config of the run.

    Raises:
      UserError: the file is not `trusted`.
    """
    if not (spec := trusted(folder, named)):
        raise UserError(f"{folder} is not judged, as {anew(folder)}")
    try:
        module, config = experiment.configure(spec, [])
    except UserError as error:
        raise UserError(f"{folder}: {str(error).replace('--config=', '--experiment=', 1)}") from None
    config = results.config_of(folder, config)
    for key, names in {"figure": module.FIGURES, "model": problem_of(config).models, "arms": ARMS}.items():
        for value in config[key] if key == "arms" else [config[key]]:
            if value not in names:
                text = f"{folder}: {key}={value!r} is unknown to {spec} of today; known: "
                raise UserError(f"{text}{', '.join(filter(None, names))}: run it again, or use its own version")
    return module, config


def with_arms_of_all(config: ConfigDict, group: Sequence[pathlib.Path]) -> ConfigDict:
    """Returns the config of a joined folder with the arms of all, as `APART` lets arms differ."""
    arms = dict.fromkeys(arm for folder in group for arm in results.stored_config(folder)["config"]["arms"])
    return override(config, {"arms": tuple(arms)})


def trusted(folder: pathlib.Path, named: Sequence[str] = ()) -> str:
    """Returns the experiment of a folder with the file that may be run for it; empty if there is none.

    It is one of `routed`'s own, or one that is `named`: code that a folder names is not run.
    """
    path, arg = _experiment(folder)
    ours = packaged()
    ours |= {str(file.resolve()): file for file in ours.values()}
    theirs = [file for file in map(pathlib.Path, named) if file.name == pathlib.Path(path).name]
    file = next(filter(None, [ours.get(path), ours.get(str(pathlib.Path(path).resolve())), *theirs]), None)
    return f"{file}:{arg}" if file else ""


def _experiment(folder: pathlib.Path) -> tuple[str, str]:
    if not (spec := results.stored_config(folder).get("experiment", "")):
        raise UserError(f"{folder} does not say which experiment it is of (an older version wrote it): run it again")
    return experiment.split(spec)


def anew(folder: pathlib.Path) -> str:
    """Returns the flag that judges a workdir with the code of its experiment, and the reason to ask for the flag."""
    flag = shlex.quote(f"--experiment={_experiment(folder)[0]}")
    return f"the code that it names is not run unasked; to run it, add {flag}"


def command_of(spec: str, module: types.ModuleType, config: ConfigDict, table: pd.DataFrame) -> str:
    """Returns the command that makes these rows: the experiment, and each setting that differs from its file."""
    try:
        defaults = experiment.config_of(module, experiment.split(spec)[1])
    except (UserError, AttributeError):  # the file has changed, or is none
        return shlex.join(["routed", "run", f"--config={spec}"])
    figure = experiment.figure_of(module, config)
    points = figure.sweep(config)  # of which some are computed from what a command gave
    keys = dict.fromkeys([*(key for point in points for key in point), *flatten(defaults)])
    flags = []
    for key in keys:
        if key in ("name", "figure", "scale", "data.cache") or key not in flatten(config):
            continue
        if key == "mesh.data" and value_of(config, key) == 1:  # its default until 27 November 2026
            continue
        file_values = {plain_value(point.get(key, value_of(defaults, key))) for point in points}
        swept = key in table and key not in ("arm", "seed", *figure.computed)
        values = {*table[key].unique()} if swept else {plain_value(value_of(config, key))}
        given = value_of(config, key) != value_of(defaults, key)
        if given or (values != file_values and key not in ("arms", "seeds", *figure.computed)):
            texts = [str(plain_value(value)) for value in sorted(values, key=str)]
            if len(texts) > 1 and isinstance(value_of(config, key), tuple):
                texts = [f"({text})" for text in texts]
            text = PATHS.get(key) or ",".join(texts)
            flags.append(f"--config.{key}={text}" if len(values) == 1 else f"--sweep={key}={text}")
    path, arg = experiment.split(spec)
    stem = pathlib.Path(path).stem
    name = stem if stem in packaged() else pathlib.Path(path).name
    return shlex.join(["routed", "run", f"--config={name}" + (f":{arg}" if arg else ""), *flags])
