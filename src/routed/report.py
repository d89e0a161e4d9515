"""From rows to statistics, verdicts, figures and one self-contained page.

    python -m routed.report DIR... [--out=FILE]

makes the page of one workdir again, or an overview of several (runs/*): every claim of theirs in one table, and their pages below
it. Parts of one sweep (main's --shard), or other disjoint runs of one config and commit, are joined.
"""

from __future__ import annotations

import collections
import importlib.resources
import io
import json
import pathlib
import sys
import types
from typing import Any

import jinja2
import pandas as pd
from absl import app, flags
from absl import logging as log
from markupsafe import Markup
from ml_collections import ConfigDict

from routed import claims, diagnosis, experiment, files, plots, results, stats
from routed.config import flatten
from routed.words import UserError

OUT = flags.DEFINE_string(
    "out", None, "The page to write; default report.html in the folder, or in the first one's parent."
)

#: Settings that may differ between workdirs that are joined: disjoint seeds or arms of one config.
APART = ("seed", "seeds", "arms")

CAPTIONS = {
    "curves": "Means over seeds with 95 % t intervals (geometric means on log axes, which end at 0.001).",
    "training": "Means over seeds with 95 % t intervals, at the largest point of the sweep.",
    "success": "Share of runs with 95 % t intervals; dotted: the probability predicted by the theorem.",
    "gap": "Log ratios of top-1 loss, paired by seed, with 95 % t intervals; the first three parts add up to the whole gap.",
    "phase": "Mean paired log ratio of top-1 loss; a star marks cells whose 95 % interval excludes 0; black: the zero contour; the name in a cell is the fairest frozen control there.",
    "forest": "Mean paired log ratio of top-1 loss with 95 % t intervals; each line changes one choice of the protocol.",
    "paired": "Mean difference from the learned router, paired by seed, with 95 % t intervals; above 0 in loss, the learned router is better.",
    "languages": "Mean difference of validation loss from the learned router, paired by seed, with 95 % t intervals; above 0 the learned router is better.",
    "methods": "Means over seeds with 95 % t intervals (geometric means on log axes), best first by the first panel.",
    "series": "Means over seeds with 95 % t intervals (bands).",
    "dispatch": "Test samples of each cluster (rows) that go to each expert (columns), for the base seed.",
    "products": "Largest absolute product of an expert's filters, or of its router row, with each cluster's signals, for the base seed: a line an expert and cluster.",
    "embedding": "t-SNE of test samples of the base seed; colour and marker: the expert; background: the predicted class, by a vote of the 15 nearest samples.",
    "routing": "Mean routing probability by cluster and expert for the base seed, ordered by the best match at the end: a specialised router is a diagonal.",
}


def write(workdir: pathlib.Path, module: types.ModuleType, config: ConfigDict, table: pd.DataFrame) -> str:
    """Writes summary.csv, claims.json, figures and report.html, and returns the verdicts as text.

    Raises:
      UserError: the disk is full or read-only.
    """
    part = make_part([workdir], module, config, table)
    with files.explained(workdir / "figures"):
        (workdir / "figures").mkdir(exist_ok=True)
    for figure in part["figures"]:
        files.write(workdir / "figures" / f"{figure['name']}.svg", plots.svg(figure["drawn"]))
        files.write(workdir / "figures" / f"{figure['name']}.png", plots.png(figure["drawn"]))
    buffer = io.StringIO()
    part["table"].to_csv(buffer, index=False)
    files.write(workdir / "summary.csv", buffer.getvalue())
    files.write(workdir / "claims.json", claims.to_json(part["claims"]))
    write_page(workdir / "report.html", [part])
    return as_text(part)


def make_part(
    joined: list[pathlib.Path], module: types.ModuleType, config: ConfigDict, table: pd.DataFrame
) -> dict[str, Any]:
    """Everything that the page says of one workdir, or of several whose rows are joined in `table`; writes nothing."""
    workdir, swept = joined[0], results.swept_keys(joined[0])
    last = results.last(table)
    heatmaps: dict[str, Any] = {}
    for folder in joined:
        heatmaps |= results.read_heatmaps(folder)
    summary = stats.summarise(last, swept)
    data = plots.Data(table, swept, flatten(config), heatmaps)
    figures = []
    for spec in module.get_plots(config):
        figure = plots.draw(spec, data)
        if figure is not None:
            inline = Markup(_unique_ids(plots.svg(figure), f"{workdir.name}-{spec['name']}"))
            figures.append({"name": spec["name"], "drawn": figure, "svg": inline, "caption": CAPTIONS[spec["kind"]]})
    point = data.settle(last, {})
    gap = diagnosis.gap(point)
    described = json.loads((workdir / "config.json").read_text())
    document = (module.__doc__ or "").strip()
    return {
        "name": workdir.name,
        "question": document.splitlines()[0] if document else config.name,
        "claims": claims.judge(module.get_claims(config), table, config, swept),
        "gap": gap.to_dict("records"),
        "gap_at": ", ".join(f"{key} = {point[key].iloc[0]}" for key in swept) or "the only point",
        "threats": diagnosis.threats(table, config, swept),
        "figures": figures,
        "table": summary,
        "summary": Markup(_wide(summary, swept)),
        "config": "\n".join(f"{key} = {value!r}" for key, value in flatten(config).items()),
        "versions": json.dumps({k: v for k, v in described.items() if k != "config"}, indent=1),
        "document": document,
    }


def write_page(path: pathlib.Path, parts: list[dict[str, Any]]) -> None:
    """One HTML file that opens offline."""
    source = importlib.resources.files("routed").joinpath("report.html").read_text()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    title = parts[0]["name"] if len(parts) == 1 else "Overview"
    question = parts[0]["question"] if len(parts) == 1 else f"What {len(parts)} experiments found."
    overview = every_claim(parts) if len(parts) > 1 else []
    counts = collections.Counter(claim["verdict"] for claim in overview)
    page = environment.from_string(source).render(
        title=title, question=question, parts=parts, overview=overview, counts=dict(counts.most_common())
    )
    files.write(path, page)


def every_claim(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims of several workdirs with the name of theirs, sorted by source (their id)."""
    found = [claim | {"workdir": part["name"]} for part in parts for claim in part["claims"]]
    return sorted(found, key=lambda claim: (claim["id"], claim["workdir"]))


def as_text(part: dict[str, Any]) -> str:
    """Verdicts and the gap for the terminal."""
    lines = [
        f"{c['verdict'].upper():14} {c['id']}: {c['statement']}\n{'':14} {c['text'] or 'no rows'}"
        + (f" ({c['reason']})" if c["reason"] else "")
        for c in part["claims"]
    ]
    if part["gap"]:
        lines.append(f"\nThe gap decomposed, at {part['gap_at']} (log ratios of loss, 95 % intervals):")
        lines += [
            f"  {g['part']:28} {g['mean']:+.3f} [{g['low']:+.3f}, {g['high']:+.3f}]"
            + (f"  {100 * g['share']:.0f} %" if g["share"] == g["share"] else "")
            for g in part["gap"]
        ]
    return "\n".join(lines)


def _wide(summary: pd.DataFrame, swept: list[str]) -> str:
    if not len(summary):
        return ""
    shown = summary.copy()
    shown["value"] = [
        f"{m:.4g} [{low:.3g}, {high:.3g}] n={n}"
        for m, low, high, n in zip(shown["mean"], shown.low, shown.high, shown.n, strict=True)
    ]
    return (
        shown.pivot_table(index="metric", columns=[*swept, "arm"], values="value", aggfunc="first")
        .fillna("")
        .T.to_html(border=0)
    )


def _unique_ids(svg: str, prefix: str) -> str:
    """Inline SVGs share the page's name space: their ids and references get a prefix; XML headers go."""
    svg = svg[svg.index("<svg") :]
    for mark in ('id="', 'href="#', "url(#"):
        svg = svg.replace(mark, f"{mark}{prefix}-")
    return svg


def main(argv: list[str]) -> None:
    """The page of one workdir or of several."""
    folders = [
        path for name in argv[1:] if not (path := files.folder(name)).is_file()
    ]  # runs/* holds the page of before
    if not folders:
        raise UserError("usage: python -m routed.report DIR... [--out=FILE]")
    parts = []
    for group in merged(folders):
        module, config = _experiment_of(group[0])
        table = joined_table(group)
        if not len(table):
            log.warning("%s has no finished runs yet: left out", group[0])
            continue
        parts.append(make_part(group, module, config, table))
        print(f"{parts[-1]['name']}\n{as_text(parts[-1])}\n")
    if not parts:
        raise UserError("none of these folders has finished runs")
    out = (
        files.folder(OUT.value)
        if OUT.value
        else (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
    )
    write_page(out, parts)
    print(f"wrote {out}")


def merged(folders: list[pathlib.Path]) -> list[list[pathlib.Path]]:
    """Folders that belong together: parts of one sweep, or runs of one config and commit.

    Raises:
      UserError: no workdir, or a part whose config or commit is not that of the other parts.
    """
    groups: dict[str, list[pathlib.Path]] = {}
    told: dict[pathlib.Path, dict[str, Any]] = {}
    for folder in folders:
        if not (folder / "config.json").exists():
            raise UserError(f"{folder} is no workdir of routed: it has no config.json")
        results.load(folder)  # refuses a damaged one
        told[folder] = stored = json.loads(results.described(folder))
        shared = {k: v for k, v in stored["config"].items() if k not in APART and not k.startswith("mesh.")}
        told[folder]["same"] = shared | {"commit": stored["commit"], "swept keys": stored["swept"]}
        alike: Any = told[folder]["same"]
        if "shard" in stored:  # with whatever claims to be of the same sweep, so that a stranger is seen
            alike = [stored["config"][key] for key in ("name", "figure", "scale")] + [stored["shard"].partition("/")[2]]
        groups.setdefault(json.dumps(alike, sort_keys=True), []).append(folder)
    for group in groups.values():
        first, *others = (told[folder] for folder in group)
        for folder, other in zip(group[1:], others, strict=True):
            for key, value in first["same"].items():
                if other["same"].get(key) != value:
                    raise UserError(
                        f"{folder} is no part of the sweep of {group[0]}: its {key} is {other['same'].get(key)}, there it is"
                        f" {value}; report them apart, or run the part again"
                    )
        if "shard" in first:
            there = {one["shard"] for one in (first, *others)}
            parts = int(first["shard"].partition("/")[2])
            wanted = [f"{i + 1}/{parts}" for i in range(parts)]
            if missing := [part for part in wanted if part not in there]:
                log.warning("%s: of the sweep's parts %s is missing", group[0], ", ".join(missing))
    return list(groups.values())


def joined_table(group: list[pathlib.Path]) -> pd.DataFrame:
    """The rows of folders that belong together.

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


def _experiment_of(folder: pathlib.Path) -> tuple[types.ModuleType, ConfigDict]:
    """The experiment file that a workdir was run from, and the config it was run with."""
    described = json.loads((folder / "config.json").read_text())
    if "experiment" not in described:
        raise UserError(f"{folder} does not say which experiment it is of (an older version wrote it): run it again")
    try:
        module, config = experiment.configure(described["experiment"], [])
    except UserError as error:
        raise UserError(f"{folder}: {error}; run the report in the folder in which that experiment was run") from None
    return module, results.config_of(folder, config)


def run() -> None:
    """Entry point."""
    try:
        app.run(main)
    except UserError as error:
        log.error("error: %s", error)
        sys.exit(2)


if __name__ == "__main__":
    run()
