"""The default folder of a command: short, readable, the same for equal commands and different for others."""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import re
from typing import Any

from ml_collections import ConfigDict

from routed.plan.experiment_files import split
from routed.settings.tree import parse, split_values, value_of
from routed.system.experiments import packaged

#: Texts that need no change in a name: letters, digits, and numbers with their signs.
PLAIN = re.compile(r"(\w|\.|-(?=\d))*", re.ASCII)

#: The most letters of a name, without its hash.
LONGEST = 80

#: Settings without a place in the name: the folder of the data changes no result, and a digest of other data is
#: refused.
ELSEWHERE = {"data.directory", "data.cache"}


def default_workdir(experiment: str, config: ConfigDict, overrides: list[str], sweeps: list[str], shard: str) -> str:
    """Returns runs/NAME[-FIGURE][-SCALE][-KEY=VALUE...][-shardIofN]; commas join a sweep's values, + those of a tuple.

    `experiment` is the name of one of `routed`'s own experiments, or the whole path of a file. If the name has
    characters that are awkward in a folder's name, or is too long, it is cleaned and cut, and ends with a hash of the
    command.

    Raises:
      UserError: a swept value of the wrong type.
    """
    name, full_name = _names(split(experiment)[0])
    scale = config.scale if config.scale != "default" else ""
    keys = {text.partition("=")[0] for text in overrides} - ELSEWHERE
    values = {key: texts(value_of(config, key)) for key in sorted(keys)}
    swept = {key: split_values(text) for key, _, text in (sweep.partition("=") for sweep in sweeps)}
    points = {key: [texts(parse(config, key, value)) for value in swept[key]] for key in sorted(swept)}
    parts = [part for part in (name, config.figure, scale) if part]
    parts += [f"{key}={'+'.join(value)}" for key, value in values.items()]
    parts += [f"{key}={','.join(map('+'.join, axis))}" + "," * (len(axis) == 1) for key, axis in points.items()]
    whole, end = "-".join(parts), f"-shard{shard.replace('/', 'of')}" if shard else ""
    named = itertools.chain([full_name, config.figure, scale], *values.values(), *itertools.chain(*points.values()))
    if len(whole) <= LONGEST and all(PLAIN.fullmatch(text) for text in named):
        return f"runs/{whole}{end}"
    command = json.dumps([full_name, config.figure, scale, values, points])
    cleaned = re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", whole)[:LONGEST]
    return f"runs/{cleaned}~{hashlib.sha256(command.encode()).hexdigest()[:8]}{end}"


def _names(experiment: str) -> tuple[str, str]:
    """The short name of an experiment, and a unique name: its path, unless the short name is unique."""
    file = pathlib.Path(experiment)
    if not file.is_absolute():
        return experiment, experiment
    path = file.relative_to(pathlib.Path.cwd()) if file.is_relative_to(pathlib.Path.cwd()) else file
    parts = path.with_suffix("").parts
    name = ".".join(parts)
    is_unique = not path.is_absolute() and all(re.fullmatch(r"\w+", part, re.ASCII) for part in parts)
    return (name, name) if is_unique and name not in packaged() else (file.stem, f"./{path}")


def texts(value: Any) -> list[str]:
    """Returns a value as on the command line; a tuple's values one by one."""
    if isinstance(value, list | tuple):
        return [text for element in value for text in texts(element)]
    return [str(value).lower() if isinstance(value, bool) else str(value)]
