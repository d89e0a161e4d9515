"""The page of a surgery, which opens offline: findings, limits, a table and figures of the worth of each router."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from routed.analysis.plots import Axis, Chart, Panel, Point, Series
from routed.system import files
from routed.trace.figures import Drawn, layer_axis, value_ends
from routed.trace.kinds import EVERY, TRAINED
from routed.trace.pages import page_of
from routed.trace.regret_results import ROUTERS
from routed.trace.regret_results import table as regret_table
from routed.trace.subsets import SUBSETS
from routed.trace.surgery_figures import estimates_of, kept_experts, regrets, repair_curves
from routed.trace.surgery_jobs import ALL, SurgeryResult
from routed.trace.surgery_results import NOISE, findings, groups_of, kept_share, measured, nats, table, unsaid

#: Looks of routers as they are put in, after repair, and of noise.
PLAIN = Series("as it is put in")
REPAIRED = Series("repaired, against the trained one repaired", "#0072B2", "square")
REFERENCE = Series("noise, as sharp as trained", "#777777", "cross", dashed=True)


def report(result: SurgeryResult, out: str | os.PathLike) -> dict[str, Any]:
    """Writes OUT/surgery.html, OUT/surgery.csv and OUT/regret.csv (if there is regret).

    Returns `worth` and `regret`, the tables of results, and `findings`.
    """
    folder, worth, regret = files.folder(out), table(result), regret_table(result)
    sentences, rows = findings(result, worth, regret), len(next(iter(result.losses.values())))
    shown = worth.astype(object)
    for name in shown.columns[4:-1]:
        shown[name] = ["–" if value != value else f"{value:.4g}" for value in worth[name]]
    shown["draws"] = ["–" if value != value else str(int(value)) for value in worth.draws]
    content = page_of(
        "surgery.html",
        draw(result, worth, regret),
        title=f"What the routers are worth: {result.model or 'a model'}",
        source=result.source,
        result=result,
        rows=rows,
        groups=groups_of(rows),
        findings=sentences,
        unsaid=unsaid(result, worth, regret),
        summary=_summary(worth, result.repair_steps),
        repaired=result.repair_steps,
        table=Markup(shown.to_html(index=False, border=0)),
        regret=_shown_regret(regret),
    )
    files.write(folder / "surgery.csv", worth.to_csv(index=False))
    if len(regret):
        files.write(folder / "regret.csv", regret.to_csv(index=False))
    files.write(folder / "surgery.html", content)
    return {"worth": worth, "regret": regret, "findings": sentences}


def _shown_regret(regret: pd.DataFrame) -> Markup:
    """Returns the table of regret as HTML; empty if nothing was measured."""
    if not len(regret):
        return Markup("")
    shown = regret.astype(object)
    shown["router"] = [ROUTERS[name] for name in regret.router]
    for name in shown.columns[2:]:
        values = [
            value if isinstance(value, bool | np.bool_) else "–" if value != value else f"{value:.4g}"
            for value in regret[name]
        ]
        shown[name] = values
    return Markup(shown.to_html(index=False, border=0))


def _summary(worth: pd.DataFrame, steps: int) -> list[dict[str, Any]]:
    """Returns a row for each replacement that was measured in every layer."""
    rows = []
    for name, replacement in EVERY.items():
        plain = measured(worth, ALL, name)
        repaired = measured(worth, ALL, name, steps) if steps else None
        if plain is not None or repaired is not None:
            row = {"name": name, "label": replacement.label, "description": replacement.description}
            for suffix, entry in (("", plain), ("_repaired", repaired)):
                row[f"lost{suffix}"] = "–" if entry is None else nats(entry)
                row[f"kept{suffix}"] = "–" if entry is None else kept_share(entry)
            rows.append(row | ({"lost": "0"} if name == TRAINED else {}))
    return rows


def draw(result: SurgeryResult, worth: pd.DataFrame, regret: pd.DataFrame) -> list[Drawn]:
    """Returns every figure that the surgery has the numbers for."""
    rows = worth[(worth.reason == "") & (worth.router != "") & ~worth.router.isin(SUBSETS)]
    longest = rows[rows.repaired.isin([0, result.repair_steps])]
    figures = [
        kept_experts(worth),
        _every_layer(result, longest[longest.place == ALL]),
        repair_curves(worth),
        _single_layers(result, longest[longest.place != ALL]),
        regrets(result, regret),
    ]
    return [figure for figure in figures if figure is not None]


def _every_layer(result: SurgeryResult, rows: pd.DataFrame) -> Drawn | None:
    names, steps = [name for name in EVERY if name in set(rows.router)], result.repair_steps
    if not names:
        return None
    ticks = {float(index): EVERY[name].label for index, name in enumerate(names)}
    y = Axis("", (-0.6, len(names) - 0.4), ticks=ticks, reverse=True, all_labels=True)
    x = Axis("loss above the model's own (nats a token)")
    panel = Panel(x, y, horizontal=True, width=360, height=26 * len(names))
    repaired = REPAIRED._replace(label=f"router repaired for {steps} steps, against the trained one repaired")
    for some, series, shift in ((rows[rows.repaired == 0], PLAIN, -0.12), (rows[rows.repaired > 0], repaired, 0.12)):
        where = [names.index(name) + shift * bool(steps) for name in some.router]
        panel.means(series, map(Point, where, estimates_of(some)))
    panel.rule("x", 0, dash=(2, 3))
    panel.x.domain = value_ends([panel], zero=False)
    panel.x.cover(0.0, 0.0)
    caption = (
        "Loss above the model's own with a router of each kind in every layer, with 95 % intervals over rows of text;"
        " dotted: no loss."
    )
    if steps:
        caption += " The repaired trained router is compared with the model as it is."
    return Drawn("all routers replaced", Chart([panel], legend=bool(steps)), caption)


def _single_layers(result: SurgeryResult, rows: pd.DataFrame) -> Drawn | None:
    names = [name for name in EVERY if name not in (TRAINED, NOISE) and name in set(rows.router)]
    if len(result.layers) < 2 or not names:
        return None
    panels = []
    for name in names:
        y, replaced = Axis("loss above the\nmodel's own (nats)"), rows[rows.router == name]
        panel = Panel(layer_axis(result.layers), y, EVERY[name].label, width=210, height=150)
        parts = (rows[rows.router == NOISE], replaced[replaced.repaired == 0], replaced[replaced.repaired > 0])
        for some, series in zip(parts, (REFERENCE, PLAIN, REPAIRED), strict=True):
            where = [float(result.layers.index(layer)) for layer in some.place]
            panel.means(series, map(Point, where, estimates_of(some), some.place), joined=True)
        panel.rule("y", 0, faint=True)
        panels.append(panel)
    ends = value_ends(panels, zero=False)
    for panel in panels:
        panel.y.domain = ends
    caption = (
        "Loss above the model's own with the router of one layer replaced and the others as trained, with 95 %"
        " intervals over rows of text. Grey: noise in its place, the router's worth."
    )
    return Drawn("one router replaced", Chart(panels, columns=min(3, len(panels))), caption)
