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
    "dikkala": ("dikkala2023", "Dikkala et al. (2023), On the Benefits of Learning to Route in Mixture-of-Experts Models"),
    "chen": ("chen2022", "Chen et al. (2022), Towards Understanding Mixture of Experts in Deep Learning"),
    "chowdhury": ("chowdhury2023", "Chowdhury et al. (2023), Patch-level Routing in Mixture-of-Experts"),
    "pham": ("pham2024", "Pham et al. (2024), CompeteSMoE"),
    "routed": ("ours", "Our own questions, and what others claimed of them"),
}  # fmt: skip
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
    """Puts what the pages say of a workdir, or of several that belong together, under root/data, in place of what was
    kept under its name.
    """
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
        "question": part["question"], "line": part["line"], "command": part["command"], "seconds": sum(map(_seconds, joined)),
        "machine": described["machine"], "devices": len(described["devices"]), "commit": described["commit"],
        "gap_at": part["gap_at"], "gap": part["gap"], "shares": part["shares"], "experts": experts_of(part["table"]),
        "figures": [{"name": figure["name"], "caption": figure["caption"]} for figure in figures],
    }  # fmt: skip
    files.write(folder / "about.json", verdicts.to_json(about))
    files.write(folder / "claims.json", verdicts.to_json([claim | {"points": []} for claim in part["claims"]]))
    files.write(folder / "arms.csv", part["by_arm"].to_csv(index=False))


def experts_of(summary: pd.DataFrame) -> dict[str, list[float]]:
    """arm -> fewest and most experts that it computes for a training token, over the points; empty where that tells
    no arms apart.
    """
    counts = summary[summary.metric == "train/experts"].groupby("arm", sort=False)["mean"].agg(["min", "max"]).round(3)
    return {} if len(counts.drop_duplicates()) < 2 else {arm: [*ends] for arm, *ends in counts.itertuples()}


def write_pages(root: pathlib.Path) -> list[pathlib.Path]:
    """The page of every source that a kept claim has; results without a claim are on the page of their experiment's
    others, or among our own.

    Raises:
      UserError: nothing is kept; a cause is of a claim that nothing kept makes.
    """
    kept = []
    for folder in sorted((root / "data").glob("*/")):
        if (folder / "arms.csv").exists():  # the last file
            kept.append(_read(folder))
        else:
            log.warning(
                "%s is not whole, as a command that was killed leaves it: left out; keep its workdir again", folder
            )
    if not kept:
        raise UserError(f"{root / 'data'} holds no results: name workdirs to take them from")
    causes = json.loads(path.read_text()) if (path := root / "data" / "causes.json").exists() else {}
    if unknown := sorted(set(causes) - {claim["id"] for one in kept for claim in one["claims"]}):
        raise UserError(f"{path}: no claim of the kept results has the id {unknown[0]!r}")
    slips = json.loads(path.read_text()) if (path := root / "data" / "contradictions.json").exists() else {}
    written: list[pathlib.Path] = []
    told: dict[str, str] = {}
    for prefix, (name, heading) in SOURCES.items():
        mine = [one | {"claims": [claim for claim in one["claims"] if _source(claim) == prefix]} for one in kept]
        mine = [
            part
            for one, part in zip(kept, mine, strict=True)
            if part["claims"] or (not one["claims"] and _home(one, kept) == prefix)
        ]
        if mine:
            lines = [f"# {heading}", "", "Made by `routed report --docs=DIR` from `data/`; not edited by hand.", ""]
            lines += ["| results | question | claims |", "|---|---|---|"]
            lines += [*(_contents(part, causes) for part in mine), "", *_elsewhere(mine, kept, prefix)]
            lines += _against(mine, causes) if prefix != OTHERS else []
            lines += _inside(slips.get(prefix, []))
            for part in mine:
                lines += _section(part, causes, told.setdefault(part["name"], name), name)
            files.write(root / f"{name}.md", "\n".join(lines))
            written.append(root / f"{name}.md")
    return written


def _source(claim: dict[str, Any]) -> str:
    prefix = claim["id"].partition(".")[0]
    return prefix if prefix in SOURCES else OTHERS


def _home(one: dict[str, Any], kept: list[dict[str, Any]]) -> str:
    """The source of the first claim that another result of the same experiment has."""
    claims = (claim for other in kept if _experiment(other) == _experiment(one) for claim in other["claims"])
    return next((_source(claim) for claim in claims if _source(claim) != OTHERS), OTHERS)


def _experiment(one: dict[str, Any]) -> list[str]:
    return re.findall(r"--config=([^\s:]+)", one["about"]["command"])[:1]


def _elsewhere(mine: list[dict[str, Any]], kept: list[dict[str, Any]], prefix: str) -> list[str]:
    """Where the claims stand that the same experiments make beyond the paper's."""
    asked = [_experiment(part) for part in mine]
    ours = [
        one["name"] for one in kept if _experiment(one) in asked and any(_source(c) == OTHERS for c in one["claims"])
    ]
    if prefix == OTHERS or not ours:
        return []
    page = SOURCES[OTHERS][0]
    return [
        "What the same experiments ask beyond the paper: "
        + ", ".join(f"[{one}]({page}.md#{one})" for one in ours)
        + ".",
        "",
    ]


def lightened(svg: str) -> str:
    """Returns a figure as small as a repository likes: coordinates to a tenth of a pixel."""
    return re.sub(r"(\d\.\d)\d+(?=[,)LMAVHZ ])", r"\1", svg)


def _contents(one: dict[str, Any], causes: dict[str, str]) -> str:
    """A line for a section: where it is, what it asks, and how many claims of it have which verdict, and of these
    which are open.
    """
    counts = Counter(claim["verdict"] for claim in one["claims"])
    doubted = Counter(c["verdict"] for c in one["claims"] if c["verdict"] not in AGAINST and c["id"] in causes)
    words = {verdict: f" ({count} of them still open, see there)" for verdict, count in doubted.items()}
    told = ", ".join(f"{counts[verdict]} {verdict}{words.get(verdict, '')}" for verdict in in_order(counts))
    told = told or "figures and tables"
    return _row((f"[{one['name']}](#{one['name']})", _asked(one["about"]), told))


def _asked(about: dict[str, Any]) -> str:
    """What a result is of: its figure's line, or of an experiment's first figure the question."""
    return about.get("line") or about["question"]


def _inside(slips: list[str]) -> list[str]:
    """What a paper says twice and not alike."""
    return (
        ["**Where the paper contradicts itself**, by its own numbers:", "", *(f"- {one}" for one in slips), ""]
        if slips
        else []
    )


def _against(parts: list[dict[str, Any]], causes: dict[str, str]) -> list[str]:
    """What of a paper does not hold here, in one table, with the cause of each; what two results say alike stands
    once.
    """
    found: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for part in parts:
        for claim in part["claims"]:
            if claim["verdict"] in AGAINST and claim["paper"] != NOT_ASKED:
                found.setdefault((claim["id"], claim["text"]), (part["name"], claim))
    if not found:
        return []
    head = "**What does not hold here**, the opposite of an order or a number that is not reproduced:"
    lines = [
        _row((f"[{name}](#{name})", claim["statement"], _paper(claim), claim["text"], causes.get(claim["id"], "")))
        for name, claim in found.values()
    ]
    return [head, "", "| results | claim | paper | ours | why |", "|---|---|---|---|---|", *lines, ""]


def _paper(claim: dict[str, Any]) -> str:
    return f"{claim['paper']:.4g}" if isinstance(claim["paper"], float) else claim["paper"]


def _section(one: dict[str, Any], causes: dict[str, str], told: str, page: str) -> list[str]:
    """An experiment on a page: its claims of that source; on the first of its pages, `told`, also its gap, arms and
    figures.
    """
    about = one["about"]
    lines = [f"## {one['name']}", "", about["question"], ""]
    lines += [about["line"], ""] if about.get("line") else []
    if told == page:
        lines += [
            f"    {about['command']}",
            "",
            f"{_minutes(about['seconds'])} on {about['machine']}, {about['devices']} devices; commit"
            f" {about['commit']}.",
            "",
        ]
    else:
        lines += [f"Arms, figures and the command: [{told}]({told}.md#{one['name']}).", ""]
    lines += ["| claim | paper | ours | verdict |", "|---|---|---|---|"] if one["claims"] else []
    for claim in one["claims"]:
        ours = f"{claim['text'] or 'no rows'} (n = {claim['n']})"
        why = "; ".join(filter(None, (claim["reason"], causes.get(claim["id"]))))
        told = claim["paper"] == NOT_ASKED or claim["verdict"] == "not comparable"  # which says why
        setting = "" if told else SETTINGS.get(claim["comparability"], "")
        cells = (
            f"`{claim['id']}` {claim['statement']}",
            _paper(claim),
            ours,
            f"**{claim['verdict']}**{setting}" + (f": {why}" if why else ""),
        )
        lines.append(_row(cells))
    if told == page:
        lines += ["", *_gap(about), *_arms(one["arms"]), "", *_experts(about)]
        for figure in about["figures"]:
            path = f"data/{one['name']}/figures/{figure['name']}"
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
    """What arms compute for a training token, where they differ; none of what was kept before it was counted."""
    if not (found := about.get("experts")):
        return []
    told = (f"{arm} {least:g}" + (f" to {most:g}" if most > least else "") for arm, (least, most) in found.items())
    return [f"Experts computed per training token: {', '.join(told)}.", ""]


def _gap(about: dict[str, Any]) -> list[str]:
    """The parts of the gap as a table, where there are any."""
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
    """The parts of the gap over every order in which they can go, of both evaluations, where there are several; none
    of what was kept before they were.
    """
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
    """Loss by arm: a line for each point; of the only point, for each arm."""
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
