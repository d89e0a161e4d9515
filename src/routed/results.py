"""What a run leaves behind: the workdir's tables, whole at every moment and independent of the order of work."""

from __future__ import annotations

import importlib.metadata
import io
import json
import pathlib
import platform
import subprocess
from typing import Any

import jax
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging as log
from ml_collections import ConfigDict

from routed import files
from routed.config import NOT_IDENTITY, flatten, override
from routed.points import Point, Run
from routed.words import UserError

#: Columns before the metrics; the swept keys stand between `run` and `arm`.
LEADING = ("run", "arm", "seed", "step", "status")
PACKAGES = ("routed", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "scikit-learn", "pandas")


def open_workdir(path: pathlib.Path, experiment: str, config: ConfigDict, sweep: tuple[Point, ...]) -> pd.DataFrame:
    """Prepares the workdir for this command and returns the rows that are already there.

    Raises:
      UserError: the workdir has finished rows of another config (the key is named), or cannot be written.
    """
    swept = sorted({key for point in sweep for key in point if key != "arms"})
    flat = flatten(config)
    table = read_table(path)
    stored = _stored_config(path) if len(table) else None
    if stored is not None:
        swept = sorted(set(swept) | set(stored["swept"]))
        for key, value in flat.items():
            old = stored["config"].get(key)
            if key not in swept and key not in NOT_IDENTITY and json.dumps(value, default=list) != json.dumps(old):
                raise UserError(
                    f"workdir {path} holds results with {key}={old!r}, this command has {key}={value!r}:"
                    f" choose another --workdir, or set --config.{key}={old}"
                )
        if config.held and stored["config"]["seed"] != config.seed:
            raise UserError(f"workdir {path} holds results with seed={stored['config']['seed']} and held streams: choose another --workdir")
        # A key swept only now was constant in the rows that are there.
        for key in swept:
            if key not in table:
                table[key] = stored["config"][key]
    files.write(path / "config.json", json.dumps(_description(experiment, flat, swept), indent=1, default=list) + "\n")
    return table


def swept_keys(path: pathlib.Path) -> list[str]:
    """Dotted keys that vary between the rows of a workdir."""
    return _stored_config(path)["swept"]


def rows_of(run: Run, history: dict[str, np.ndarray], swept: list[str]) -> list[dict[str, Any]]:
    """One row per evaluation. A run whose losses are not all finite is `diverged`; a tuning run is `tuning`.

    Raises:
      UserError: a frozen router moved, which would void the comparison.
    """
    if run.config.router.frozen and np.nanmax(history["router/moved"]) > 0:
        raise UserError(f"run {run.key} ({run.arm}, seed {run.seed}): the frozen router moved; this is a bug, please report it")
    finite = np.isfinite(history["test/loss"]).all() and np.isfinite(history["train/loss"][1:]).all()
    status = "tuning" if run.tuning else "ok" if finite else "diverged"
    flat = flatten(run.config)
    point = {key: _plain(flat[key]) for key in swept}
    rows = []
    for index in range(len(history["test/loss"])):
        metrics = {name: float(values[index]) for name, values in sorted(history.items()) if values.ndim == 1}
        step = index * run.config.eval_every
        rows.append({"run": run.key, **point, "arm": run.arm, "seed": run.seed, "step": step, "status": status, **metrics})
    return rows


def merge(table: pd.DataFrame, rows: list[dict[str, Any]], swept: list[str]) -> pd.DataFrame:
    """Old and new rows in an order that does not depend on when they were computed."""
    table = pd.concat([table, pd.DataFrame(rows)], ignore_index=True) if len(table) else pd.DataFrame(rows)
    leading = ["run", *swept, *LEADING[1:]]
    table = table[leading + sorted(set(table.columns) - set(leading))]
    order = [key for key in swept if table[key].map(np.isscalar).all()]
    return table.drop_duplicates(["run", "step"]).sort_values([*order, "arm", "seed", "run", "step"], ignore_index=True)


def write_table(path: pathlib.Path, table: pd.DataFrame) -> None:
    """Writes results.parquet, with the table before it kept beside it."""
    target = path / "results.parquet"
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), buffer, write_page_checksum=True)
    if target.exists():
        files.write(path / ".results.before.parquet", target.read_bytes())
    files.write(target, buffer.getvalue())


def read_table(path: pathlib.Path) -> pd.DataFrame:
    """The rows of a workdir; of the table before it when results.parquet is damaged, and none when both are."""
    for name in ("results.parquet", ".results.before.parquet"):
        if not (path / name).exists():
            continue
        try:
            return pq.read_table(path / name, page_checksum_verification=True).to_pandas()
        except (OSError, ValueError, pa.ArrowException) as error:
            log.warning("%s is damaged (%s): going back to the table before it; what is missing is run again", path / name, str(error).splitlines()[0])
    return pd.DataFrame()


def write_heatmaps(path: pathlib.Path, new: dict[str, np.ndarray]) -> None:
    """Adds cluster x expert routing probabilities [evaluations, C, E] by run key to routing.npz."""
    if not new:
        return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **(read_heatmaps(path) | new))
    files.write(path / "routing.npz", buffer.getvalue())


def read_heatmaps(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of routing.npz; none when it is missing or damaged."""
    try:
        with np.load(path / "routing.npz", allow_pickle=False) as stored:
            return dict(stored)
    except FileNotFoundError:
        return {}
    except Exception as error:  # zipfile, zlib and numpy each raise their own
        log.warning("%s is damaged (%s): its heatmaps are lost, the tables are not", path / "routing.npz", error)
        return {}


def last(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every run that is not a tuning run."""
    if not len(table):
        return table
    table = table[table.status != "tuning"]
    return table.loc[table.groupby("run").step.idxmax()].reset_index(drop=True)


def load(workdir: str | pathlib.Path) -> dict[str, Any]:
    """The tables of a workdir for a notebook: config, results, summary, claims, heatmaps.

    Raises:
      UserError: the folder holds no run.
    """
    path = pathlib.Path(workdir)
    if not (path / "config.json").exists():
        raise UserError(f"{path} is no workdir of routed: it has no config.json")
    summary, claims = path / "summary.csv", path / "claims.json"
    return {
        "config": _stored_config(path)["config"],
        "results": read_table(path),
        "summary": pd.read_csv(summary) if summary.exists() else pd.DataFrame(),
        "claims": json.loads(claims.read_text()) if claims.exists() else [],
        "heatmaps": read_heatmaps(path),
    }


def _stored_config(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise UserError(f"workdir {path} has results but no config.json: choose another --workdir") from None
    except ValueError:
        raise UserError(f"{path / 'config.json'} is damaged: delete it only if you know its settings, or choose another --workdir") from None


def _description(experiment: str, flat: dict[str, Any], swept: list[str]) -> dict[str, Any]:
    return {
        "experiment": experiment,
        "config": flat,
        "swept": swept,
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "commit": _commit(),
        "devices": [str(d) for d in jax.devices()],
        "machine": f"{platform.system()} {platform.machine()}, {platform.processor() or 'CPU'}",
        "data": "generated from the seed",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit of the source tree, with a mark when it has uncommitted changes."""
    here = pathlib.Path(__file__).parent
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, capture_output=True, text=True, timeout=10)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def config_of(path: pathlib.Path, base: ConfigDict) -> ConfigDict:
    """The config that a workdir was run with."""
    return override(base, {k: tuple(v) if isinstance(v, list) else v for k, v in _stored_config(path)["config"].items()})
