"""The page of a trace, which opens offline: findings, limits, numbers beside chance and a hash, figures.

Sentences stand in findings.j2 and unsaid.j2, and their values are made here.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from markupsafe import Markup

from routed.metrics import information
from routed.system import files
from routed.trace.analysis import Analysis
from routed.trace.analysis import analyse as analyse_traces
from routed.trace.arrays import Arrays
from routed.trace.counts import BATCH
from routed.trace.figures import draw
from routed.trace.format import Trace, describe, read
from routed.trace.numbers import COLUMNS
from routed.trace.pages import page_of, paragraphs
from routed.trace.writing import write

#: Share of a number above which a hash of the token id counts as good as the router.
AS_GOOD = 0.8
#: Start of a number's name -> the routing that chance is.
CHANCE_IS = dict.fromkeys(
    ("load_max", "experts_used", "dead", "dropped_"), "independent choices, all experts equally likely"
)
CHANCE_IS |= dict.fromkeys(("entropy_token", "confidence", "margin"), "equal scores")
CHANCE_IS |= {
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
    path, sentences, between, trace = files.folder(out), findings(analysis), analysis.between, analysis.trace
    content = page_of(
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
        controls=_medians(analysis.controls) if len(analysis.controls) else None,
        description=describe(trace),
    )
    files.write(path.with_name("numbers.csv"), analysis.table.to_csv(index=False))
    files.write(path, content)
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


def _medians(controls: pd.DataFrame) -> Markup:
    """Returns the table of medians over layers of other routers on the kept features."""
    middle = controls.groupby("number", sort=False)[["trained", "shuffled", "initial", "chance"]].median()
    middle.index = pd.Index([label_of(str(name)) for name in middle.index], name="median over layers")
    return Markup(middle.map(_number).reset_index().to_html(index=False, border=0))


def label_of(name: str) -> str:
    """Returns the label of a number."""
    base, _, code = name.partition(".")
    if name.startswith("dropped_"):
        return f"share dropped by queues of {name[8:]} times a fair share, {BATCH:,} tokens a batch"
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
        row = {"number": name, "label": label_of(str(name))}
        row |= {column: _number(some[column].median()) for column in ("value", "chance", "hash")}
        row["range"] = f"{_number(some.value.min())} to {_number(some.value.max())}" if len(some) > 1 else ""
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


class Layers(NamedTuple):
    """One number over layers; `above` counts layers whose interval is above chance (None without intervals)."""

    value: pd.Series
    chance: pd.Series
    hash: pd.Series
    above: int | None

    @property
    def beyond(self) -> pd.Series:
        """Values minus chance, at least 0."""
        return (self.value - self.chance).clip(lower=0)

    @property
    def has_hash(self) -> bool:
        """True if a hash of the token id has this number."""
        return bool(self.hash.notna().all())

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.value)


def findings(analysis: Analysis) -> list[str]:
    """Returns sentences on the median over layers, with the range."""
    table, entropy = _layers(analysis, "table.token"), _layers(analysis, "entropy_token")
    shares, chance = analysis.routers or (np.full((2, 2), np.nan), np.zeros(2))
    after = np.diagonal(shares, 1)  # each layer's router and the next one's on the same features
    neighbours = {"value": pd.Series(after), "chance": pd.Series(chance)} if np.isfinite(after).all() else None
    return paragraphs(
        "findings.j2",
        table=table,
        table_gain=table and ((table.value - table.chance) / (1 - table.chance).clip(lower=1e-9)).clip(lower=0),
        load_max=_layers(analysis, "load_max"),
        dead=_layers(analysis, "dead"),
        dropped=_layers(analysis, "dropped_1.25"),
        effective_experts=entropy and np.exp(entropy.value),
        confidence=_layers(analysis, "confidence"),
        position=_layers(analysis, "mi.position"),
        pairs=_layers(analysis, "pairs"),
        next=_layers(analysis, "next"),
        alike=_layers(analysis, "alike"),
        labels=[*_labels(analysis)],
        controls=[*_controls(analysis)],
        experts=analysis.trace.experts,
        neighbours=neighbours,
        churn=[*_churn(analysis)],
    )


def unsaid(analysis: Analysis) -> list[str]:
    """Returns sentences on the questions that this trace cannot answer, with what would answer them."""
    trace = analysis.trace
    return paragraphs(
        "unsaid.j2",
        trace=trace,
        has_positions="position" in analysis.tokens.codes,
        lacks_order=analysis.between is None and len(trace.layers) > 1,
        has_checkpoints=len(analysis.churn) > 0,
        few_tokens=_layers(analysis, "dead") is None,
    )


def _layers(analysis: Analysis, name: str) -> Layers | None:
    rows = analysis.table[analysis.table.number == name]
    if not len(rows):
        return None
    above = None if rows.low.isna().all() else int((rows.low > rows.chance).sum())
    return Layers(rows.value, rows.chance, rows.hash, above)


def _labels(analysis: Analysis) -> Iterator[dict[str, Any]]:
    for name in analysis.trace.labels:
        number: Any = _layers(analysis, f"mi.{name}")
        hashed = float(number.hash.median() - number.chance.median())
        yield {
            "name": name,
            "number": number,
            "entropy": information.entropy(np.bincount(analysis.tokens.codes[name])),
            "within_ids": _layers(analysis, f"given.{name}"),
            # Below chance there is nothing that a hash could do too.
            "hash": max(hashed, 0.0) if number.has_hash and number.above != 0 else None,
            "hash_is_as_good": hashed >= AS_GOOD * number.beyond.median(),
        }


def _controls(analysis: Analysis) -> Iterator[dict[str, Any]]:
    for name in ("token", *analysis.trace.labels) if len(analysis.controls) else ():
        rows = analysis.controls[analysis.controls.number == f"mi.{name}"]
        routers = ("trained", "shuffled", "initial")
        beyond = {router: float((rows[router] - rows.chance).clip(lower=0).median()) for router in routers}
        if len(rows) and beyond["trained"] > 0:
            yield beyond | {"name": "token id" if name == "token" else name}


def _churn(analysis: Analysis) -> Iterator[dict[str, Any]]:
    for (before, after), rows in analysis.churn.groupby(["before", "after"], sort=False) if len(analysis.churn) else ():
        renumbered = 1 - rows.alike
        yield {
            "before": before,
            "after": after,
            "changed": rows.value,
            "chance": rows.chance,
            "renumbered": renumbered if (rows.value - renumbered).median() > 0.05 else None,
            "renumbered_chance": 1 - rows.alike_chance,
            "router_alone": rows.router_alone if rows.router_alone.notna().all() else None,
        }
