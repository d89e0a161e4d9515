"""The scores of the routers that come with `routed`, which a card is drawn beside: a small file, made by `routed suite --reference`."""

from __future__ import annotations

import importlib.resources
import json
import pathlib
from typing import Any

from routed.analysis.statistics import Estimate, welch
from routed.contracts import UserError
from routed.suite import probes
from routed.suite.run import identity
from routed.system import files

#: The file that comes with the package.
FILE = pathlib.Path(str(importlib.resources.files("routed") / "suite" / "reference.json"))

#: What of a card the reference keeps.
KEPT = ("router", "seeds", "probes", "cost", "versions", "commit", "machine")


def read(file: pathlib.Path = FILE) -> dict[str, Any]:
    """The reference: `suite`, and `routers` name -> card; of no routers where there is no file.

    Raises:
      UserError: a damaged file.
    """
    if not file.exists():
        return {"suite": identity(False), "routers": {}}
    try:
        found = json.loads(file.read_text("utf-8"))
        _ = found["suite"]["digest"], found["suite"]["version"], found["routers"].items()
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{file} is damaged: restore it, or remove it and run routed suite --reference") from None
    return found


def add(card: dict[str, Any], file: pathlib.Path = FILE) -> None:
    """Puts a card into the reference; those of another version of the suite go, as nothing may be compared with them."""
    known = read(file)
    routers = known["routers"] if known["suite"] == card["suite"] else {}
    routers = routers | {card["router"]["name"]: {key: card[key] for key in KEPT}}
    body = ",\n".join(f" {json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(routers.items()))
    files.write(file, f'{{"suite": {json.dumps(card["suite"])},\n"routers": {{\n{body}\n}}}}\n')


def comparable(card: dict[str, Any], known: dict[str, Any]) -> str:
    """Why a card may not be compared with the reference; empty if it may."""
    if card["suite"]["quick"]:
        return "A quick card has fewer probes, seeds and steps, and no tuning: its scores are not comparable with any others."
    if card["suite"] != known["suite"]:
        here, there = (f"version {one['version']} ({one['digest']})" for one in (card["suite"], known["suite"]))
        return f"This card is of suite {here}, the reference of {there}: they are not compared."
    if not known["routers"]:
        return "There are no reference scores of this version of the suite."
    return ""


def against(card: dict[str, Any], other: dict[str, Any]) -> dict[str, Estimate]:
    """By probe, this card's score minus another's, whose seeds are others: 95 % interval of Welch (1947). Not of what has no spread."""
    found = {}
    for probe in probes.chosen(card["suite"]["quick"]):
        if probe.name == "cost" or probe.name not in other["probes"]:
            continue
        theirs = other["probes"][probe.name]["seeds"]
        mean = sum(theirs) / len(theirs)
        variance = sum((value - mean) ** 2 for value in theirs) / (len(theirs) - 1)
        found[probe.name] = welch(card["probes"][probe.name]["seeds"], mean, variance**0.5, len(theirs))
    return found
