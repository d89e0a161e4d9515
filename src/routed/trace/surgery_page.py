"""The page of a surgery, which opens offline: findings, limits, a table and figures of the worth of each router."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from routed.analysis import wording
from routed.analysis.plots import Axis, Chart, Panel, Point, Series
from routed.analysis.plots.frame import COLOURS, SHAPES
from routed.analysis.statistics import Estimate
from routed.system import files
from routed.trace.figures import Drawn, embedded, layer_axis, value_ends
from routed.trace.kinds import CHOICES, EVERY, SHARES, SUBSETS, TRAINED, name_of
from routed.trace.surgery_jobs import ALL, SurgeryResult
from routed.trace.surgery_results import (
    NOISE,
    REGRET_ROUTERS,
    findings,
    kept_share,
    measured,
    nats,
    regret_table,
    table,
    unsaid,
)
from routed.trace.tokens import groups_of

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
        shown[name] = [_digits(value) for value in worth[name]]
    shown["draws"] = ["–" if value != value else str(int(value)) for value in worth.draws]
    content = wording.render(
        "trace/surgery.html",
        figures=embedded(draw(result, worth, regret)),
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
    files.write(folder / "surgery.csv", files.csv_text(worth))
    if len(regret):
        files.write(folder / "regret.csv", files.csv_text(regret))
    files.write(folder / "surgery.html", content)
    return {"worth": worth, "regret": regret, "findings": sentences}


def _digits(value: float) -> str:
    return "–" if value != value else f"{value:.4g}"


def _shown_regret(regret: pd.DataFrame) -> Markup:
    """Returns the table of regret as HTML; empty if nothing was measured."""
    if not len(regret):
        return Markup("")
    shown = regret.astype(object)
    shown["router"] = [REGRET_ROUTERS[name] for name in regret.router]
    for name in shown.columns[2:]:
        shown[name] = [value if isinstance(value, bool | np.bool_) else _digits(value) for value in regret[name]]
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
    rows = worth[(worth.reason == "") & (worth.router != "")]
    everywhere, replaced = rows[rows.place == ALL], rows[~rows.router.isin(SUBSETS)]
    longest = replaced[replaced.repaired.isin([0, result.repair_steps])]
    figures = [
        _kept_experts(everywhere),
        _every_layer(result, longest[longest.place == ALL]),
        _repair_curves(everywhere),
        _single_layers(result, longest[longest.place != ALL]),
        _regrets(regret),
    ]
    return [figure for figure in figures if figure is not None]


def _means(panel: Panel, series: Series, where: Iterable[float], rows: pd.DataFrame, joined: bool = True) -> None:
    """Draws the lost nats of a table's rows with their intervals."""
    estimates = [Estimate(row.lost, row.low, row.high, 0) for row in rows.itertuples()]
    panel.means(series, map(Point, where, estimates, rows.place), joined=joined)


def _end_at_zero(panel: Panel) -> None:
    """Ends the axis of values at the values and at 0, where a line is drawn."""
    panel.rule("y", 0, faint=True)
    panel.y.domain = value_ends([panel], zero=False)
    panel.y.cover(0.0, 0.0)


def _kept_experts(rows: pd.DataFrame) -> Drawn | None:
    """Returns the loss over the share of the experts that stay, by how these were chosen."""
    ticks = {float(np.log2(share)): f"{share:g}" for share in (*SHARES, 100)}
    ends = (min(ticks) - 0.3, max(ticks) + 0.3)
    x = Axis("experts kept in every layer (%)", ends, ticks=ticks, all_labels=True)
    panel = Panel(x, Axis("loss above the model's own\n(nats a token)"), width=320, height=230)
    for number, (choice, (_, meaning, _)) in enumerate(CHOICES.items()):
        series = Series(f"those {meaning}", COLOURS[number], SHAPES[number], dashed=number > 0)
        shares = {name_of(choice, share): share for share in SHARES}
        some = rows[rows.router.isin(shares)]
        _means(panel, series, [float(np.log2(shares[name])) + 0.04 * (number - 1) for name in some.router], some)
    if not panel.rows:
        return None
    panel.means(Series("all experts"), [Point(float(np.log2(100)), Estimate(0.0, np.nan, np.nan, 0))])
    _end_at_zero(panel)
    caption = (
        "Loss above the model's own when the trained routers choose among a share of the experts of every layer, with"
        " 95 % intervals over rows of text; the experts were chosen on other text. Random ones are means of draws."
    )
    return Drawn("how many experts this text needs", Chart([panel]), caption)


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
        _means(panel, series, where, some, joined=False)
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


def _repair_curves(rows: pd.DataFrame) -> Drawn | None:
    """Returns the loss of each replaced router over the steps of its repair."""
    names = [name for name in EVERY if name != TRAINED and name in set(rows[rows.repaired > 0].router)]
    if not names:
        return None
    x, y = Axis("steps of the repair (0: none)"), Axis("loss above that of trained\nrouters (nats a token)")
    panel = Panel(x, y, width=360, height=230)
    for number, name in enumerate(names):
        some = rows[rows.router == name].sort_values("repaired")
        series = Series(EVERY[name].label, COLOURS[number % len(COLOURS)], SHAPES[number % len(SHAPES)])
        _means(panel, series, some.repaired.astype(float), some)
    _end_at_zero(panel)
    longest = float(rows.repaired.max())
    panel.x.domain = (-0.04 * longest, 1.04 * longest)
    panel.x.ticks = {float(step): str(step) for step in sorted(rows.repaired.unique())}
    caption = (
        "Loss above that of the trained routers, after the same steps of repair on other text; means of draws, with"
        " 95 % intervals over rows of text. Every length is a repair of its own."
    )
    return Drawn("what a repair of the routers alone wins back", Chart([panel]), caption)


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
            _means(panel, series, [float(result.layers.index(layer)) for layer in some.place], some)
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


def _regrets(regret: pd.DataFrame) -> Drawn | None:
    """Returns the regret of each router over layers."""
    layers = tuple(dict.fromkeys(regret.layer))
    if not layers:
        return None
    panel = Panel(layer_axis(layers), Axis("regret against the best choice\n(nats a token)"), width=360, height=230)
    shift = 0.1 if len(layers) < 12 else 0.0
    for number, (name, label) in enumerate(REGRET_ROUTERS.items()):
        some = regret[regret.router == name].rename(columns={"regret": "lost", "layer": "place"})
        series = Series(label, COLOURS[number], SHAPES[number], dashed=number > 0)
        _means(panel, series, [layers.index(layer) + shift * (number - 2.5) for layer in some.place], some)
    panel.y.domain = value_ends([panel], zero=True)
    caption = (
        "Loss of a token's next token with the choice of each router in one layer, above that with the best choice that"
        " was tried, with 95 % intervals over groups of rows. No router can reach 0: the best choice knows the next"
        " token."
    )
    return Drawn("regret of one choice", Chart([panel]), caption)
