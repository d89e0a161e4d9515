"""Settings of a command against those of its figure: changed ones make a paper's claims the user's own."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from absl import logging as log
from ml_collections import ConfigDict

from routed.engine.rows import plain_value
from routed.plan.config import declared
from routed.plan.experiment import figure_of
from routed.settings.tree import flatten
from routed.system.experiments import packaged

#: What ids of papers' claims begin with.
PAPERS = ("chen", "chowdhury", "dikkala", "fan", "pham")
#: What ids of such claims begin with where something that their figure fixes was changed.
YOURS = "yours."
#: Beginning of settings that are rules of verdicts, and so part of a claim, though they change no run.
RULES = "gate."
#: Settings, and beginnings of settings, that change how surely a claim is judged, and not the claim.
FREE = ("arms", "eval_every", "rates", "seed", "seeds", "shuffles", "tune.")
#: Verdicts of claims about which the runs say nothing.
UNJUDGED = ("not run", "not judged")
#: Those that name files, for a user to fill in where the figure leaves them empty.
FILLED = ("data.table", "initial.")


def changes_of(module: types.ModuleType, config: ConfigDict, table: pd.DataFrame) -> list[str]:
    """Returns KEY=VALUE of settings that the packaged figure has not, or the file of an experiment of the user's.

    A setting of the figure's sweep is changed where it has values that the figure has not.
    """
    path = getattr(module, "__file__", None)
    if path is None or pathlib.Path(path).resolve() not in {file.resolve() for file in packaged().values()}:
        return [f"experiment={pathlib.Path(path).name}"] if path else []
    packaged_config = module.get_config(f"{config.figure},{config.scale}")
    sweep = figure_of(module, packaged_config).sweep(packaged_config)  # a user's settings can move points, too
    usual, settings, changes = flatten(packaged_config), declared(), []
    for key, value in flatten(config).items():
        if key.startswith(FREE) or key not in settings or not (settings[key].identity or key.startswith(RULES)):
            continue
        if key.startswith(FILLED) and usual.get(key) in ("", ()):
            continue
        usual_values = {plain_value(point.get(key, usual.get(key))) for point in sweep} | {plain_value(usual.get(key))}
        values = set(table[key].unique()) if key in table else {plain_value(value)}
        if strange := sorted(values - usual_values, key=str):
            changes.append(f"{key}={','.join(map(str, strange))}")
    return changes


def filed(record: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Returns the record of a paper's claim as one of the user's, where something was changed."""
    if not changes or record["id"].partition(".")[0] not in PAPERS:
        return dict(record)
    where = f"changed: {', '.join(changes)}"
    yours = {**record, "id": YOURS + record["id"], "comparability": where, "paper": "not asked"}
    yours["text"] = record["text"].replace(f", against {record['paper']}", "")
    if "the paper's" in record["reason"]:  # beside which ours are not
        yours["reason"] = ""
    if record["kind"] == "number" and record["verdict"] not in UNJUDGED:  # no other setting reproduces or refutes it
        yours |= {"verdict": "not comparable", "reason": "ours is of other settings"}
    return yours


def warn_of_competence(module: types.ModuleType, config: ConfigDict) -> None:
    """Warns of a figure whose arms will not beat the best constant, or counts, in its steps, so that none is judged.

    An experiment file declares `COMPETENT`: scale -> the fewest steps at which its arms do, and the page that shows it.
    """
    steps, page = getattr(module, "COMPETENT", {}).get(config.scale, (0, ""))
    if config.steps < steps:
        log.warning(
            "%s steps are too few: arms are not known to be competent before %s (docs/results, %s), and claims about"
            " arms that are not stay inconclusive; --config.steps=%d is enough",
            f"{config.steps:,}",
            f"{steps:,}",
            page,
            steps,
        )
