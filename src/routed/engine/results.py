"""A workdir and its config.json: opened by a command, refused where its rows are of other settings, code or data."""

from __future__ import annotations

import io
import json
import pathlib
from typing import Any

import jax
import pandas as pd
from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.engine import tables
from routed.engine.rows import ordered, plain_value
from routed.engine.tables import read_heatmaps, read_table
from routed.plan.checks import PLANNED
from routed.plan.code import VERSION, Code, change
from routed.plan.config import declared, problem_of
from routed.plan.run import Point
from routed.plan.runs import left_out, read_by
from routed.settings.renamed import COLUMNS, new_name, with_new_names
from routed.settings.tree import flatten, override
from routed.system import files, hosts
from routed.system.provenance import provenance

#: The version of a workdir's format; workdirs of other versions are refused.
FORMAT = 3

#: Keys of config.json in any version, and their types.
STORED = {"config": dict, "swept": list}

#: Settings that name files: each swept value has data of its own. Languages and tokenizers have too, but their digests
#: cost reading the text at every point before anything runs: for them the base config's digest is compared, and each
#: checkpoint's.
FILES = ("data.name", "data.directory", "data.images", "data.table", "data.sentences")


def open_workdir(
    path: pathlib.Path, experiment: str, config: ConfigDict, sweep: tuple[Point, ...], shard: str = ""
) -> pd.DataFrame:
    """Prepares the workdir for this command, which runs part `shard` of the sweep, and returns its rows.

    Raises:
      UserError: the workdir has finished rows of another config or other code (which is named), or cannot be written.
    """
    table, settled = tables.gather(path)
    stored = stored_config(path) if len(table) else None
    active, code = read_by(config, sweep, set(table.arm) if len(table) else ())
    flat, swept = flatten(config), sorted({key for point in sweep for key in point if key not in PLANNED})
    if stored is not None:
        swept = sorted(set(swept) | set(stored["swept"]))
        _refuse_other_code(path, stored, code)
        _refuse_other_settings(path, stored, flat, active - {*swept})
        _refuse_other_seed(path, stored, config, sweep)
        # A key swept only now was constant in the stored rows: its value of then stays in config.json.
        flat |= {key: stored["config"][key] for key in swept if key in stored["config"]}
        if new := [key for key in swept if key not in table]:
            for key in new:
                table.insert(1, key, plain_value(flat[key]))
            table, settled = ordered(table), False
    _refuse_other_shard(path, shard)
    data, further_data = problem_of(config).digest(config), _further_data(config, sweep)
    _refuse_other_data(path, stored, {"": data, **further_data}, config.data.directory)
    content = _description(experiment, flat, swept, data) | ({"shard": shard} if shard else {})
    before = stored or {"left_out": {}, "code": {}}
    if further_data := before.get("further_data", {}) | further_data:
        content |= {"further_data": further_data}
    content |= {"left_out": before["left_out"] | left_out(config, sweep), "code": before["code"] | code}
    if hosts.is_first():
        files.write(path / "config.json", json.dumps(content, indent=1, default=list) + "\n")
        if len(table) and not settled:  # after config.json, which has the values of the new columns
            tables.merge(path, table)
    return table


def _refuse_other_settings(path: pathlib.Path, stored: dict[str, Any], flat: dict[str, Any], active: set[str]) -> None:
    """Refuses a workdir whose rows have another value of an `active` setting that decides results."""
    settings = declared()
    for key, value in flat.items():
        # Rows may lack a key: it is of a part that is newer than they are.
        old = stored["config"].get(key, value)
        same = json.dumps(value, default=list) == json.dumps(old, default=list)
        if settings[key].identity and key in active and not same:
            raise UserError(
                f"workdir {path} holds results with {key}={plain_value(old)}, this command has"
                f" {key}={plain_value(value)}: choose another --workdir, or set --config.{key}={plain_value(old)}"
            )


def _refuse_other_seed(
    path: pathlib.Path, stored: dict[str, Any], config: ConfigDict, sweep: tuple[Point, ...]
) -> None:
    """Refuses a workdir of another base seed, where results depend on it beyond the seed of each run."""
    by_seed = "held streams" if config.shared_streams else "rates that were tuned on seeds counted from it"
    tuned = "tuned" in {config.rates, *(point.get("rates") for point in sweep)}
    if (config.shared_streams or tuned) and stored["config"]["seed"] != config.seed:
        raise UserError(
            f"workdir {path} holds results with seed={stored['config']['seed']} and {by_seed}: choose another --workdir"
        )


def _refuse_other_shard(path: pathlib.Path, shard: str) -> None:
    """Refuses the workdir of another part of a sweep."""
    part = stored_config(path).get("shard", "") if shard and described(path) else ""
    if part and part != shard:
        raise UserError(
            f"workdir {path} is that of part {part}, this is part {shard}: give each part a --workdir of its own"
        )


def _refuse_other_data(
    path: pathlib.Path, stored: dict[str, Any] | None, digests: dict[str, str], directory: str
) -> None:
    """Refuses a workdir whose rows were trained on other data; `digests` are those of the base config and of points."""
    if stored is None:
        return
    stored_digests = {"": stored.get("data", digests[""]), **stored.get("further_data", {})}
    for point, digest in digests.items():
        if stored_digests.get(point, digest) != digest:
            raise UserError(
                f"workdir {path} holds results on other data{point and f' at {point}'} ({stored_digests[point]}; now"
                f" {digest}): choose another --workdir, or restore data.directory={directory!r}"
            )


def _further_data(config: ConfigDict, sweep: tuple[Point, ...]) -> dict[str, str]:
    """Digests of the data of points that read other data than the base config, by the point as KEY=VALUE, ..."""
    base, digests = problem_of(config).digest(config), dict[str, str]()
    for point in sweep:
        if not point.keys() & {*FILES}:
            continue
        changes = {key: value for key, value in point.items() if key.startswith("data.") or key == "model"}
        name = ", ".join(f"{key}={plain_value(value)}" for key, value in sorted(changes.items()))
        if name not in digests:
            point_config = override(config, changes)
            if (digest := problem_of(point_config).digest(point_config)) != base:
                digests[name] = digest
    return digests


def _refuse_other_code(path: pathlib.Path, stored: dict[str, Any], code: Code) -> None:
    """Refuses a workdir whose rows come from another version of this package, or from other code of a part in use."""
    if stored.get("format") != FORMAT:
        raise UserError(
            f"workdir {path} was written by another version of routed, whose runs are told apart in another way:"
            " choose another"
            " --workdir"
        )
    if (version := stored["versions"].get("routed")) != VERSION:
        raise UserError(
            f"workdir {path} holds results of routed {version}, this is {VERSION}: choose another --workdir, or install"
            f" routed=={version}"
        )
    for label, digests in code.items():
        if label in stored["code"] and (changed := change(label, stored["code"][label], digests)):
            raise UserError(
                f"workdir {path} holds results of other code of {changed}: choose another --workdir, or undo the edit"
            )


def described(path: pathlib.Path) -> str:
    """The text of config.json; empty if there is none."""
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
    content = {"config": stored_config(path)["config"], "results": read_table(path), "heatmaps": read_heatmaps(path)}
    try:
        table = pd.read_csv(io.BytesIO(summary.read_bytes())) if summary.exists() else pd.DataFrame()
        content["summary"] = table.rename(columns=new_name).replace({"metric": COLUMNS})
        judged = json.loads(claims.read_text("utf-8")) if claims.exists() else []
        content["claims"] = [
            claim | {"metric": new_name(claim["metric"]), "at": with_new_names(claim["at"])} for claim in judged
        ]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{summary} or {claims} is damaged ({type(error).__name__}): the command of this workdir, or python -m"
            " routed.report, makes them again"
        ) from error
    return content


def stored_config(path: pathlib.Path) -> dict[str, Any]:
    """Reads config.json.

    Raises:
      UserError: the file is missing or damaged.
    """
    try:
        stored = json.loads((path / "config.json").read_text("utf-8"))
        valid = all(isinstance(stored[name], kind) for name, kind in STORED.items())
        if stored.get("format") == FORMAT:
            nodes = [stored["versions"], stored["code"], stored["left_out"], *stored["code"].values()]
            valid = valid and all(isinstance(node, dict) for node in nodes)
        if valid and {*stored["swept"]} <= {*stored["config"]} and isinstance(stored.get("shard", ""), str):
            names = {"config": with_new_names(stored["config"]), "swept": [new_name(key) for key in stored["swept"]]}
            return stored | names
    except FileNotFoundError:
        raise UserError(
            f"workdir {path} has results but no config.json, so nobody knows of which settings: choose another"
            " --workdir"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError(
        f"{path / 'config.json'} is damaged, so nobody knows of which settings the results are: choose another"
        " --workdir"
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
    """The config of a workdir's command; settings of parts that its experiment no longer loads are left out."""
    stored, flat = stored_config(path)["config"], flatten(base)
    if gone := sorted(stored.keys() - flat.keys()):
        log.warning("%s: settings that nothing here reads are left out: %s", path, ", ".join(gone))
    return override(base, {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in flat})
