"""The result pages of docs/: a page for each paper and one for our own questions, made from small committed tables.

They are made of all that `committed.keep` took from workdirs. Why a number differs is written by hand, once, in
DIR/data/causes.json: claim id -> sentence; and where a paper contradicts itself in DIR/data/contradictions.json: source
-> sentences.
"""

from __future__ import annotations

import csv
import io
import math
import pathlib
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from absl import logging as log

from routed.analysis import answer, versions
from routed.analysis.answer import counted
from routed.analysis.wording import render
from routed.contracts import UserError
from routed.publish import committed, coverage, per_seed
from routed.system import files, stored

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
OUR_QUESTIONS = "routed"
#: Verdicts that speak against a paper.
AGAINST = ("opposite", "not reproduced", "exact opposite")
#: Points whose losses stand open on a page; more are folded.
FEW = 12


def write_pages(root: pathlib.Path) -> list[pathlib.Path]:
    """Writes the pages, and the marks in a README beside them."""
    texts = pages(root)
    for path, text in texts.items():
        files.write(path, text)
    return [*texts]


def pages(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Returns the page of every source with a kept claim, and the README with its marks and the table of papers.

    Results without a claim go to the page of their experiment.

    Raises:
      UserError: nothing is kept; a cause is of a claim that no kept result makes.
    """
    records = []
    for folder in sorted((root / "data").glob("*/")):
        if (folder / committed.LAST).exists():
            records.append(_read(folder))
        else:
            log.warning(
                "%s is not whole, as a command that was killed leaves it: left out; keep its workdir again", folder
            )
    if not records:
        raise UserError(f"{root / 'data'} holds no results: name workdirs to take them from")
    causes = _notes(root / "data" / "causes.json", {str: str})
    contradictions = _notes(root / "data" / "contradictions.json", {str: [str]})
    if unknown := sorted(set(causes) - {claim["id"] for result in records for claim in result["claims"]}):
        raise UserError(f"{root / 'data' / 'causes.json'}: no claim of the kept results has the id {unknown[0]!r}")
    texts: dict[pathlib.Path, str] = {}
    for prefix, (page, heading) in SOURCES.items():
        sections = []
        for result in records:
            claims = [claim for claim in result["claims"] if _source(claim) == prefix]
            if claims or (not result["claims"] and _home(result, records) == prefix):
                result.setdefault("page", page)  # the first page of a result has its arms and figures
                explained = (claim["verdict"] for claim in claims if claim["id"] in causes)
                doubted = Counter(verdict for verdict in explained if verdict not in AGAINST)
                sections.append(result | {"claims": claims, "counts": counted(claims), "doubted": doubted})
        if sections:
            text = render(
                "publish/published.md.j2",
                page=page,
                heading=heading,
                sections=sections,
                beyond=[] if prefix == OUR_QUESTIONS else _beyond(sections, records),
                failed=[] if prefix == OUR_QUESTIONS else _failed(sections),
                causes=causes,
                contradictions=contradictions.get(prefix, []),
                rules=versions.RULES,
                changes=versions.CHANGES,
            )
            texts[root / f"{page}.md"] = text.removesuffix("\n")
    if (readme := root / "README.md").exists():
        papers = {prefix: f"[{heading.partition(')')[0]})]({page}.md)" for prefix, (page, heading) in SOURCES.items()}
        del papers[OUR_QUESTIONS]
        text = coverage.filled(root, [claim for result in records for claim in result["claims"]], papers)
        texts[readme] = marked(text, {result["name"] for result in records if result["stale"]})
    return texts


def marked(text: str, stale: Collection[str]) -> str:
    """Returns a text with a mark behind each link to a result that was judged by earlier rules, and behind no other."""
    link = re.compile(r"(\]\((?:[\w/]+\.md)?#([\w-]+)\))†?")
    return link.sub(lambda match: match[1] + ("†" if match[2] in stale else ""), text)


def _source(claim: dict[str, Any]) -> str:
    prefix = claim["id"].partition(".")[0]
    return prefix if prefix in SOURCES else OUR_QUESTIONS


def _home(section: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Returns the source of the first claim that another result of the same experiment has."""
    claims = (claim for result in records if _experiment(result) == _experiment(section) for claim in result["claims"])
    return next((_source(claim) for claim in claims if _source(claim) != OUR_QUESTIONS), OUR_QUESTIONS)


def _experiment(result: dict[str, Any]) -> list[str]:
    return re.findall(r"--config=([^\s:]+)", result["about"]["command"])[:1]


def _beyond(sections: list[dict[str, Any]], records: list[dict[str, Any]]) -> list[str]:
    """Returns the results with questions of ours about the experiments of a paper."""
    experiments = [_experiment(part) for part in sections]
    asking = [result for result in records if any(_source(claim) == OUR_QUESTIONS for claim in result["claims"])]
    return [result["name"] for result in asking if _experiment(result) in experiments]


def _failed(sections: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the claims of a paper that failed, each once, with the result that says so first."""
    failed: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
    for part in sections:
        for claim in part["claims"]:
            if claim["verdict"] in AGAINST and claim["paper"] != "not asked":  # of a paper, not ours
                failed.setdefault((claim["id"], claim["text"]), (part, claim))
    return [*failed.values()]


def _read(folder: pathlib.Path) -> dict[str, Any]:
    """Returns a kept result; the arms of a single point are a line each."""
    head, *lines = _escaped(read_arms(folder))
    about = _escaped(stored.read(folder / "about.json", committed.ABOUT, committed.RESTORE))
    claims = _escaped(answer.read(folder))
    for part in (*about["gap"], *about.get("shares", ())):
        part |= {key: math.nan for key, value in part.items() if value is None}
    arms = [("arm", "loss"), *zip(head, lines[0], strict=True)] if len(lines) == 1 else [head, *lines]
    facts = {"per_seed": (folder / per_seed.TABLE).exists(), "stale": about["rules"] != versions.RULES}
    facts |= {"name": _escaped(folder.name), "folded": len(lines) > FEW}
    return facts | {"about": about, "claims": claims, "arms": arms}


def read_arms(folder: pathlib.Path) -> list[list[str]]:
    """Returns the lines of arms.csv, the head first.

    Raises:
      UserError: the file is damaged, or cut.
    """
    with stored.fitting(str(folder / committed.LAST), committed.RESTORE):
        text = (folder / committed.LAST).read_bytes().decode("utf-8")
        lines = [*csv.reader(io.StringIO(text))]
        if not text.endswith("\n") or len(lines) < 2 or len({*map(len, lines)}) > 1:
            raise ValueError("it is cut")
    return lines


def _escaped(value: Any) -> Any:
    """Returns JSON whose texts stay texts in Markdown: one line without tags, links and signs for a terminal."""
    if isinstance(value, dict):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    if not isinstance(value, str):
        return value
    text = files.shown(" ".join(value.splitlines()))
    text = re.sub(r"<(?=[A-Za-z/!?]|$)", "&lt;", text).replace("](", "]\\(")
    return re.sub(r"^(\s*\[[^]]*\]):", r"\1\\:", text)


def _notes(path: pathlib.Path, form: stored.Form) -> Any:
    return _escaped(stored.read(path, form, "restore it, or remove it")) if path.exists() else {}
