"""Differences from the learned arm, paired by seed: by arm, against a swept key, and by language."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from routed.analysis import statistics
from routed.analysis.plots.frame import KEYS, Data, legend, marker_of
from routed.engine.rows import shown
from routed.plan.arms import ARMS, REFERENCE


def difference(rows: pd.DataFrame, arm: str, metric: str) -> statistics.Estimate:
    """Mean of `metric` of the arm minus the learned one's, paired by seed, with its 95 % t interval."""
    good = rows[rows.status == "ok"]
    if metric not in good:
        return statistics.estimate([])
    table = good.pivot_table(index="seed", columns="arm", values=metric)
    if arm not in table or REFERENCE not in table:
        return statistics.estimate([])
    return statistics.estimate((table[arm] - table[REFERENCE]).dropna())


def paired(spec: dict[str, Any], data: Data) -> Figure | None:
    """What the other arms lose against the learned router: a line an arm and value of `by`, against the swept key `x`.

    Without `x`, one place for each arm.
    """
    arms = [arm for arm in ARMS if arm in set(data.last.arm) - {REFERENCE} and arm in spec.get("arms", ARMS)]
    x, by = spec.get("x"), spec.get("by")
    if not arms or (x and x not in data.swept) or (by and by not in data.swept):
        return None
    rows = data.at_point(data.last, spec | {"y": by})
    figure = Figure(figsize=(5.4, 3.9) if x else (6.2, 0.5 * len(arms) + 1.4))
    panel = figure.subplots()
    label = data.axes[spec["metric"]][0]
    if not x:
        for place, arm in enumerate(arms):
            one = difference(rows, arm, spec["metric"])
            panel.errorbar(
                one.mean, place, xerr=_bars([one]), marker=marker_of(arm), color=ARMS[arm].colour, capsize=3, ls=""
            )
        panel.axvline(0, color="black", lw=0.8)
        panel.set_yticks(range(len(arms)), [ARMS[arm].label for arm in arms])
        panel.set_ylim(len(arms) - 0.5, -0.5)
        panel.set_xlabel(f"{label}:\narm minus learned router, paired")
        return figure
    xs = sorted(rows[x].unique())
    values = sorted(rows[by].unique()) if by else [None]
    spread = 0.05 if len(arms) * len(values) > 1 else 0
    lines = [(arm, value) for arm in arms for value in values]
    for i, (arm, value) in enumerate(lines):
        mine = rows if by is None else rows[rows[by] == value]
        found = [(place, difference(mine[mine[x] == at], arm, spec["metric"])) for place, at in enumerate(xs)]
        found = [(place, one) for place, one in found if np.isfinite(one.mean)]
        if not found:
            continue
        places = np.array([place for place, _ in found]) + spread * (i - (len(lines) - 1) / 2)
        name = ARMS[arm].label + ("" if by is None else f", {spec['words'][value]}")
        panel.errorbar(
            places, [one.mean for _, one in found], _bars([one for _, one in found]), label=name, marker=marker_of(arm),
            color=ARMS[arm].colour if by is None else ("#D55E00", "#0072B2")[values.index(value)], capsize=3, lw=1.2, ms=4,
        )  # fmt: skip
    panel.axhline(0, color="black", lw=0.8)
    panel.set_xticks(range(len(xs)), [shown(at) for at in xs])
    panel.set_xlabel(KEYS.get(x, x))
    panel.set_ylabel(f"{label}:\narm minus learned router, paired")
    legend(figure, panel)
    return figure


def languages(spec: dict[str, Any], data: Data) -> Figure | None:
    """The paired difference of validation loss from the learned arm in each language, the largest first."""
    rows = data.at_point(data.last, spec)
    columns = [name for name in rows if name.startswith("eval/loss/") and rows[name].notna().any()]
    found = {name.rsplit("/", 1)[1]: difference(rows, spec["arm"], name) for name in columns}
    found = dict(sorted(found.items(), key=lambda item: -item[1].mean))
    if not found or not any(np.isfinite(one.mean) for one in found.values()):
        return None
    figure = Figure(figsize=(max(4.0, 0.3 * len(found) + 1.4), 3.4))
    panel = figure.subplots()
    colour = ARMS[spec["arm"]].colour
    panel.errorbar(
        range(len(found)), [one.mean for one in found.values()], _bars(list(found.values())), marker="o", ls="",
        capsize=3, color=colour,
    )  # fmt: skip
    panel.axhline(0, color="black", lw=0.8)
    panel.set_xticks(range(len(found)), list(found))
    panel.set_xlabel("language")
    panel.set_ylabel(f"nats per token: {ARMS[spec['arm']].label}\nminus learned router, paired")
    return figure


def _bars(found: list[statistics.Estimate]) -> np.ndarray:
    return np.nan_to_num([[one.mean - one.low for one in found], [one.high - one.mean for one in found]])
