"""The committed tables of one result, DIR/data/NAME/: verdicts, losses by arm, facts about the run, values per seed.

`keep` takes them from a workdir, `judged` makes them again from the values per seed.
"""

from __future__ import annotations

import csv
import pathlib
import re
import types
from collections.abc import Sequence
from typing import Any

import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import findings, plots, verdicts, versions
from routed.analysis.workdirs import experiment_of
from routed.contracts import UserError
from routed.engine import results
from routed.plan import experiment
from routed.plan.code import VERSION
from routed.plan.config import problem_of
from routed.publish import per_seed
from routed.system import files, stored

#: Figures of a page: the first ones of an experiment, and what its router did in training; the others stay in the
#: workdir.
FIRST, ALSO = 2, ("routing",)
#: The file of a result that is written last, and removed first.
LAST = "arms.csv"
#: The way that mends a damaged file of a result.
RESTORE = "restore it, or keep its workdir again with routed report --docs"

_PART = dict.fromkeys(
    ("mean", "low", "high", "share", "share_low", "share_high"), lambda value: value is None or stored.number(value)
)
#: The form of about.json.
ABOUT: stored.Form = dict.fromkeys(("question", "line?", "command", "machine", "commit", "gap_at"), str) | {
    "seconds": stored.number,
    "devices": int,
    "rules": lambda value: type(value) is int and value > 0,
    "gap": [_PART | {"part": str}],
    "shares?": [_PART | {"part": str, "evaluation": str, "orders": int}],
    "experts?": {str: lambda value: type(value) is list and len(value) == 2 and all(map(stored.number, value))},
    "figures": [{"name": str, "caption": str}],
}


def keep(
    part: dict[str, Any],
    joined: list[pathlib.Path],
    module: types.ModuleType,
    config: ConfigDict,
    table: pd.DataFrame,
    root: pathlib.Path,
) -> None:
    """Writes the committed tables of a workdir, or of joined workdirs, to root/data in place of older tables.

    Verdicts are those of the values per seed that are kept.

    Raises:
      UserError: the runs are of uncommitted code, or the kept values give another verdict than all rows.
    """
    described = results.stored_config(joined[0])
    if (commit := described["commit"]) == "unknown" or commit.endswith("-dirty"):
        raise UserError(
            f"{joined[0]} was run from code without a commit or with uncommitted changes ({commit}), so nobody can run"
            " it again: commit them, and run it again"
        )
    claims, problem = experiment.figure_of(module, config).claims(config), problem_of(config)
    columns = per_seed.columns_read(claims, (problem.loss, problem.compared))
    reduced, swept = per_seed.reduced(table, columns), results.swept_keys(joined[0])
    result = findings.of_table(module, config, per_seed.widened(reduced), swept)
    for claim, record in zip(part["claims"], result["claims"], strict=True):
        if claim["verdict"] != record["verdict"]:
            raise UserError(
                f"{joined[0]}: {claim['id']} is {claim['verdict']} by all rows, {record['verdict']} by those that a"
                " page keeps: name every column that the claim reads in its metrics()"
            )
    folder = files.own_folder(files.own_folder(root / "data") / part["name"])
    (folder / LAST).unlink(missing_ok=True)
    _write_figures(files.own_folder(folder / "figures"), part["figures"])
    about = {
        "question": part["question"],
        "line": part["line"],
        "command": part["command"],
        "seconds": sum(map(_seconds, joined)),
        "machine": described["machine"],
        "devices": len(described["devices"]),
        "commit": described["commit"],
        "figures": [{"name": each["name"], "caption": _alone(each["caption"])} for each in _shown(part["figures"])],
    }
    per_seed.write(folder, reduced, described["experiment"], config, swept)
    store(folder, _tables(about, result))


def store(folder: pathlib.Path, tables: dict[str, str]) -> None:
    """Writes tables of `judged` in place of older ones; a kill leaves a folder without its last file."""
    (files.own_folder(folder) / LAST).unlink(missing_ok=True)
    for name, text in tables.items():
        files.write(folder / name, text)


def judged(folder: pathlib.Path, named: Sequence[str] = ()) -> dict[str, str]:
    """Returns the committed tables of a result, judged anew from its values per seed: file name -> text.

    `named` are files of users' experiments whose code may be run.

    Raises:
      UserError: the experiment is gone or another file, or a file is damaged.
    """
    about = stored.read(folder / "about.json", ABOUT, RESTORE)
    module, config = experiment_of(folder, named)
    with stored.fitting(f"{folder / per_seed.CONFIG} and {per_seed.TABLE}", RESTORE):
        result = findings.of_table(module, config, per_seed.read(folder), results.swept_keys(folder))
        return _tables(about, result)


def _tables(about: dict[str, Any], result: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of the committed tables; the last one tells that a folder is whole."""
    figures = {"figures": about.pop("figures")}
    measures = {name: result[name] for name in ("gap_at", "gap", "shares")} | {"experts": experts_of(result["table"])}
    about |= {"rules": versions.RULES, "routed": VERSION} | measures | figures
    return {
        "about.json": verdicts.to_json(about),
        "claims.json": verdicts.to_json(result["claims"]),
        LAST: files.csv_text(result["by_arm"]),
    }


def experts_of(summary: pd.DataFrame) -> dict[str, list[float]]:
    """Returns the fewest and most experts of each arm for a training token; empty where all arms are alike."""
    counts = (
        summary[summary.metric == "train/experts_per_token"]
        .groupby("arm", sort=False)["mean"]
        .agg(["min", "max"])
        .round(3)
    )
    return {} if len(counts.drop_duplicates()) < 2 else {arm: [*ends] for arm, *ends in counts.itertuples()}


def _alone(caption: str) -> str:
    """Returns a caption without the numbers of figures of the report, most of which are not committed."""
    caption = re.sub(r"; other values: figures? [\d, toand]+", "", caption)
    return re.sub(r" ?Figure \d+ at each value of \S+, on shared axes\.", "", caption)


def _shown(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [figure for i, figure in enumerate(figures) if i < FIRST or figure["name"] in ALSO]


def _write_figures(folder: pathlib.Path, figures: list[dict[str, Any]]) -> None:
    for old in folder.glob("*.svg"):
        old.unlink()
    for figure in _shown(figures):
        for ending, dark in (("", False), ("-dark", True)):
            files.write(folder / f"{figure['name']}{ending}.svg", lightened(plots.svg(figure["drawn"], dark)))


def lightened(svg: str) -> str:
    """Returns a figure as small as a repository likes: coordinates to a tenth of a pixel, each mark's shape once."""
    svg, ids = re.sub(r"(\d\.\d)\d+(?=[,)LMAVHZ ])", r"\1", svg), dict[str, str]()

    def placed(mark: re.Match[str]) -> str:
        x, y, shape = mark.groups()
        return f'<use href="#{ids.setdefault(shape, f"mark{len(ids)}")}" x="{x}" y="{y}"/>'

    svg = re.sub(r'<path transform="translate\(([^,]+),([^)]+)\)" (d="[^>]+)/>', placed, svg)
    shapes = "".join(f'<path id="{id}" {shape}/>' for shape, id in ids.items())
    return svg.replace(">", f"><defs>{shapes}</defs>", 1) if ids else svg


def _seconds(workdir: pathlib.Path) -> float:
    with stored.fitting(str(workdir / "timing.csv"), RESTORE), (workdir / "timing.csv").open(newline="") as file:
        return sum((float(row["compile_s"]) + float(row["run_s"]) for row in csv.DictReader(file)), 0.0)
