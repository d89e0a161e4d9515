"""What an experiment file offers, and what a config reads, as text: `--list` and `--list=settings`."""

from __future__ import annotations

import types

from ml_collections import ConfigDict

from routed.plan.config import declared, read_keys
from routed.plan.experiment import SCALES, figure_of
from routed.plan.runs import Run
from routed.settings.setting import ANY
from routed.settings.tree import flatten, override


def list_figures(module: types.ModuleType, path: str, config: ConfigDict) -> str:
    """The figures of a file with a line each, its scales, and the arms and points of each figure at the config's scale."""
    document = (module.__doc__ or "").strip().splitlines()
    lines = [f"{path}: {document[0] if document else config.name}", ""]
    width = max(map(len, (*module.FIGURES, "(headline)")))
    for name, figure in module.FIGURES.items():
        shown = module.get_config(f"{name},{config.scale}" if name else config.scale)
        sweep = figure_of(module, shown).sweep(shown)
        arms = dict.fromkeys(arm for point in sweep for arm in point.get("arms", shown.arms))
        lines.append(f"  {name or '(headline)':{width}}  {figure.line}")
        keys = ", ".join(sorted(_swept(sweep)))
        points = f"{len(sweep)} point{'s' * (len(sweep) > 1)}" + (f" of {keys}" if keys else "")
        lines.append(f"  {'':{width}}  {points}; {', '.join(arms)}")
    scales = getattr(module, "SCALES", SCALES)
    lines += ["", f"scales: {', '.join(scales)} (points and arms above: {config.scale})"]
    lines.append(f"run one: routed run --config={path}[:FIGURE[,SCALE]]; settings: --list=settings")
    return "\n".join(lines)


def _swept(sweep) -> set[str]:
    return {key for point in sweep for key in point if key not in ("arms", "seeds")}


def list_settings(config: ConfigDict, runs: list[Run]) -> str:
    """The settings that some run of a plan reads: value, default where it differs, meaning, allowed values, and who reads it."""
    known, flat = declared(), flatten(config)
    readers: dict[str, dict[str, None]] = {}
    for whole in {id(run.config): run for run in runs}.values():
        found, active = read_keys(override(config, _whole(whole, flat)))
        for key in active:
            readers.setdefault(key, {}).update(dict.fromkeys(found[key]))
    lines = [f"{len(readers)} settings that this plan reads (of {len(known)} declared): KEY = VALUE  meaning", ""]
    for key, setting in known.items():
        if key not in readers:
            continue
        value = flat[key]
        default = "" if value == setting.default else f" (default {setting.default!r})"
        allowed = f"; {setting.allowed.words()}" if setting.allowed is not ANY else ""
        varies = "; traced" if setting.traced else ""
        lines.append(f"{key} = {value!r}{default}  {setting.doc}{allowed}{varies}. Read by: {', '.join(readers[key])}")
    return "\n".join(lines)


def _whole(run: Run, flat) -> dict:
    """The settings that a run has, of those that the config knows."""
    return {key: value for key, value in flatten(run.config).items() if key in flat}
