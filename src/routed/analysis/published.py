"""The result pages of docs/: a page for each paper and one for our own questions, made from small committed tables.

`keep` takes from a workdir what is committed (DIR/data/NAME/: claims.json, arms.csv, about.json, figures),
`write_pages` makes the pages of all that is kept. Why a number differs is written by hand, once, in
DIR/data/causes.json: claim id -> sentence; and where a paper contradicts itself in DIR/data/contradictions.json:
source -> sentences.
"""

from __future__ import annotations

import csv
import json
import math
import pathlib
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pandas as pd
from absl import logging as log

from routed.analysis import plots, verdicts
from routed.analysis.answer import in_order
from routed.analysis.terminal import shown_share
from routed.contracts import UserError
from routed.engine import results
from routed.system import files

#: What a claim's id begins with -> (file of its page, heading).
SOURCES = {
    "dikkala": (
        "dikkala2023",
        "Dikkala et al. (2023), On the Benefits of Learning to Route in Mixture-of-Experts Models",
    ),
    "chen": ("chen2022", "Chen et al. (2022), Towards Understanding Mixture of Experts in Deep Learning"),
    "chowdhury": ("chowdhury2023", "Chowdhury et al. (2023), Patch-level Routing in Mixture-of-Experts"),
    "pham": ("pham2024", "Pham et al. (2024), CompeteSMoE"),
    "routed": ("ours", "Our own questions, and what others claimed of them"),
}
#: Claims of papers without a page (`fan.random`, say) stand beside our own.
OTHERS = "routed"
#: What stands behind a verdict that is of another setting than the paper's.
SETTINGS = {"stand_in": " (other data)", "scaled": " (scaled down)"}
#: Verdicts that speak against a paper; what a claim has in the place of a paper's value where the question is ours.
AGAINST, NOT_ASKED = ("opposite", "not reproduced"), "not asked"
#: Figures of a page: the first ones of an experiment, and what its router did in training; the others stay in the
#: workdir.
FIRST, ALSO = 2, ("routing",)
#: Points whose losses stand open on a page; more are folded.
FEW = 12


def keep(part: dict[str, Any], joined: list[pathlib.Path], root: pathlib.Path) -> None:
    """Writes the committed tables of a workdir, or of joined workdirs, to root/data in place of older tables."""
    folder, described = root / "data" / part["name"], results.stored_config(joined[0])
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for old in (folder / "figures").iterdir():
        old.unlink()
    figures = [figure for i, figure in enumerate(part["figures"]) if i < FIRST or figure["name"] in ALSO]
    for figure in figures:
        for ending, dark in (("", False), ("-dark", True)):
            files.write(
                folder / "figures" / f"{figure['name']}{ending}.svg", lightened(plots.svg(figure["drawn"], dark))
            )
    about = {
        "question": part["question"],
        "line": part["line"],
        "command": part["command"],
        "seconds": sum(map(_seconds, joined)),
        "machine": described["machine"],
        "devices": len(described["devices"]),
        "commit": described["commit"],
        "gap_at": part["gap_at"],
        "gap": part["gap"],
        "shares": part["shares"],
        "experts": experts_of(part["table"]),
        "figures": [{"name": figure["name"], "caption": figure["caption"]} for figure in figures],
    }
    files.write(folder / "about.json", verdicts.to_json(about))
    files.write(folder / "claims.json", verdicts.to_json([claim | {"points": []} for claim in part["claims"]]))
    files.write(folder / "arms.csv", part["by_arm"].to_csv(index=False))


def experts_of(summary: pd.DataFrame) -> dict[str, list[float]]:
    """Returns the fewest and most experts of each arm for a training token; empty where all arms are alike."""
    counts = (
        summary[summary.metric == "train/experts_per_token"]
        .groupby("arm", sort=False)["mean"]
        .agg(["min", "max"])
        .round(3)
    )
    return {} if len(counts.drop_duplicates()) < 2 else {arm: [*ends] for arm, *ends in counts.itertuples()}


def write_pages(root: pathlib.Path) -> list[pathlib.Path]:
    """Writes the page of every source with a kept claim.

    Results without a claim go to the page of their experiment.

    Raises:
      UserError: nothing is kept; a cause is of a claim that no kept result makes.
    """
    records = []
    for folder in sorted((root / "data").glob("*/")):
        if (folder / "arms.csv").exists():  # the last file
            records.append(_read(folder))
        else:
            log.warning(
                "%s is not whole, as a command that was killed leaves it: left out; keep its workdir again", folder
            )
    if not records:
        raise UserError(f"{root / 'data'} holds no results: name workdirs to take them from")
    causes = json.loads(path.read_text()) if (path := root / "data" / "causes.json").exists() else {}
    if unknown := sorted(set(causes) - {claim["id"] for result in records for claim in result["claims"]}):
        raise UserError(f"{path}: no claim of the kept results has the id {unknown[0]!r}")
    contradictions = json.loads(path.read_text()) if (path := root / "data" / "contradictions.json").exists() else {}
    written: list[pathlib.Path] = []
    first_pages: dict[str, str] = {}
    for prefix, (name, heading) in SOURCES.items():
        sections = [
            result | {"claims": [claim for claim in result["claims"] if _source(claim) == prefix]} for result in records
        ]
        sections = [
            part
            for result, part in zip(records, sections, strict=True)
            if part["claims"] or (not result["claims"] and _home(result, records) == prefix)
        ]
        if sections:
            lines = [f"# {heading}", "", "Made by `routed report --docs=DIR` from `data/`; not edited by hand.", ""]
            lines += ["| results | question | claims |", "|---|---|---|"]
            lines += [*(_contents(part, causes) for part in sections), "", *_elsewhere(sections, records, prefix)]
            lines += _against(sections, causes) if prefix != OTHERS else []
            lines += _inside(contradictions.get(prefix, []))
            for part in sections:
                lines += _section(part, causes, first_pages.setdefault(part["name"], name), name)
            files.write(root / f"{name}.md", "\n".join(lines))
            written.append(root / f"{name}.md")
    return written


def _source(claim: dict[str, Any]) -> str:
    prefix = claim["id"].partition(".")[0]
    return prefix if prefix in SOURCES else OTHERS


def _home(section: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Returns the source of the first claim that another result of the same experiment has."""
    claims = (claim for result in records if _experiment(result) == _experiment(section) for claim in result["claims"])
    return next((_source(claim) for claim in claims if _source(claim) != OTHERS), OTHERS)


def _experiment(result: dict[str, Any]) -> list[str]:
    return re.findall(r"--config=([^\s:]+)", result["about"]["command"])[:1]


def _elsewhere(sections: list[dict[str, Any]], records: list[dict[str, Any]], prefix: str) -> list[str]:
    """Returns links to our own questions about the experiments of a paper."""
    experiments = [_experiment(part) for part in sections]
    names = [
        result["name"]
        for result in records
        if _experiment(result) in experiments and any(_source(c) == OTHERS for c in result["claims"])
    ]
    if prefix == OTHERS or not names:
        return []
    page = SOURCES[OTHERS][0]
    return [
        "What the same experiments ask beyond the paper: "
        + ", ".join(f"[{result}]({page}.md#{result})" for result in names)
        + ".",
        "",
    ]


def lightened(svg: str) -> str:
    """Returns a figure as small as a repository likes: coordinates to a tenth of a pixel."""
    return re.sub(r"(\d\.\d)\d+(?=[,)LMAVHZ ])", r"\1", svg)


def _contents(one: dict[str, Any], causes: dict[str, str]) -> str:
    """Returns the line of a section in the table of contents: link, question, and claims by verdict."""
    counts = Counter(claim["verdict"] for claim in one["claims"])
    doubted = Counter(c["verdict"] for c in one["claims"] if c["verdict"] not in AGAINST and c["id"] in causes)
    words = {verdict: f" ({count} of them still open, see there)" for verdict, count in doubted.items()}
    summary = ", ".join(f"{counts[verdict]} {verdict}{words.get(verdict, '')}" for verdict in in_order(counts))
    summary = summary or "figures and tables"
    return _row((f"[{one['name']}](#{one['name']})", _asked(one["about"]), summary))


def _asked(about: dict[str, Any]) -> str:
    """Returns the line of a result's figure, or the question of an experiment's first figure."""
    return about.get("line") or about["question"]


def _inside(contradictions: list[str]) -> list[str]:
    """Returns the places where a paper contradicts itself."""
    return (
        [
            "**Where the paper contradicts itself**, by its own numbers:",
            "",
            *(f"- {sentence}" for sentence in contradictions),
            "",
        ]
        if contradictions
        else []
    )


def _against(parts: list[dict[str, Any]], causes: dict[str, str]) -> list[str]:
    """Returns the table of failed claims with their causes, without duplicates."""
    rows: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for part in parts:
        for claim in part["claims"]:
            if claim["verdict"] in AGAINST and claim["paper"] != NOT_ASKED:
                rows.setdefault((claim["id"], claim["text"]), (part["name"], claim))
    if not rows:
        return []
    head = "**What does not hold here**, the opposite of an order or a number that is not reproduced:"
    lines = [
        _row((f"[{name}](#{name})", claim["statement"], _paper(claim), claim["text"], causes.get(claim["id"], "")))
        for name, claim in rows.values()
    ]
    return [head, "", "| results | claim | paper | ours | why |", "|---|---|---|---|---|", *lines, ""]


def _paper(claim: dict[str, Any]) -> str:
    return f"{claim['paper']:.4g}" if isinstance(claim["paper"], float) else claim["paper"]


def _section(result: dict[str, Any], causes: dict[str, str], first_page: str, page: str) -> list[str]:
    """Returns an experiment on a page: its claims of that source, and on its first page also its gap, arms and
    figures.
    """
    about = result["about"]
    lines = [f"## {result['name']}", "", about["question"], ""]
    lines += [about["line"], ""] if about.get("line") else []
    if first_page == page:
        lines += [
            f"    {about['command']}",
            "",
            f"{_minutes(about['seconds'])} on {about['machine']}, {about['devices']} devices; commit"
            f" {about['commit']}.",
            "",
        ]
    else:
        lines += [f"Arms, figures and the command: [{first_page}]({first_page}.md#{result['name']}).", ""]
    lines += ["| claim | paper | ours | verdict |", "|---|---|---|---|"] if result["claims"] else []
    for claim in result["claims"]:
        ours = f"{claim['text'] or 'no rows'} (n = {claim['n']})"
        why = "; ".join(filter(None, (claim["reason"], causes.get(claim["id"]))))
        plain = claim["paper"] == NOT_ASKED or claim["verdict"] == "not comparable"  # which says why
        setting = "" if plain else SETTINGS.get(claim["comparability"], "")
        cells = (
            f"`{claim['id']}` {claim['statement']}",
            _paper(claim),
            ours,
            f"**{claim['verdict']}**{setting}" + (f": {why}" if why else ""),
        )
        lines.append(_row(cells))
    if first_page == page:
        lines += ["", *_gap(about), *_arms(result["arms"]), "", *_experts(about)]
        for figure in about["figures"]:
            path = f"data/{result['name']}/figures/{figure['name']}"
            dark = f'<source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">'
            lines += [
                f'<picture>{dark}<img src="{path}.svg" alt="{figure["name"]}"></picture>',
                "",
                figure["caption"],
                "",
            ]
    return [*lines, ""]


def _row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _experts(about: dict[str, Any]) -> list[str]:
    """Returns the experts of each arm for a training token, where arms differ."""
    if not (counts := about.get("experts")):
        return []
    parts = (f"{arm} {least:g}" + (f" to {most:g}" if most > least else "") for arm, (least, most) in counts.items())
    return [f"Experts computed per training token: {', '.join(parts)}.", ""]


def _gap(about: dict[str, Any]) -> list[str]:
    """Returns the parts of the gap as a table."""
    if not about["gap"]:
        return []
    lines = [
        f"The gap decomposed, at {about['gap_at']} (logs of ratios of loss, 95 % intervals):",
        "",
        "| part | log ratio | share |",
        "|---|---|---|",
    ]
    for part in about["gap"]:
        lines.append(_row((part["part"], _ratio(part), _share(part))))
    return [*lines, "", *_shares(about)]


def _shares(about: dict[str, Any]) -> list[str]:
    """Returns the parts of the gap as means over every order in which they can be removed, for both evaluations."""
    if not about.get("shares") or about["shares"][0]["orders"] < 2:  # one order is the table above
        return []
    lines = [
        f"Its parts as means over the {about['shares'][0]['orders']} orders in which they can go (learning comes"
        " last in each):",
        "",
        "| evaluation | part | log ratio | share |",
        "|---|---|---|---|",
    ]
    for part in about["shares"]:
        lines.append(_row((part["evaluation"], part["part"], _ratio(part), _share(part))))
    return [*lines, ""]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _ratio(part: dict[str, Any]) -> str:
    return f"{part['mean']:+.3f} [{_number(part['low']):+.3f}, {_number(part['high']):+.3f}]"


def _share(part: dict[str, Any]) -> str:
    return "" if part["share"] is None else shown_share(part | {"share_low": _number(part["share_low"])})


def _arms(rows: list[list[str]]) -> list[str]:
    """Returns the loss by arm: a line for each point, or for each arm of the only point."""
    head, *lines = rows
    table = [("arm", "loss"), *zip(head, lines[0], strict=True)] if len(lines) == 1 else rows
    shown = [_row(table[0]), "|---" * len(table[0]) + "|", *map(_row, table[1:])]
    if len(lines) <= FEW:
        return shown
    return [f"<details><summary>Loss by arm at each of {len(lines)} points</summary>", "", *shown, "", "</details>"]


def _read(folder: pathlib.Path) -> dict[str, Any]:
    with (folder / "arms.csv").open(newline="") as file:
        arms = list(csv.reader(file))
    about, claims = (json.loads((folder / f"{name}.json").read_text()) for name in ("about", "claims"))
    return {"name": folder.name, "about": about, "claims": claims, "arms": arms}


def _seconds(workdir: pathlib.Path) -> float:
    with (workdir / "timing.csv").open(newline="") as file:
        return sum(float(row["compile_s"]) + float(row["run_s"]) for row in csv.DictReader(file))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
