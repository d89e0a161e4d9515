"""The page of a trace, which opens offline: findings, limits, numbers beside chance and a hash, figures."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from routed.system import files
from routed.trace.analysis import Analysis
from routed.trace.analysis import analyse as analyse_traces
from routed.trace.arrays import Arrays
from routed.trace.counts import BATCH
from routed.trace.figures import draw
from routed.trace.findings import findings, unsaid
from routed.trace.format import Trace, describe, read
from routed.trace.numbers import COLUMNS
from routed.trace.page_parts import page_of
from routed.trace.writing import write

#: Start of a number's name -> the routing that chance is.
CHANCE_IS = {
    "load_max": "independent choices, all experts equally likely",
    "experts_used": "independent choices, all experts equally likely",
    "dead": "independent choices, all experts equally likely",
    "dropped_": "independent choices, all experts equally likely",
    "entropy_token": "equal scores",
    "confidence": "equal scores",
    "margin": "equal scores",
    "table": "the most loaded experts for every token",
    "mi": "codes permuted among sequences, if all of a sequence has one code, else within sequences",
    "given": "labels permuted among sequences that have the id (labels of tokens: among tokens)",
    "pairs": "as many pairs of independent experts with the same loads",
    "next": "the next layer's tokens permuted within sequences",
    "alike": "independent choices with the same loads",
}


def analyse(
    scores: Arrays = None, *, k: int | None = None, out: str | os.PathLike, seed: int = 0, **arrays: Any
) -> dict[str, Any]:
    """Writes a trace of `scores` [layers, T, E] and its page into the folder `out`, and returns the tables.

    All but scores and k is optional: `token_ids`, `sequence`, `labels={"language": [...]}` and other arguments of
    `routed.trace.write`. Returned: `numbers` (a row for each layer and number: value, low, high, chance, hash),
    `maps` label -> assignments [L, C, E], `loads` [L, E], `between` and `equal` [L, L], `churn`, `controls`,
    `findings`.

    Raises:
      UserError: as `routed.trace.write`.
    """
    return report([write(out, scores=scores, k=k, **arrays)], pathlib.Path(out) / "report.html", seed)


def report(traces: Sequence[Trace | str | os.PathLike], out: str | os.PathLike, seed: int = 0) -> dict[str, Any]:
    """Writes the page of a trace, or of a model's checkpoints in order, and numbers.csv; returns as `analyse`."""
    analysis = analyse_traces([trace if isinstance(trace, Trace) else read(trace) for trace in traces], seed)
    path, sentences, between = files.folder(out), findings(analysis), analysis.between
    files.write(path.with_name("numbers.csv"), analysis.table.to_csv(index=False))
    files.write(path, _page(analysis, sentences))
    return {
        "numbers": analysis.table,
        "maps": analysis.maps,
        "loads": analysis.loads,
        "between": None if between is None else between.shares,
        "equal": None if between is None else between.equal,
        "churn": analysis.churn,
        "controls": analysis.controls,
        "findings": sentences,
    }


def _page(analysis: Analysis, sentences: list[str]) -> str:
    trace = analysis.trace
    return page_of(
        "report.html",
        draw(analysis),
        title=f"Routing of {trace.model or trace.folder.resolve().name}",
        source=trace.source,
        trace=trace,
        tokens=analysis.tokens,
        findings=sentences,
        unsaid=unsaid(analysis),
        summary=summarise(analysis.table),
        table=_as_html(analysis.table),
        churn=_as_html(analysis.churn) if len(analysis.churn) else None,
        controls=_controls(analysis) if len(analysis.controls) else None,
        description=describe(trace),
    )


def _controls(analysis: Analysis) -> Markup:
    """Returns the table of medians over layers of other routers on the kept features."""
    middle = analysis.controls.groupby("number", sort=False)[["trained", "shuffled", "initial", "chance"]].median()
    middle.index = pd.Index([label_of(str(name)) for name in middle.index], name="median over layers")
    return Markup(middle.map(_number).reset_index().to_html(index=False, border=0))


def label_of(name: str) -> str:
    """Returns the label of a number."""
    base, _, code = name.partition(".")
    if name.startswith("dropped_"):
        factor = name.removeprefix("dropped_")
        return f"share dropped by queues of {factor} times a fair share, {BATCH:,} tokens a batch"
    labels = {
        "table": f"share of choices that a table by {code} names, filled from the other half of the sequences",
        "mi": f"I(expert; {code}), nats",
        "given": f"I(expert; {code} | token id), nats",
    }
    return labels.get(base) or COLUMNS[base].label.replace("\n", " ")


def summarise(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a row for each number: median over layers, range, chance, hash, and layers above chance."""
    rows = []
    for name, some in table.groupby("number", sort=False):
        judged = some.low.notna() & some.chance.notna()
        low, high = some.value.min(), some.value.max()
        row = {"number": name, "label": label_of(str(name))}
        row |= {column: _number(some[column].median()) for column in ("value", "chance", "hash")}
        row["range"] = f"{_number(low)} to {_number(high)}" if len(some) > 1 else ""
        row["above"] = f"{int((some.low > some.chance).sum())} of {len(some)}" if judged.all() else "–"
        row["chance_is"] = next((text for start, text in CHANCE_IS.items() if str(name).startswith(start)), "")
        rows.append(row)
    return rows


def _number(value: float) -> str:
    return "–" if value != value else "0" if abs(value) < 5e-7 else f"{value:.3g}"


def _as_html(table: pd.DataFrame) -> Markup:
    """Returns a table as HTML, with the interval beside the value."""
    shown = table.copy()
    ends = zip(table.value, table.low, table.high, strict=True)
    shown["value"] = [
        _number(value) + (f" [{_number(low)}, {_number(high)}]" if low == low else "") for value, low, high in ends
    ]
    for name in ("chance", "hash", "alike", "alike_chance", "router_alone"):
        if name in shown:
            shown[name] = [_number(value) for value in np.asarray(shown[name], float)]
    return Markup(shown.drop(columns=["low", "high"]).to_html(index=False, border=0))
