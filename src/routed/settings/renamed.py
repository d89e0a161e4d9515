"""Settings and columns that were renamed before 1.0: old results are read by the new names, old keys are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

#: Old setting -> new setting; those of `selection` also stand in `selection.eval`.
SETTINGS = {
    "held": "shared_streams",
    "data.share": "data.irrelevant_fraction",
    "data.whole": "data.full_batch",
    "data.shift": "data.swap_step",
    "data.confusing": "data.confusing_patches",
    "data.sets": "data.pattern_sets",
    "data.spurious": "data.spurious_fraction",
    "data.side": "data.image_side",
    "experts.largest": "experts.top_responses",
    "router.anew": "router.resample",
    "router.choices": "router.experts_per_id",
    "router.digit": "router.label_digit",
    "router.distil": "router.distillation_coefficient",
    "router.entropy": "router.initial_entropy",
    "router.even": "router.balance_coefficient",
    "router.from_data": "router.init_from_data",
    "router.kinds": "router.decisive_labels",
    "router.measure": "router.score",
    "router.rows": "router.init_rows",
    "selection.distil": "selection.distillation_coefficient",
    "selection.distil_detached": "selection.distillation_detached",
    "selection.distil_mean": "selection.distillation_mean",
    "selection.distil_side": "selection.distillation_softmax",
    "selection.distil_target": "selection.distillation_target",
    "selection.distil_trunk": "selection.distillation_trunk",
    "selection.forward": "selection.output_of_winners",
    "selection.gate": "selection.patch_weights",
    "selection.share": "selection.competition_rate",
    "stop.after": "stop.min_steps",
}
#: Old column -> new column; a column of one layer has the layer's name behind it.
COLUMNS = {
    "router/rows_hit": "router/init_clusters_covered",
    "train/experts": "train/experts_per_token",
    "router/covered": "router/clusters_with_specialists",
    "router/all_covered": "router/all_clusters_with_specialists",
    "router/entropy_asked": "router/entropy_target",
    "router/moved": "router/params_changed",
    "theory/settled": "theory/converged",
}
#: Old entry of a phase -> new entry.
PHASE_ENTRIES = {"share": "fraction"}
_EVAL = {
    old.replace(".", ".eval.", 1): new.replace(".", ".eval.", 1) for old, new in SETTINGS.items() if "selection." in old
}
_NEW = SETTINGS | _EVAL | COLUMNS
_OLD = {new: old for old, new in _NEW.items()}


def new_name(name: str) -> str:
    """Returns the new name of a setting or a column; every other name stays."""
    if name in _NEW or name.count("/") < 2:
        return _NEW.get(name, name)
    column, _, layer = name.rpartition("/")
    return f"{COLUMNS.get(column, column)}/{layer}"


def old_name(setting: str) -> str:
    """Returns the name that a setting had first: run keys and digests are made of it, so that they stay."""
    return _OLD.get(setting, setting)


def with_old_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by their first names, also in the texts of phases."""
    return _translated(values, old_name, {new: old for old, new in PHASE_ENTRIES.items()})


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by their new names, also in the texts of phases."""
    return _translated(values, new_name, PHASE_ENTRIES)


def _translated(values: Mapping[str, Any], name_of: Callable[[str], str], entries: Mapping[str, str]) -> dict[str, Any]:
    def phase(text: str) -> str:
        return re.sub(r"(?<!\S)[^\s=]+(?==)", lambda match: entries.get(match[0]) or name_of(match[0]), text)

    return {
        name_of(name): type(value)(map(phase, value)) if name == "phases" and isinstance(value, list | tuple) else value
        for name, value in values.items()
    }


def renamed(name: str) -> str:
    """Returns a hint for an old name; empty for every other name."""
    return f": the new name is {new_name(name)!r}" if new_name(name) != name else ""


def renamed_attributes(message: str) -> str:
    """Returns a hint for an error that quotes the last part of an old setting; empty for every other error."""
    quoted = re.findall(r"['\"](\w+)['\"]", message)
    hints = [f"{old} has the new name {new}" for old, new in SETTINGS.items() if old.rpartition(".")[2] in quoted]
    return f"; {', '.join(hints)}" if hints else ""
