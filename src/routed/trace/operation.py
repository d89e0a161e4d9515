"""The page of a surgery, which opens offline: findings, what cannot be said, a table and figures of what each router is worth."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Iterator
from typing import Any

import pandas as pd
from markupsafe import Markup

from routed.analysis import page, plots
from routed.system import files
from routed.trace.replacements import EVERY, TRAINED
from routed.trace.surgery import ALL, Found
from routed.trace.surgery_figures import draw
from routed.trace.tokens import GROUPS
from routed.trace.worth import findings, kept, nats, table, unsaid


def report(found: Found, out: str | os.PathLike) -> dict[str, Any]:
    """Writes OUT/surgery.html and OUT/surgery.csv; returns `worth`, the table of `routed.trace.worth.table`, and `findings`."""
    folder, worth = files.folder(out), table(found)
    said, buffer = findings(found, worth), io.StringIO()
    worth.to_csv(buffer, index=False)
    files.write(folder / "surgery.csv", buffer.getvalue())
    files.write(folder / "surgery.html", _page(found, worth, said))
    return {"worth": worth, "findings": said}


def _page(found: Found, worth: pd.DataFrame, said: list[str]) -> str:
    figures = [drawn._asdict() for drawn in draw(found, worth)]
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
