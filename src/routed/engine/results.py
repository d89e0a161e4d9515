"""What a run leaves behind: the workdir's tables, whole at every moment and independent of the order of work."""

from __future__ import annotations

import io
import json
import pathlib
from typing import Any

import jax
import pandas as pd
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.engine import tables
from routed.engine.rows import ordered, plain
from routed.engine.tables import read_heatmaps, read_table
from routed.plan.checks import PLANNED
from routed.plan.code import VERSION, Code, change
from routed.plan.config import declared, problem_of
from routed.plan.points import Point
from routed.plan.runs import left_out, read_by
from routed.settings.tree import flatten, override
from routed.system import files, hosts
from routed.system.provenance import provenance

#: The version of what a workdir holds; another one is refused.
FORMAT = 3

#: What config.json says at least, in any version.
STORED = {"config": dict, "swept": list}

#: Settings that say which files are read: swept, each value has data of its own. (Languages and tokenizers have too, but their digests
#: cost reading the text at every point before anything runs: of these the base config's alone is compared, and each checkpoint's.)
FILES = ("data.name", "data.directory", "data.images", "data.table", "data.sentences")


def open_workdir(
    path: pathlib.Path, experiment: str, config: ConfigDict, sweep: tuple[Point, ...], shard: str = ""
) -> pd.DataFrame:
    """Prepares the workdir for this command, which runs part `shard` of the sweep, and returns the rows that are there.

    Raises:
      UserError: the workdir has finished rows of another config or other code (which is named), or cannot be written.
    """
    swept = sorted({key for point in sweep for key in point if key not in PLANNED})
    flat, known = flatten(config), declared()
    table, settled = tables.gather(path)
    stored = stored_config(path) if len(table) else None
    active, code = read_by(config, sweep, set(table.arm) if len(table) else ())
    if stored is not None:
        _refuse_other_code(path, stored, code)
        swept = sorted(set(swept) | set(stored["swept"]))
        for key, value in flat.items():
            # A key that this version does not know is of a part that is gone; one that the rows do not have is a new part's.
            old = stored["config"].get(key, value)
            same = json.dumps(value, default=list) == json.dumps(old, default=list)
            if key not in swept and known[key].identity and key in active and not same:
                raise UserError(
                    f"workdir {path} holds results with {key}={plain(old)}, this command has {key}={plain(value)}:"
                    f" choose another --workdir, or set --config.{key}={plain(old)}"
                )
        by_seed = "held streams" if config.held else "rates that were tuned on seeds counted from it"
        tuned = "tuned" in {config.rates, *(point.get("rates") for point in sweep)}
        if (config.held or tuned) and stored["config"]["seed"] != config.seed:
            raise UserError(
                f"workdir {path} holds results with seed={stored['config']['seed']} and {by_seed}: choose another --workdir"
            )
        # A key swept only now was constant in the rows that are there: its value of then stays in config.json.
        flat |= {key: stored["config"][key] for key in swept if key in stored["config"]}
        new = [key for key in swept if key not in table]
        for key in new:
            table.insert(1, key, plain(flat[key]))
        table, settled = (ordered(table), False) if new else (table, settled)
    part = stored_config(path).get("shard", "") if shard and described(path) else ""
    if part and part != shard:
        raise UserError(
            f"workdir {path} is that of part {part}, this is part {shard}: give each part a --workdir of its own"
        )
    data, further = problem_of(config).digest(config), _further_data(config, sweep)
    before = stored or {"left_out": {}, "code": {}}
    known = {"": stored.get("data", data), **stored.get("further_data", {})} if stored is not None else {}
    for where, digest in {"": data, **further}.items():
        if known.get(where, digest) != digest:
            raise UserError(
                f"workdir {path} holds results on other data{where and f' at {where}'} ({known[where]}; now {digest}): choose another"
                f" --workdir, or restore data.directory={config.data.directory!r}"
            )
    about = _description(experiment, flat, swept, data) | ({"shard": shard} if shard else {})
    if further := before.get("further_data", {}) | further:
        about |= {"further_data": further}
    about |= {"left_out": before["left_out"] | left_out(config, sweep), "code": before["code"] | code}
    if hosts.is_first():
        files.write(path / "config.json", json.dumps(about, indent=1, default=list) + "\n")
        if len(table) and not settled:  # when the values of its new columns are on the disk
            tables.merge(path, table)
    return table


def _further_data(config: ConfigDict, sweep: tuple[Point, ...]) -> dict[str, str]:
    """KEY=VALUE,... of points that read other data than the base config -> the digest of these."""
    base, found = problem_of(config).digest(config), dict[str, str]()
    for point in sweep:
        if not point.keys() & {*FILES}:
            continue
        own = {key: value for key, value in point.items() if key.startswith("data.") or key == "model"}
        where = ", ".join(f"{key}={plain(value)}" for key, value in sorted(own.items()))
        if where not in found:
            there = override(config, own)
            if (digest := problem_of(there).digest(there)) != base:
                found[where] = digest
    return found


def _refuse_other_code(path: pathlib.Path, stored: dict[str, Any], code: Code) -> None:
    """Refuses a workdir whose rows were made by another version of this package, or by other code of a part that is used again."""
    if stored.get("format") != FORMAT:
        raise UserError(
            f"workdir {path} was written by another version of routed, whose runs are told apart in another way: choose another"
            " --workdir"
        )
    if (version := stored["versions"].get("routed")) != VERSION:
        raise UserError(
            f"workdir {path} holds results of routed {version}, this is {VERSION}: choose another --workdir, or install"
            f" routed=={version}"
        )
    both = [(label, stored["code"][label], files) for label, files in code.items() if label in stored["code"]]
    for what in filter(None, (change(*one) for one in both)):
        raise UserError(
            f"workdir {path} holds results of other code of {what}: choose another --workdir, or undo the edit"
        )


def described(path: pathlib.Path) -> str:
    """The text of config.json; nothing where there is none."""
    file = path / "config.json"
    with files.explained(file):
        return file.read_bytes().decode("utf-8", "replace") if file.exists() else ""


def swept_keys(path: pathlib.Path) -> list[str]:
    """Dotted keys that vary between the rows of a workdir."""
    return stored_config(path)["swept"]


def load(workdir: str | pathlib.Path) -> dict[str, Any]:
    """The tables of a workdir for a notebook: config, results, summary, claims, heatmaps.

    Raises:
      UserError: the folder holds no run, or a damaged table that the report makes again.
    """
    path = files.folder(workdir)
    if not (path / "config.json").exists():
        raise UserError(f"{path} is no workdir of routed: it has no config.json")
    summary, claims = path / "summary.csv", path / "claims.json"
    found = {"config": stored_config(path)["config"], "results": read_table(path), "heatmaps": read_heatmaps(path)}
    try:
        found["summary"] = pd.read_csv(io.BytesIO(summary.read_bytes())) if summary.exists() else pd.DataFrame()
        found["claims"] = json.loads(claims.read_text("utf-8")) if claims.exists() else []
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{summary} or {claims} is damaged ({type(error).__name__}): the command of this workdir, or python -m"
            " routed.report, makes them again"
        ) from error
    return found


def stored_config(path: pathlib.Path) -> dict[str, Any]:
    """What config.json says.

    Raises:
      UserError: it is missing, or says nothing of the kind.
    """
    try:
        stored = json.loads((path / "config.json").read_text("utf-8"))
        whole = all(isinstance(stored[name], kind) for name, kind in STORED.items())
        made_by = [stored[name] for name in ("versions", "code", "left_out")] if stored.get("format") == FORMAT else []
        nodes = [*made_by, *(made_by[1].values() if made_by else ())]
        whole = whole and all(isinstance(node, dict) for node in nodes)
        if whole and {*stored["swept"]} <= {*stored["config"]} and isinstance(stored.get("shard", ""), str):
            return stored
    except FileNotFoundError:
        raise UserError(
            f"workdir {path} has results but no config.json, so nobody knows of which settings: choose another --workdir"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError(
        f"{path / 'config.json'} is damaged, so nobody knows of which settings the results are: choose another --workdir"
    )


def _description(experiment: str, flat: dict[str, Any], swept: list[str], data: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "experiment": experiment,
        "config": flat,
        "swept": swept,
        **provenance(),
        "devices": [str(d) for d in jax.devices()],
        "data": data,
    }


def config_of(path: pathlib.Path, base: ConfigDict) -> ConfigDict:
    """The config that a workdir was run with."""
    return override(base, {k: tuple(v) if isinstance(v, list) else v for k, v in stored_config(path)["config"].items()})
