"""The reference: scores of the routers of `routed`, in a small file that `routed suite --reference` writes."""

from __future__ import annotations

import importlib.resources
import json
import pathlib
from typing import Any

from routed.analysis.statistics import Estimate, welch
from routed.suite import probes
from routed.suite.run import identity
from routed.system import files, stored

#: The file that comes with the package.
FILE = pathlib.Path(str(importlib.resources.files("routed") / "suite" / "reference.json"))

#: The keys of a card that the reference stores.
STORED = ("router", "seeds", "probes", "cost", "versions", "commit", "machine")


def read(file: pathlib.Path = FILE) -> dict[str, Any]:
    """Reads the reference: `suite`, and `routers` name -> card; without routers if there is no file.

    Raises:
      UserError: a damaged file.
    """
    if not file.exists():
        return {"suite": identity(False), "routers": {}}
    form = {"suite": {"digest": object, "version": object}, "routers": {str: object}}
    return stored.read(file, form, "restore it, or remove it and run routed suite --reference")


def add(card: dict[str, Any], file: pathlib.Path = FILE) -> None:
    """Adds a card to the reference, and removes cards of other versions of the suite."""
    content = read(file)
    routers = content["routers"] if content["suite"] == card["suite"] else {}
    routers = routers | {card["router"]["name"]: {key: card[key] for key in STORED}}
    body = ",\n".join(f" {json.dumps(name)}: {json.dumps(router)}" for name, router in sorted(routers.items()))
    files.write(file, f'{{"suite": {json.dumps(card["suite"])},\n"routers": {{\n{body}\n}}}}\n')


def comparable(card: dict[str, Any], stored: dict[str, Any]) -> str:
    """The reason why a card is not comparable with the reference; empty if it is."""
    if card["suite"]["quick"]:
        return (
            "A quick card has fewer probes, seeds and steps, and no tuning: its scores are not comparable with others."
        )
    if card["suite"] != stored["suite"]:
        versions = [f"version {suite['version']} ({suite['digest']})" for suite in (card["suite"], stored["suite"])]
        return f"This card is of suite {versions[0]}, the reference of {versions[1]}: they are not compared."
    if not stored["routers"]:
        return "There are no reference scores of this version of the suite."
    return ""


def against(card: dict[str, Any], second: dict[str, Any]) -> dict[str, Estimate]:
    """This card's scores minus those of another card with other seeds, by probe: 95 % intervals of Welch (1947).

    Without the cost, which has no spread.
    """
    differences = {}
    for probe in probes.chosen(card["suite"]["quick"]):
        if probe.name == "cost" or probe.name not in second["probes"]:
            continue
        scores = second["probes"][probe.name]["seeds"]
        if not scores or not card["probes"][probe.name]["seeds"]:  # it does not apply to one of them
            continue
        mean = sum(scores) / len(scores)
        variance = sum((value - mean) ** 2 for value in scores) / (len(scores) - 1)
        differences[probe.name] = welch(card["probes"][probe.name]["seeds"], mean, variance**0.5, len(scores))
    return differences
