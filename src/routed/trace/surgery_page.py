"""The page of a surgery, which opens offline: findings, limits, a table and figures of the worth of each router."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pandas as pd
from markupsafe import Markup

from routed.system import files
from routed.trace.page_parts import page_of
from routed.trace.replacements import EVERY, TRAINED
from routed.trace.surgery import ALL, SurgeryResult
from routed.trace.surgery_figures import draw
from routed.trace.surgery_results import findings, groups_of, kept_share, measured, nats, table, unsaid


def report(result: SurgeryResult, out: str | os.PathLike) -> dict[str, Any]:
    """Writes OUT/surgery.html and OUT/surgery.csv; returns `worth`, the table of results, and `findings`."""
    folder, worth = files.folder(out), table(result)
    sentences, rows = findings(result, worth), len(next(iter(result.losses.values())))
    content = page_of(
        "surgery.html",
        draw(result, worth),
        title=f"What the routers are worth: {result.model or 'a model'}",
        source=result.source,
        result=result,
        rows=rows,
        groups=groups_of(rows),
        findings=sentences,
        unsaid=unsaid(result, worth),
        summary=[*_summary(result, worth)],
        repaired=result.repair_steps,
        table=_as_html(worth),
    )
    files.write(folder / "surgery.csv", worth.to_csv(index=False))
    files.write(folder / "surgery.html", content)
    return {"worth": worth, "findings": sentences}


def _summary(result: SurgeryResult, worth: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yields a row for each replacement that was measured in every layer."""
    for name, replacement in EVERY.items():
        plain = measured(worth, ALL, name)
        repaired = measured(worth, ALL, name, result.repair_steps) if result.repair_steps else None
        if plain is not None or repaired is not None:
            yield {
                "name": name,
                "label": replacement.label,
                "description": replacement.description,
                "lost": "0" if name == TRAINED else _cell(nats, plain),
                "kept": _cell(kept_share, plain),
                "lost_repaired": _cell(nats, repaired),
                "kept_repaired": _cell(kept_share, repaired),
            }


def _cell(form, row: Any) -> str:
    return "–" if row is None else form(row)


def _as_html(worth: pd.DataFrame) -> Markup:
    shown = worth.astype(object)
    for name in shown.columns[4:-1]:
        shown[name] = ["–" if value != value else f"{value:.4g}" for value in worth[name]]
    shown["draws"] = ["–" if value != value else str(int(value)) for value in worth.draws]
    return Markup(shown.to_html(index=False, border=0))
