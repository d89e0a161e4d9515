"""One page of what a trace says, which opens offline: findings, what cannot be said, numbers beside their nulls, figures."""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from routed.analysis import page, plots
from routed.system import files
from routed.trace.analysis import Analysis
from routed.trace.analysis import analyse as analyse_traces
from routed.trace.arrays import Arrays
from routed.trace.counts import QUEUE
from routed.trace.figures import draw
from routed.trace.findings import findings, unsaid
from routed.trace.format import Trace, describe, read
from routed.trace.numbers import COLUMNS
from routed.trace.writing import write

PERMUTED = "the code permuted among sequences where all of a sequence has one, else within sequences"
RANDOM = "independent choices, each expert as likely"
#: What chance is, by number; of codes by the part before the dot.
NULLS = {
    "load_max": RANDOM, "experts_used": RANDOM, "dead": RANDOM, "dropped_1": RANDOM, "dropped_1.25": RANDOM, "dropped_2": RANDOM,
    "entropy_token": "equal scores", "confidence": "equal scores", "margin": "equal scores",
    "table": "the most loaded experts for every token", "mi": PERMUTED,
    "given": "labels permuted among sequences that have the id (of labels of tokens: among tokens)",
    "pairs": "as many pairs of independent experts with the same loads", "next": "the next layer's tokens permuted within sequences",
    "alike": "independent choices with the same loads",
}  # fmt: skip


def analyse(
    scores: Arrays = None, *, k: int | None = None, out: str | os.PathLike, seed: int = 0, **arrays: Any
) -> dict[str, Any]:
    """Writes a trace of `scores` [layers, T, E] and its page into the folder `out`, and returns the tables.

    All but scores and k is optional: `token_ids`, `sequence`, `labels={"language": [...]}` and what else `routed.trace.write` takes.
    Returned: `numbers` (a row a layer and number: value, low, high, chance, hash), `maps` label -> assignments [L, C, E], `loads`
    [L, E], `between` and `equal` [L, L], `churn`, `controls`, `findings`.

    Raises:
      UserError: as `routed.trace.write`.
    """
    return report([write(out, scores=scores, k=k, **arrays)], pathlib.Path(out) / "report.html", seed)


def report(traces: Sequence[Trace | str | os.PathLike], out: str | os.PathLike, seed: int = 0) -> dict[str, Any]:
    """The page of a trace, or of checkpoints of one model in order, at `out`; beside it numbers.csv. Returns the tables of `analyse`."""
    found = analyse_traces([trace if isinstance(trace, Trace) else read(trace) for trace in traces], seed)
    path, said = files.folder(out), findings(found)
    buffer = io.StringIO()
    found.table.to_csv(buffer, index=False)
    files.write(path.with_name("numbers.csv"), buffer.getvalue())
    files.write(path, _page(found, said))
    shares = None if found.between is None else found.between.shares
    return {
        "numbers": found.table, "maps": found.maps, "loads": found.loads, "between": shares, "churn": found.churn,
        "equal": None if found.between is None else found.between.equal, "controls": found.controls, "findings": said,
    }  # fmt: skip


def _page(found: Analysis, said: list[str]) -> str:
    trace, known = found.trace, found.tokens
    figures = [drawn._asdict() for drawn in draw(found)]
    for figure in figures:
        figure["svg"] = Markup(page.unique_ids(plots.svg(figure["figure"]), figure["name"]))
    facts = (
        f"{len(trace.layers)} layers of {trace.experts} experts, {trace.k} of them for a token; {trace.tokens:,} tokens in"
        f" {known.sequences:,} sequences."
    )
    if trace.source:
        facts += f" Text: {trace.source}."
    return page.render(
        "trace/report.html", title=f"Routing of {trace.model or trace.folder.resolve().name}", facts=facts, findings=said,
        unsaid=unsaid(found), summary=summarise(found.table), groups=known.groups, figures=figures,
        table=Markup(_shown(found.table)), churn=Markup(_shown(found.churn)) if len(found.churn) else None,
        controls=Markup(_controls(found)) if len(found.controls) else None, described=describe(trace),
    )  # fmt: skip


def _controls(found: Analysis) -> str:
    """Medians over layers of what other routers do on the features that were kept."""
    middle = found.controls.groupby("number", sort=False)[["trained", "shuffled", "initial", "chance"]].median()
    middle.index = pd.Index([words_of(str(name)) for name in middle.index], name="median over layers")
    return middle.map(_number).reset_index().to_html(index=False, border=0)


def words_of(name: str) -> str:
    """A number in words."""
    base, _, code = name.partition(".")
    if base == "dropped_1" or name.startswith("dropped_"):
        return (
            f"share dropped by queues of {name.removeprefix('dropped_')} times a fair share, {QUEUE:,} tokens a batch"
        )
    column = COLUMNS[base].label.replace("\n", " ")
    return {
        "table": f"share of choices that a table by {code} names, filled from the other half of the sequences",
        "mi": f"I(expert; {code}), nats",
        "given": f"I(expert; {code} | token id), nats",
    }.get(base, column)


def summarise(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A row a number: median over layers, range, chance, hash, and on how many layers the interval lies above chance."""
    rows = []
    for name, some in table.groupby("number", sort=False):
        low, high = some.value.min(), some.value.max()
        judged = some.low.notna() & some.chance.notna()
        rows.append({
            "number": name, "words": words_of(str(name)), "value": _number(some.value.median()),
            "range": f"{_number(low)} to {_number(high)}" if len(some) > 1 else "",
            "chance": _number(some.chance.median()), "hash": _number(some.hash.median()),
            "above": f"{int((some.low > some.chance).sum())} of {len(some)}" if judged.all() else "–",
            "null": NULLS.get(str(name), NULLS.get(str(name).partition(".")[0], "")),
        })  # fmt: skip
    return rows


def _number(value: float) -> str:
    return "–" if value != value else "0" if abs(value) < 5e-7 else f"{value:.3g}"


def _shown(table: pd.DataFrame) -> str:
    shown = table.copy()
    shown["value"] = [
        _number(v) + (f" [{_number(low)}, {_number(high)}]" if low == low else "")
        for v, low, high in zip(table.value, table.low, table.high, strict=True)
    ]
    for name in ("chance", "hash", "alike", "alike_chance", "router_alone"):
        if name in shown:
            shown[name] = [_number(v) for v in np.asarray(shown[name], float)]
    return shown.drop(columns=["low", "high"]).to_html(index=False, border=0)
