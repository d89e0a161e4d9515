"""The answer in words, made from verdicts alone, and the verdicts of a page as text for the terminal."""

from __future__ import annotations

import collections
import pathlib
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from routed.analysis.arms import AtPoint
from routed.analysis.versions import RULES
from routed.analysis.wording import render
from routed.contracts import UserError
from routed.engine.rows import format_value
from routed.system import stored

#: verdict -> how a sentence about it begins. In the order in which they are told.
VERDICTS: dict[str, str] = {
    "opposite": "The opposite holds of",
    "not reproduced": "Not reproduced:",
    "supported": "Supported:",
    "reproduced": "Reproduced:",
    "exact opposite": "The opposite holds, equally in every seed, of",
    "exact": "Holds equally in every seed (an identity, or runs that no seed changes):",
    "inconclusive": "Open:",
    "underpowered": "Underpowered:",
    "not comparable": "Beside the paper, not judged:",
    "measured": "Measured, not judged:",
    "not judged": "Not judged:",
    "not run": "Not run:",
}

#: verdict -> how it begins in the first sentence of a page, which has three judged claims.
IN_SHORT = {
    "supported": "",
    "exact": "",
    "reproduced": "",
    "opposite": "the opposite of: ",
    "exact opposite": "the opposite of: ",
    "not reproduced": "not reproduced: ",
    "inconclusive": "open: ",
    "underpowered": "open: ",
}

#: Points of the terminal's table of arms, at most, beside the first.
COLUMNS = 3

#: Claims of a verdict that are told in the answer; the others are counted.
MOST_SENTENCES = 4

#: The form of claims.json.
_CLAIM = dict.fromkeys(("id", "verdict", "statement", "text", "reason", "comparability"), str)
CLAIMS: stored.Form = [_CLAIM | {"n": stored.number, "paper": object}]


class Sentence(NamedTuple):
    """One line of the answer: its verdict, how it begins, what it says, and what it rests on."""

    verdict: str
    begins: str
    says: str
    rests: str


def counted(claims: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the number of claims of each verdict, those against a claim first."""
    counts = collections.Counter(claim["verdict"] for claim in claims)
    ordered = [*(verdict for verdict in VERDICTS if verdict in counts), *sorted(counts.keys() - VERDICTS.keys())]
    return {verdict: counts[verdict] for verdict in ordered}


def numbers(counts: Mapping[str, int]) -> str:
    """Returns counts of verdicts as text."""
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def summary(claims: Sequence[Mapping[str, Any]]) -> str:
    """Returns the number of claims by verdict in one sentence."""
    counts = counted(claims)
    if not claims:
        return "It makes no claims: its figures and tables are the answer."
    if counts.keys() <= {"not run", "not judged"}:
        reason = next((claim["reason"] or claim["text"] for claim in claims), "nothing of theirs has run")
        return f"Nothing can be said yet: of {len(claims)} claims none is judged ({reason})."
    return f"Of {len(claims)} claim{'s' * (len(claims) > 1)}: {numbers(counts)}."


def in_short(claims: Sequence[Mapping[str, Any]]) -> str:
    """Returns the first judged claims as one sentence with their effects and seeds, and the counts of all verdicts.

    Open claims come last.
    """
    judged = [claim for claim in claims if claim["verdict"] in IN_SHORT]
    first = sorted(judged, key=lambda claim: IN_SHORT[claim["verdict"]] == "open: ")[:3]
    parts = [f"{IN_SHORT[c['verdict']]}{c['statement']} ({_effect(c['text'])}, n = {c['n']})" for c in first]
    sentence = "; ".join(parts).replace("+-", "±")
    return f"{sentence[0].upper()}{sentence[1:]}. {summary(claims)}" if sentence else summary(claims)


def _effect(text: str) -> str:
    """Returns the first part of a claim's text that has an interval, or the last part."""
    parts = text.split("; ")
    return next((part for part in parts if "[" in part), parts[-1])


def answer(claims: Sequence[Mapping[str, Any]]) -> list[Sentence]:
    """Returns judged claims as sentences, those against a claim first; at most `MOST_SENTENCES` of each verdict."""
    sentences = []
    for verdict, begins in VERDICTS.items():
        some = [claim for claim in claims if claim["verdict"] == verdict]
        if verdict in ("not run", "not judged"):
            continue
        sentences += [
            Sentence(verdict, begins, f"“{claim['statement']}”", _rests(claim)) for claim in some[:MOST_SENTENCES]
        ]
        if len(some) > MOST_SENTENCES:
            sentences.append(Sentence(verdict, begins, f"{len(some) - MOST_SENTENCES} more, below", ""))
    return sentences


def _rests(claim: Mapping[str, Any]) -> str:
    """Returns the numbers behind a verdict, and the reason where it is open."""
    parts = [str(claim["text"]).replace("+-", "±"), f"n = {claim['n']}" if claim["n"] else ""]
    if claim["paper"] not in (None, "", "not asked"):
        paper = f"{claim['paper']:.4g}" if isinstance(claim["paper"], float) else str(claim["paper"])
        parts.append(f"the paper: {paper}".replace("+-", "±"))
    return "; ".join(filter(None, [*parts, claim["reason"]]))


def as_text(part: dict[str, Any]) -> str:
    """Returns the verdicts and the decomposed gap of a workdir as text."""
    text = render(
        "analysis/terminal.j2", part=part, counted=counted, numbers=numbers, point_of=_point_of, arms_of=_arms_of
    )
    return text.removesuffix("\n")


def _arms_of(points: Sequence[AtPoint]) -> str:
    """Returns a table of arms by points: the main metric at about `COLUMNS` points, and that of claims, with a star."""
    if not points:
        return ""
    chosen = {*np.linspace(0, len(points) - 1, min(COLUMNS, len(points))).round().astype(int)}
    shown = [point for number, point in enumerate(points) if point.is_first or number in chosen]
    columns = {}
    for number, point in enumerate(shown):
        cells = {line["arm"]: " ".join(filter(None, line["cells"][0])) for line in point.standings.lines}
        columns[number] = ({"": "*" * point.is_first} if len(shown) > 1 else {}) | point.values | cells
    some = f", {len(shown)} of {len(points)} points" if len(shown) < len(points) else ""
    kind, metric = points[0].standings.means.partition(" ")[0], points[0].standings.headings[0].words
    title = f"{metric}, {kind} means with 95 % intervals{some}{' (*: of the claims)' if len(shown) > 1 else ''}:"
    return f"\n{title}\n{pd.DataFrame(columns).fillna('–').to_string(header=False)}"


def _point_of(claim: dict[str, Any]) -> str:
    """Returns the point of a claim's line among those at which it was tried, as text."""
    at, points = claim["at"], (line["point"] for line in claim["points"] if line["text"] == claim["text"])
    point: dict[str, Any] = next((point for point in points if {**point, **at} == {**at, **point}), {})
    return ", ".join(f"{key} = {format_value(value)}" for key, value in point.items())


def findings(folders: Sequence[pathlib.Path]) -> str:
    """Returns the answer and every verdict of workdirs for the terminal, from their claims.json.

    Raises:
      UserError: a folder without one.
    """
    texts, width = [], min(shutil.get_terminal_size().columns, 110)
    for folder in folders:
        claims = read(folder)
        lines = [folder.resolve().name, summary(claims), *_judged_before(folder)]
        for _, begins, says, rests in answer(claims):
            text = f"{begins} {says}" + (f" ({rests})" if rests else "")
            lines.append(textwrap.fill(text, width, initial_indent="  ", subsequent_indent="    "))
        verdicts = ((claim["verdict"].upper(), f"{claim['id']}: {claim['statement']}") for claim in claims)
        lines += ["", *(f"  {verdict:15} {' '.join(text.split())}" for verdict, text in verdicts)]
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _judged_before(folder: pathlib.Path) -> list[str]:
    """Returns a line on a published result that later rules did not judge; none for others."""
    path = folder / "about.json"
    rules = stored.read(path, {"rules": int}, "restore it")["rules"] if path.exists() else RULES
    return [] if rules == RULES else [f"judged by rules {rules}, and not by those of today ({RULES})"]


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the verdicts of a workdir as its report left them.

    Raises:
      UserError: there are none, or the file is damaged.
    """
    path, mend = folder / "claims.json", f"restore it, or write it again: routed report {folder} [--experiment=FILE]"
    if not path.is_file():
        raise UserError(f"{folder} has no claims.json: name a finished workdir, or {mend}")
    return stored.read(path, CLAIMS, mend, stored.read_table(path, mend))
