"""The page of a surgery, which opens offline: findings, what cannot be said, a table and figures of what each router is worth."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from routed.analysis import page, plots
from routed.analysis.plots import STYLE
from routed.analysis.plots.frame import SHADES, legend
from routed.system import files
from routed.trace.figures import Drawn, name_layers
from routed.trace.replacements import EVERY, TRAINED
from routed.trace.surgery import ALL, Found
from routed.trace.tokens import GROUPS
from routed.trace.worth import IGNORANT, findings, kept, nats, table, unsaid

PLAIN, REPAIRED, REFERENCE = "black", SHADES[0], "#777777"


def report(found: Found, out: str | os.PathLike) -> dict[str, Any]:
    """Writes OUT/surgery.html and OUT/surgery.csv; returns `worth`, the table of `routed.trace.worth.table`, and `findings`."""
    folder, worth = files.folder(out), table(found)
    said, buffer = findings(found, worth), io.StringIO()
    worth.to_csv(buffer, index=False)
    files.write(folder / "surgery.csv", buffer.getvalue())
    files.write(folder / "surgery.html", _page(found, worth, said))
    return {"worth": worth, "findings": said}


def _page(found: Found, worth: pd.DataFrame, said: list[str]) -> str:
    with matplotlib.rc_context(STYLE):
        figures = [drawn._asdict() for drawn in [*_together(found, worth), *_alone(found, worth)]]
    for figure in figures:
        figure["svg"] = Markup(page.unique_ids(plots.svg(figure["figure"]), figure["name"]))
    rows = len(next(iter(found.losses.values())))
    facts = f"{len(found.layers)} routers of {found.experts} experts; {found.tokens:,} tokens in {rows:,} rows."
    if found.source:
        facts += f" Text: {found.source}."
    return page.render(
        "trace/operation.html", title=f"What the routers are worth: {found.model or 'a model'}", facts=facts, findings=said,
        unsaid=unsaid(found, worth), summary=[*_summary(found, worth)], repaired=found.repair_steps, groups=min(GROUPS, rows), figures=figures,
        table=Markup(_shown(worth)),
    )  # fmt: skip


def _summary(found: Found, worth: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """A row a router that stands in every layer."""
    whole = worth[worth.place == ALL].set_index(["router", "repaired"])
    for name, replacement in EVERY.items():
        cells: dict[str, str] = {}
        for repaired, end in ((0, ""), (found.repair_steps, "_repaired")):
            row = whole.loc[(name, repaired)] if (name, repaired) in whole.index else None
            there = row is not None and row.reason == ""
            cells |= {f"lost{end}": nats(row) if there else "–", f"kept{end}": kept(row) if there else "–"}
        if name == TRAINED:
            cells |= {"lost": "0"}
        if any(cell != "–" for cell in cells.values()) and name in set(worth.router):
            first = (inspect.getdoc(replacement.make) or "").partition("\n")[0]
            yield {"name": name, "words": replacement.words, "what": first} | cells


def _shown(worth: pd.DataFrame) -> str:
    shown = worth.astype(object)
    for name in shown.columns[4:-1]:
        shown[name] = ["–" if value != value else f"{value:.4g}" for value in worth[name]]
    shown["draws"] = ["–" if value != value else str(int(value)) for value in worth.draws]
    return shown.to_html(index=False, border=0)


def _measured(worth: pd.DataFrame) -> pd.DataFrame:
    return worth[(worth.reason == "") & (worth.router != "")]


def _together(found: Found, worth: pd.DataFrame) -> Iterator[Drawn]:
    rows = _measured(worth)
    rows = rows[rows.place == ALL]
    names = [name for name in EVERY if name in set(rows.router)][::-1]
    if not names:
        return
    figure = Figure(figsize=(6.4, 0.36 * len(names) + 1.1))
    panel = figure.subplots()
    for repaired, colour, shift in ((0, PLAIN, 0.12), (found.repair_steps, REPAIRED, -0.12)):
        some = rows[rows.repaired == repaired]
        if not len(some) or (repaired == 0 and colour == REPAIRED):
            continue
        places = [names.index(name) + shift * (found.repair_steps > 0) for name in some.router]
        label = (
            f"router repaired for {repaired} steps, against the trained one repaired" if repaired else "as it is put in"
        )
        panel.errorbar(
            some.lost, places, xerr=_bars(some), color=colour, marker="s" if repaired else "o", ms=4, lw=0, elinewidth=1.2, capsize=2, label=label
        )  # fmt: skip
    panel.axvline(0, color=REFERENCE, lw=1, ls=":")
    panel.set_yticks(range(len(names)), [EVERY[name].words for name in names])
    panel.set_ylim(-0.6, len(names) - 0.4)
    panel.set_xlabel("loss above the model's own (nats a token)")
    if found.repair_steps:
        legend(figure, panel)
    yield Drawn(
        "all routers replaced", figure,
        "What the model loses with a router of each kind in every layer, with 95 % intervals over rows of text; dotted: nothing."
        + (" The repaired trained router is compared with the model as it is." if found.repair_steps else ""),
    )  # fmt: skip


def _alone(found: Found, worth: pd.DataFrame) -> Iterator[Drawn]:
    rows = _measured(worth)
    rows = rows[rows.place != ALL]
    names = [name for name in EVERY if name not in (TRAINED, IGNORANT) and name in set(rows.router)]
    if len(found.layers) < 2 or not names:
        return
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.1 * columns, 2.2 * lines + 0.5))
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flat
    for panel, name in zip(panels, names, strict=False):
        for of, repaired, style in (
            (IGNORANT, 0, {"color": REFERENCE, "marker": "x", "ls": ":", "label": "noise, as sharp as trained"}),
            (name, 0, {"color": PLAIN, "marker": "o", "label": "as it is put in"}),
            (
                name,
                found.repair_steps,
                {"color": REPAIRED, "marker": "s", "label": "repaired, against the trained one repaired"},
            ),
        ):
            some = rows[(rows.router == of) & (rows.repaired == repaired)]
            if len(some) and not (of == name and repaired == 0 and style["color"] == REPAIRED):
                places = [found.layers.index(layer) for layer in some.place]
                panel.errorbar(places, some.lost, _bars(some), ms=3, lw=1.2, capsize=2, **style)
        panel.set_title(EVERY[name].words, fontsize=9)
        panel.axhline(0, color=REFERENCE, lw=0.6)
        name_layers(panel, found.layers)
    for panel in list(figure.axes)[len(names) :]:
        panel.set_visible(False)
    for panel in list(figure.axes)[: len(names) : columns]:
        panel.set_ylabel("loss above the\nmodel's own (nats)")
    legend(figure, *figure.axes[: len(names)])
    yield Drawn(
        "one router replaced", figure,
        "What the model loses with the router of one layer replaced, the others as trained, with 95 % intervals over rows of text. Grey: noise"
        " in its place, the router's worth.",
    )  # fmt: skip


def _bars(rows: pd.DataFrame) -> np.ndarray:
    return np.nan_to_num(np.maximum([rows.lost - rows.low, rows.high - rows.lost], 0))
