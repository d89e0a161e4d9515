"""The folder of a command that names none: short, readable, the same for the same command and for no other."""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import re
from typing import Any

from ml_collections import ConfigDict

from routed.plan.experiment import split
from routed.settings.tree import parse, value_of
from routed.system.experiments import packaged

#: What stands in a name as it is: words, and numbers with their signs.
PLAIN = re.compile(r"(\w|\.|-(?=\d))*", re.ASCII)

#: Letters of a name, without its hash.
LONGEST = 80

#: Settings that are left out: where data are changes no result, and another digest of the data is refused.
ELSEWHERE = {"data.directory", "data.cache"}


def default_workdir(experiment: str, config: ConfigDict, overrides: list[str], sweeps: list[str], shard: str) -> str:
    """runs/NAME[-FIGURE][-SCALE][-KEY=VALUE...][-shardIofN]; a sweep's values are joined by commas, those of a tuple by +.

    `experiment` is one of `routed`'s own by name, or a file by its whole path. What is awkward in the name of a folder is
    replaced, what is long is cut, and a hash of the command follows then, the same for all parts of a sweep.

    Raises:
      UserError: a swept value of the wrong type.
    """
    name, exact = _names(split(experiment)[0])
    scale = config.scale if config.scale != "default" else ""
    keys = {text.partition("=")[0] for text in overrides} - ELSEWHERE
    values = {key: _texts(value_of(config, key)) for key in sorted(keys)}
    swept = {key: text.split(",") for key, _, text in (sweep.partition("=") for sweep in sweeps)}
    points = {key: [_texts(parse(config, key, value)) for value in swept[key]] for key in sorted(swept)}
    parts = [part for part in (name, config.figure, scale) if part]
    parts += [f"{key}={'+'.join(value)}" for key, value in values.items()]
    parts += [f"{key}={','.join(map('+'.join, some))}" + "," * (len(some) == 1) for key, some in points.items()]
    whole, end = "-".join(parts), f"-shard{shard.replace('/', 'of')}" if shard else ""
    words = itertools.chain([exact, config.figure, scale], *values.values(), *itertools.chain(*points.values()))
    if len(whole) <= LONGEST and all(PLAIN.fullmatch(word) for word in words):
        return f"runs/{whole}{end}"
    command = json.dumps([exact, config.figure, scale, values, points])
    cleaned = re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", whole)[:LONGEST]
    return f"runs/{cleaned}~{hashlib.sha256(command.encode()).hexdigest()[:8]}{end}"


def _names(experiment: str) -> tuple[str, str]:
    """What an experiment is called, and what tells it from all others: its place, unless the name does."""
    file = pathlib.Path(experiment)
    if not file.is_absolute():
        return experiment, experiment
    here = file.relative_to(pathlib.Path.cwd()) if file.is_relative_to(pathlib.Path.cwd()) else file
    name = ".".join(here.with_suffix("").parts)
    told = not here.is_absolute() and all(re.fullmatch(r"\w+", part, re.ASCII) for part in here.with_suffix("").parts)
    return (name, name) if told and name not in packaged() else (file.stem, f"./{here}")


def _texts(value: Any) -> list[str]:
    """A value as it is written on the command line; a tuple's values one by one."""
    if isinstance(value, tuple):
        return [text for one in value for text in _texts(one)]
    return [str(value).lower() if isinstance(value, bool) else str(value)]
