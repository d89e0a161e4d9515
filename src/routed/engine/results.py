"""A workdir and its config.json: opened by a command, refused where its rows are of other settings, code or data."""

from __future__ import annotations

import io
import json
import os
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
from routed.system import stored as stored_files
from routed.system.provenance import provenance

#: The version of a workdir's format; workdirs of other versions are refused.
FORMAT = 3


_TEXTS = {str: str}
#: The form of config.json; what the present version has beside it is asked for where it is read.
STORED: stored_files.Form = {"config": {str: object}, "swept": [str], "devices?": [str], "code?": {str: _TEXTS}}
STORED |= dict.fromkeys(("experiment?", "shard?", "commit?", "machine?", "data?"), str)
STORED |= dict.fromkeys(("versions?", "left_out?", "further_data?"), _TEXTS)

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
        # A key without a column was constant in the stored rows: its value of then stays in config.json.
        if new := [key for key in swept if key not in table]:
            flat |= {key: value for key, value in stored["config"].items() if key in new}
            for key in new:
                table.insert(1, key, plain_value(flat[key]))
            table, settled = ordered(table), False
    _refuse_other_shard(path, shard)
    data, further_data = problem_of(config).digest(config), _further_data(config, sweep)
    _refuse_other_data(path, stored, {"": data, **further_data})
    content = _description(experiment, flat, swept, data) | ({"shard": shard} if shard else {})
    before = stored or {"left_out": {}, "code": {}}
    if further_data := before.get("further_data", {}) | further_data:
        content |= {"further_data": further_data}
    content |= {"left_out": before["left_out"] | left_out(config, sweep), "code": before["code"] | code}
    if hosts.is_first():
        files.write(path / "config.json", json.dumps(stored_files.sealed(content), indent=1, default=list) + "\n")
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
    old = stored["config"].get("seed")
    by_seed = "held streams" if config.shared_streams else "rates that were tuned on seeds counted from it"
    tuned = "tuned" in {config.rates, *(point.get("rates") for point in sweep)}
    if (config.shared_streams or tuned) and old != config.seed:
        raise UserError(f"workdir {path} holds results with seed={old} and {by_seed}: choose another --workdir")


def _refuse_other_shard(path: pathlib.Path, shard: str) -> None:
    """Refuses the workdir of another part of a sweep."""
    part = stored_config(path).get("shard", "") if shard and described(path) else ""
    if part and part != shard:
        raise UserError(
            f"workdir {path} is that of part {part}, this is part {shard}: give each part a --workdir of its own"
        )


def _refuse_other_data(path: pathlib.Path, stored: dict[str, Any] | None, digests: dict[str, str]) -> None:
    """Refuses a workdir whose rows were trained on other data; `digests` are those of the base config and of points."""
    if stored is None:
        return
    stored_digests = {"": stored.get("data", digests[""]), **stored.get("further_data", {})}
    for point, digest in digests.items():
        if stored_digests.get(point, digest) != digest:
            raise UserError(
                f"workdir {path} holds results on other data{point and f' at {point}'} ({stored_digests[point]}; now"
                f" {digest}): choose another --workdir, or restore data.directory="
                f"{stored['config'].get('data.directory', '')!r} with its files"
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
            " choose another --workdir"
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
    summary, claims = path / "summary.csv", path / "claims.json"
    again = "the command of this workdir, or python -m routed.report, makes them again"
    content = {"config": stored_config(path)["config"], "results": read_table(path), "heatmaps": read_heatmaps(path)}
    with stored_files.fitting(f"{summary} or {claims}", again):
        table = pd.read_csv(io.BytesIO(stored_files.read_table(summary, again))) if summary.exists() else pd.DataFrame()
        content["summary"] = table.rename(columns=new_name).replace({"metric": COLUMNS})
        judged = json.loads(stored_files.read_table(claims, again)) if claims.exists() else []
        content["claims"] = [
            claim | {"metric": new_name(claim["metric"]), "at": with_new_names(claim["at"])} for claim in judged
        ]
    return content


def stored_config(path: pathlib.Path) -> dict[str, Any]:
    """Reads config.json.

    Raises:
      UserError: the file is missing or damaged, or edited, unless `stored.ACCEPTS_EDITS`.
    """
    file, mend = path / "config.json", "nobody knows of which settings the results are: choose another folder"
    if not file.exists():
        raise UserError(f"{path} is no workdir of routed, or has no config.json any more: {mend}")
    stored = stored_files.read(file, STORED, mend)
    now = ("versions", "left_out", "code") if stored.get("format") == FORMAT else ()
    if lacking := [key for key in now if key not in stored] + sorted({*stored["swept"]} - {*stored["config"]}):
        raise UserError(f"{file} is damaged (it lacks {lacking[0]!r}): {mend}")
    stored_files.check(file, stored_files.is_sealed(stored))
    with stored_files.fitting(str(file), mend):
        names = {"config": with_new_names(stored["config"]), "swept": [new_name(key) for key in stored["swept"]]}
    return stored | names


def _description(experiment: str, flat: dict[str, Any], swept: list[str], data: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "experiment": experiment,
        "config": flat,
        "swept": swept,
        **provenance(),
        "devices": [str(d) for d in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "data": data,
    }


def config_of(path: pathlib.Path, base: ConfigDict) -> ConfigDict:
    """The config of a workdir's command; settings of parts that its experiment no longer loads are left out."""
    stored, flat = stored_config(path)["config"], flatten(base)
    if gone := sorted(stored.keys() - flat.keys()):
        log.warning("%s: settings that nothing here reads are left out: %s", path, ", ".join(gone))
    return override(base, {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in flat})
