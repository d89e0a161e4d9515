"""The page of a trace, which opens offline: findings, limits, numbers beside chance and a hash, figures.

Sentences of limits stand in unsaid.j2, those of findings in findings.j2.
"""

from __future__ import annotations

import importlib.resources
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from routed.analysis import wording
from routed.contracts import UserError
from routed.system import files
from routed.trace.analysis import Analysis
from routed.trace.analysis import analyse as analyse_traces
from routed.trace.checks import Arrays
from routed.trace.counts import BATCH
from routed.trace.evidence import PERMUTATIONS, followed, short_names
from routed.trace.figures import beside, draw, embedded
from routed.trace.findings import Row, findings, overview
from routed.trace.format import Trace, describe, read, token_column
from routed.trace.numbers import NUMBERS
from routed.trace.view import view_of
from routed.trace.words import load as load_words
from routed.trace.words import words_of
from routed.trace.writing import write

#: Start of a number's name -> the routing that chance is.
CHANCE_IS = dict.fromkeys(
    ("load_max", "experts_used", "dead", "dropped_"), "independent choices, all experts equally likely"
)
CHANCE_IS |= dict.fromkeys(("entropy_token", "confidence", "margin"), "equal scores")
CHANCE_IS |= {
    "table": "the most loaded experts for every token",
    "mi": "codes permuted among sequences, if all of a sequence has one code, else rotated within sequences",
    "given": "labels permuted among sequences that have the id (labels of tokens: among tokens)",
    "pairs": "as many pairs of independent experts with the same loads",
    "next": "the next layer's tokens rotated within sequences",
    "alike": "independent choices with the same loads",
}


def analyse(
    scores: Arrays = None, *, k: int | None = None, out: str | os.PathLike, seed: int = 0, **arrays: Any
) -> dict[str, Any]:
    """Writes a trace of `scores` [layers, T, E] and its page into the folder `out`, and returns the tables.

    All but scores and k is optional: `token_ids`, `sequence`, `labels={"language": [...]}`, `vocabulary` and other
    arguments of `routed.trace.write`. Returned: `numbers` (a row for each layer and number: value, low, high, chance,
    hash, told), `maps` label -> assignments [L, C, E], `loads` [L, E], `between` and `equal` [L, L], `churn`,
    `controls`, `findings`.

    Raises:
      UserError: as `routed.trace.write`.
    """
    return report([write(out, scores=scores, k=k, **arrays)], pathlib.Path(out) / "report.html", seed)


def report(
    traces: Sequence[Trace | str | os.PathLike], out: str | os.PathLike, seed: int = 0, vocabulary: Any = None
) -> dict[str, Any]:
    """Writes the page of a trace, or of a model's checkpoints in order, and numbers.csv; returns as `analyse`.

    `vocabulary` has the words of token ids, as in `words.words_of`, for traces that were written without.
    """
    analysis = analyse_traces([trace if isinstance(trace, Trace) else read(trace) for trace in traces], seed)
    path, between, trace = files.folder(out), analysis.between, analysis.trace
    results = findings(analysis)
    shown = [embedded(beside(analysis, finding.numbers)) for finding in results]
    sentences = [f"{finding.text} {finding.more}".strip() for finding in results]
    drawn = draw(analysis, without=[number for finding in results for number in finding.numbers])
    content = wording.render(
        "trace/report.html",
        figures=embedded(drawn),
        title=f"Routing of {trace.model or trace.folder.resolve().name}",
        source=trace.source,
        trace=trace,
        tokens=analysis.tokens,
        findings=[*zip(results, shown, strict=True)],
        overview=[_cells(row) for row in overview(analysis)],
        **_view(analysis, vocabulary, seed),
        layer_names=short_names(trace.layers),
        permutations=PERMUTATIONS,
        unsaid=unsaid(analysis),
        summary=summarise(analysis.table),
        table=_as_html(analysis.table),
        churn=_as_html(analysis.churn) if len(analysis.churn) else None,
        controls=_medians(analysis.controls) if len(analysis.controls) else None,
        description=describe(trace),
    )
    files.write(path.with_name("numbers.csv"), files.csv_text(analysis.table))
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


def _view(analysis: Analysis, vocabulary: Any, seed: int) -> dict[str, Any]:
    """Returns the values of view.html."""
    trace, strongest = analysis.trace, next((row.layers for row in overview(analysis) if row.layers.strong.size), None)
    texts = load_words(trace.folder)
    if vocabulary is not None and not trace.has_ids:
        raise UserError("vocabulary names token ids, and the trace has none: write it with token_ids")
    if vocabulary is not None:
        texts = words_of(vocabulary, np.unique(token_column(trace, "token")).tolist())
    missing = "id: give vocabulary (words by id, or a tokenizer)" if trace.has_ids else "position: give token_ids"
    said = "" if texts else f"The trace has no words, so each token is shown by its {missing}."
    package = importlib.resources.files("routed.trace")
    return {
        "view": view_of(analysis, texts, seed),
        "view_layer": strongest.top if strongest else 0,
        "view_words": said,
        "compared": len(analysis.traces) > 1,
        "script": Markup(package.joinpath("view.js").read_text("utf-8")),
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
    return labels.get(base) or NUMBERS[base]


def summarise(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a row for each number: median over layers, range, chance, hash, and layers told from chance."""
    rows = []
    for name, some in table.groupby("number", sort=False):
        row = {"number": name, "label": label_of(str(name))}
        row |= {column: _number(some[column].median()) for column in ("value", "chance", "hash")}
        row["range"] = f"{_number(some.value.min())} to {_number(some.value.max())}" if len(some) > 1 else ""
        row["above"] = "–" if some.told.isna().any() else f"{int(some.told.sum())} of {len(some)}"
        row["chance_is"] = next((text for start, text in CHANCE_IS.items() if str(name).startswith(start)), "")
        rows.append(row)
    return rows


def _cells(row: Row) -> dict[str, Any]:
    """Returns a row of the overview for the template: a share in percent for each layer, or None: not told."""
    both = zip(row.layers.share, row.layers.sure, strict=True)
    return {"name": row.name, "shares": [round(100 * float(share)) if sure else None for share, sure in both]}


def _number(value: float) -> str:
    return "–" if value != value else "0" if abs(value) < 5e-7 else f"{value:.3g}"


def _as_html(table: pd.DataFrame) -> Markup:
    """Returns a table as HTML, with the interval beside the value."""
    shown = table.copy()
    ends = zip(table.value, table.low, table.high, strict=True)
    shown["value"] = [
        _number(value) + (f" [{_number(low)}, {_number(high)}]" if low == low else "") for value, low, high in ends
    ]
    if "told" in shown:
        shown["told"] = ["–" if sure is None else "yes" if sure else "no" for sure in shown.told]
    for name in ("chance", "hash", "alike", "alike_chance", "router_alone"):
        if name in shown:
            shown[name] = [_number(value) for value in np.asarray(shown[name], float)]
    return Markup(shown.drop(columns=["low", "high"]).to_html(index=False, border=0))


def unsaid(analysis: Analysis) -> list[str]:
    """Returns sentences on the questions that this trace cannot answer, with what would answer them."""
    trace = analysis.trace
    return wording.paragraphs(
        "trace/unsaid.j2",
        trace=trace,
        has_positions="position" in analysis.tokens.codes,
        lacks_order=analysis.between is None and len(trace.layers) > 1,
        has_checkpoints=len(analysis.churn) > 0,
        few_tokens=followed(analysis.table, "dead") is None,
    )
