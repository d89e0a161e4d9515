"""The table of docs/results/README.md: of the statements of each paper, the numbers that hold, fail and stay open.

`coverage.json` beside that README lists the figures and tables of each paper: the kept results of each, or the reason
why it has none. Its `theorems` are beginnings of ids of theorems, its `ours` of claims that a paper does not make.
Its `again` are endings of ids of statements that were judged before, under another protocol.
"""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from routed.analysis.claims.number import UNLIKE
from routed.system import stored

#: Lines of the README between which the table stands.
BEGIN, END = "<!-- begin of coverage: made by routed report -->", "<!-- end of coverage -->"
#: Verdict -> column of the table; the verdicts of identities have a column of their own.
OUTCOMES = {"supported": "hold", "reproduced": "hold", "opposite": "fail", "not reproduced": "fail"}
IDENTITIES = {"exact": "hold", "exact opposite": "fail"}
HEADINGS = (
    "paper",
    "statements of figures and tables",
    "hold",
    "do not hold",
    "could not be judged",
    "on other data, or scaled down: hold, not, open",
    "identities and theorems: hold, not, open",
    "figures and tables that never ran, or have no page",
)


class Tally(NamedTuple):
    """Counts of "hold", "fail", "open": of figures and tables, of those on other data or scaled, and of theorems."""

    figures: Counter[str]
    stand_ins: Counter[str]
    theorems: Counter[str]


def tally(claims: Iterable[Mapping[str, Any]], source: str, listed: Mapping[str, Any]) -> Tally:
    """Returns the counts of a paper's claims; a second page or protocol of a statement does not count."""
    judged: dict[str, Mapping[str, Any]] = {}
    for claim in claims:
        id = claim["id"]
        if (
            id.partition(".")[0] == source
            and not id.startswith(tuple(listed["ours"]))
            and not id.endswith(tuple(listed["again"]))
            and claim["verdict"] not in ("not run", "not judged")
        ):
            judged.setdefault(id, claim)
    counts = Tally(Counter(), Counter(), Counter())
    for id, claim in judged.items():
        verdict = claim["verdict"]
        if verdict in IDENTITIES or id.startswith(tuple(listed["theorems"])):
            counts.theorems[IDENTITIES.get(verdict, OUTCOMES.get(verdict, "open"))] += 1
        else:
            column = counts.stand_ins if claim["comparability"] in UNLIKE else counts.figures
            column[OUTCOMES.get(verdict, "open")] += 1
    return counts


def table(claims: Iterable[Mapping[str, Any]], sources: Mapping[str, str], listed: Mapping[str, Any]) -> str:
    """Returns the table of all papers and the reasons of what has no page; `sources` are their names by prefix."""
    claims, reasons = list(claims), Counter[str]()
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for source, name in sources.items():
        states = {id: state for id, state in listed["ids"].items() if id.partition(".")[0] == source}
        figures, stand_ins, theorems = tally(claims, source, listed)
        missing = [state for state in states.values() if isinstance(state, str)]
        reasons.update(missing)
        cells = [name, figures.total(), figures["hold"], figures["fail"], figures["open"]]
        cells += [", ".join(str(each[key]) for key in ("hold", "fail", "open")) for each in (stand_ins, theorems)]
        lines.append("| " + " | ".join(map(str, [*cells, f"{len(missing)} of {len(states)}"])) + " |")
    return "\n".join([*lines, "", *(f"- {count} without a page: {reason}" for reason, count in reasons.most_common())])


def filled(root: pathlib.Path, claims: Iterable[Mapping[str, Any]], sources: Mapping[str, str]) -> str:
    """Returns root/README.md with the table, where that has a place for it and root has a coverage.json."""
    with stored.fitting(str(root / "README.md"), "restore it"):
        text, listed = (root / "README.md").read_text("utf-8"), root / "coverage.json"
    if not listed.exists() or BEGIN not in text:
        return text
    form = {"ids": {str: object}, "theorems": [str], "ours": [str], "again": [str]}
    content = table(claims, sources, stored.read(listed, form, "restore it"))
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda match: f"{BEGIN}\n\n{content}\n\n{END}", text)
