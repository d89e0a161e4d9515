"""Workdirs that belong together: parts of one sweep, or disjoint runs of one config."""

from __future__ import annotations

import json
import pathlib
import shlex
import types
from typing import Any

import pandas as pd
from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.engine import results
from routed.engine.rows import plain_value
from routed.plan import experiment, shards
from routed.plan.workdir import ELSEWHERE
from routed.settings.tree import flatten, value_of

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
        if not (folder / "config.json").exists():
            raise UserError(f"{folder} is no workdir of routed: it has no config.json")
        stored_of[folder] = stored = results.stored_config(folder)
        shared = {k: v for k, v in stored["config"].items() if k not in APART and not k.startswith(MACHINE)}
        alike = {
            "commit": stored.get("commit"),
            "code": stored.get("code"),
            "swept keys": stored["swept"],
            "data": stored.get("data"),
        }
        stored_of[folder]["same"] = shared | alike
        group_key: Any = stored_of[folder]["same"]
        if "shard" in stored:  # with whatever claims to be of the same sweep, so that a stranger is seen
            group_key = [stored["config"][key] for key in ("name", "figure", "scale")] + [
                stored["shard"].partition("/")[2]
            ]
        groups.setdefault(json.dumps(group_key, sort_keys=True), []).append(folder)
    for group in groups.values():
        first, *rest = (stored_of[folder] for folder in group)
        for folder, stored in zip(group[1:], rest, strict=True):
            for key, value in first["same"].items():
                if stored["same"].get(key) != value:
                    raise UserError(
                        f"{folder} is no part of the sweep of {group[0]}: its {key} is {stored['same'].get(key)},"
                        " there it is"
                        f" {value}; report them apart, or run the part again"
                    )
            digests = stored.get("further_data", {})
            for where, digest in first.get("further_data", {}).items():
                if digests.get(where, digest) != digest:
                    raise UserError(
                        f"{folder} is of other data than {group[0]} at {where}: report them apart, or run it again"
                    )
        if "shard" in first:
            present = {stored["shard"] for stored in (first, *rest)}
            _, parts = shards.parse(first["shard"])
            wanted = [f"{i + 1}/{parts}" for i in range(parts)]
            if missing := [part for part in wanted if part not in present]:
                log.warning("%s: of the sweep's parts %s is missing", group[0], ", ".join(missing))
    return list(groups.values())


def joined_table(group: list[pathlib.Path]) -> pd.DataFrame:
    """Returns the rows of folders that belong together.

    Raises:
      UserError: two of them hold the same run.
    """
    tables = [results.read_table(folder) for folder in group]
    owner: dict[str, pathlib.Path] = {}
    for folder, table in zip(group, tables, strict=True):
        for run in set(table.run) if len(table) else ():
            if run in owner:
                raise UserError(f"{owner[run]} and {folder} hold the same run {run}: name one of them only")
            owner[run] = folder
    return pd.concat(tables, ignore_index=True)


def experiment_of(folder: pathlib.Path) -> tuple[types.ModuleType, ConfigDict]:
    """Returns the experiment file that a workdir was run from, and the config of the run."""
    described = results.stored_config(folder)
    if not isinstance(described.get("experiment"), str):
        raise UserError(f"{folder} does not say which experiment it is of (an older version wrote it): run it again")
    path, arg = experiment.split(described["experiment"])
    name = pathlib.Path(path).name
    if not pathlib.Path(path).exists() and pathlib.Path(name).is_file():
        path = name  # the run was made elsewhere
    try:
        module, config = experiment.configure(f"{path}:{arg}", [])
    except UserError as error:
        raise UserError(f"{folder}: {error}; if {name} is elsewhere now, run the report in its folder") from None
    return module, results.config_of(folder, config)


def command_of(spec: str, config: ConfigDict, table: pd.DataFrame) -> str:
    """Returns the command that makes these rows: the experiment, and each setting that differs from its file."""
    try:
        module, defaults = experiment.configure(spec, [])
    except UserError:  # the file has gone, or changed
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
            text = PATHS.get(key) or ",".join(str(plain_value(value)) for value in sorted(values, key=str))
            flags.append(f"--config.{key}={text}" if len(values) == 1 else f"--sweep={key}={text}")
    path, arg = experiment.split(spec)
    name = pathlib.Path(path).name.removesuffix(".py")
    return shlex.join(["routed", "run", f"--config={name}" + (f":{arg}" if arg else ""), *flags])
