"""The texts of `--list`, the figures of an experiment file, and `--list=settings`, the settings that a plan reads."""

from __future__ import annotations

import types

from ml_collections import ConfigDict

from routed.plan.config import declared, read_keys
from routed.plan.experiment import SCALES, config_of, figure_of
from routed.plan.run import Run
from routed.settings.setting import ANY
from routed.settings.tree import flatten, override


def list_figures(module: types.ModuleType, path: str, config: ConfigDict) -> str:
    """Lists the figures of a file, with the arms and points of each at the config's scale, and its scales."""
    document = (module.__doc__ or "").strip().splitlines()
    lines = [f"{path}: {document[0] if document else config.name}", ""]
    width = max(map(len, (*module.FIGURES, "(headline)")))
    for name, figure in module.FIGURES.items():
        shown = config_of(module, f"{name},{config.scale}" if name else config.scale)
        sweep = figure_of(module, shown).sweep(shown)
        arms = dict.fromkeys(arm for point in sweep for arm in point.get("arms", shown.arms))
        lines.append(f"  {name or '(headline)':{width}}  {figure.line}")
        keys = ", ".join(sorted({key for point in sweep for key in point if key not in ("arms", "seeds")}))
        points = f"{len(sweep)} point{'s' * (len(sweep) > 1)}" + (f" of {keys}" if keys else "")
        lines.append(f"  {'':{width}}  {points}; {', '.join(arms)}")
    scales = getattr(module, "SCALES", SCALES)
    lines += ["", f"scales: {', '.join(scales)} (above: {config.scale}, the file's own points and arms)"]
    lines.append(f"run: routed run --config={path}[:FIGURE[,SCALE]]; your points: --dry_run; settings: --list=settings")
    return "\n".join(lines)


def list_settings(config: ConfigDict, runs: list[Run]) -> str:
    """Lists the settings that some run reads: value, default where it differs, meaning, allowed values, and readers."""
    settings, flat = declared(), flatten(config)
    readers: dict[str, dict[str, None]] = {}
    for run in {id(run.config): run for run in runs}.values():
        changes = {key: value for key, value in flatten(run.config).items() if key in flat}
        labels, active = read_keys(override(config, changes))
        for key in active:
            readers.setdefault(key, {}).update(dict.fromkeys(labels[key]))
    lines = [f"{len(readers)} settings that this plan reads (of {len(settings)} declared): KEY = VALUE  meaning", ""]
    for key, setting in settings.items():
        if key not in readers:
            continue
        value = flat[key]
        default = "" if value == setting.default else f" (default {setting.default!r})"
        allowed = f"; {setting.allowed.description()}" if setting.allowed is not ANY else ""
        varies = "; traced" if setting.traced else ""
        lines.append(f"{key} = {value!r}{default}  {setting.doc}{allowed}{varies}. Read by: {', '.join(readers[key])}")
    return "\n".join(lines)
