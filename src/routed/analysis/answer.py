"""The answer in words, made from verdicts alone: what claims.json holds is enough."""

from __future__ import annotations

import collections
import json
import pathlib
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from routed.contracts import UserError
from routed.system import files

#: verdict -> how a sentence about it begins. In the order in which they are told.
VERDICTS: dict[str, str] = {
    "opposite": "The opposite holds of",
    "not reproduced": "Not reproduced:",
    "supported": "Supported:",
    "reproduced": "Reproduced:",
    "inconclusive": "Open:",
    "underpowered": "Underpowered:",
    "not comparable": "Beside the paper, not judged:",
    "measured": "Measured, not judged:",
    "not judged": "Not judged:",
    "not run": "Not run:",
}

#: Claims of a verdict that are told in the answer; the others are counted.
TOLD = 4


class Sentence(NamedTuple):
    """One line of the answer: its verdict, how it begins, what it says, and what it rests on."""

    verdict: str
    begins: str
    says: str
    rests: str


def summary(claims: Sequence[Mapping[str, Any]]) -> str:
    """Returns the number of claims by verdict in one sentence."""
    counts = collections.Counter(claim["verdict"] for claim in claims)
    if not claims:
        return "It makes no claims: its figures and tables are the answer."
    if set(counts) <= {"not run", "not judged"}:
        return f"Nothing can be said yet: of {len(claims)} claims none is judged ({_reason(claims)})."
    parts = [f"{counts[verdict]} {verdict}" for verdict in in_order(counts)]
    return f"Of {len(claims)} claim{'s' * (len(claims) > 1)}: {', '.join(parts)}."


def _reason(claims: Sequence[Mapping[str, Any]]) -> str:
    return next((claim["reason"] for claim in claims if claim["reason"]), "nothing of theirs has run")


def answer(claims: Sequence[Mapping[str, Any]]) -> list[Sentence]:
    """Returns judged claims as sentences, those against a claim first; at most `TOLD` of each verdict."""
    sentences = []
    groups = {verdict: [claim for claim in claims if claim["verdict"] == verdict] for verdict in VERDICTS}
    for verdict, some in groups.items():
        if verdict in ("not run", "not judged") or not some:
            continue
        for claim in some[:TOLD]:
            sentences.append(Sentence(verdict, VERDICTS[verdict], f"“{claim['statement']}”", _rests(claim)))
        if left := len(some) - TOLD:
            sentences += [Sentence(verdict, VERDICTS[verdict], f"{left} more, below", "")] if left > 0 else []
    return sentences


def _rests(claim: Mapping[str, Any]) -> str:
    """Returns the numbers behind a verdict, and the reason where it is open."""
    parts = [str(claim["text"]).replace("+-", "±"), f"n = {claim['n']}" if claim["n"] else ""]
    if claim["paper"] not in (None, "", "not asked"):
        paper = f"{claim['paper']:.4g}" if isinstance(claim["paper"], float) else str(claim["paper"])
        parts.append(f"the paper: {paper}".replace("+-", "±"))
    return "; ".join(filter(None, [*parts, claim["reason"]]))


def in_order(counts: Mapping[str, int]) -> list[str]:
    """Returns the verdicts that occur, those against a claim first."""
    return [*(verdict for verdict in VERDICTS if verdict in counts), *sorted(set(counts) - VERDICTS.keys())]


def findings(folders: Sequence[pathlib.Path]) -> str:
    """Returns the answer and every verdict of workdirs for the terminal, from their claims.json.

    Raises:
      UserError: a folder without one.
    """
    texts, width = [], min(shutil.get_terminal_size().columns, 110)
    for folder in folders:
        claims = read(folder)
        lines = [folder.resolve().name, summary(claims)]
        sentences = [
            f"{sentence.begins} {sentence.says}" + (f" ({sentence.rests})" if sentence.rests else "")
            for sentence in answer(claims)
        ]
        lines += [textwrap.fill(text, width, initial_indent="  ", subsequent_indent="    ") for text in sentences]
        lines += ["", *(f"  {claim['verdict'].upper():15} {claim['id']}: {claim['statement']}" for claim in claims)]
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the verdicts of a workdir as its report left them.

    Raises:
      UserError: there are none, or the file is damaged.
    """
    path = folder / "claims.json"
    if not path.is_file():
        raise UserError(
            f"{folder} has no claims.json: name a finished workdir, or write its report with routed report {folder}"
        )
    with files.explained(path):
        try:
            return json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): write it again with routed report {folder}") from None
