"""All numbers of a trace, as tables: layers, what a hash of the token id has, experts by label, between layers and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from absl import logging as log

from routed.metrics import information
from routed.routers.fixed import balanced_table
from routed.trace import between, counts, numbers, similarity, tokens
from routed.trace.controls import controls
from routed.trace.format import Trace


class Analysis(NamedTuple):
    """What the page is made of.

    `table` has a row a layer and number: value, low, high, chance, and hash, which is the value that a balanced table of token ids
    has. `maps` name -> [L, C, E] assignments by label and expert, `loads` [L, E], `pairs` [L, E, E] or None; `controls` what other routers do on the features that the trace has,
    `routers` what `similarity.routers` says of them.
    """

    trace: Trace
    tokens: tokens.Tokens
    table: pd.DataFrame
    maps: dict[str, np.ndarray]
    loads: np.ndarray
    pairs: np.ndarray | None
    between: between.Between | None
    churn: pd.DataFrame
    controls: pd.DataFrame
    routers: tuple[np.ndarray, np.ndarray] | None


def analyse(traces: Sequence[Trace], seed: int = 0) -> Analysis:
    """Every number of the last of `traces`, which are checkpoints of one model in order; churn is between them."""
    trace = traces[-1]
    known = tokens.of(trace, seed)
    weights = numbers.resampler(known.groups, seed) if trace.has_sequences else None
    given = tokens.given_token(known, list(trace.labels), seed)
    hashed = _of_hash(known, trace, given, weights)
    rows: list[dict[str, Any]] = []
    maps: dict[str, list[np.ndarray]] = {name: [] for name in trace.labels}
    loads, pairs = [], []
    for layer, name in enumerate(trace.layers):
        log.info("layer %s, %d of %d", name, layer + 1, len(trace.layers))
        found = counts.count(counts.of_layer(trace, layer), known, given)
        rows += numbers.as_rows(numbers.numbers(found, trace.k, weights), layer=name)
        loads.append(found.load.sum(0))
        if found.pairs is not None:
            pairs.append(found.pairs.sum(0))
        for label in trace.labels:
            maps[label].append(found.tables[label].sum(0))
    seen = between.layers(trace, known, weights)
    for name, number, alike in zip(
        trace.layers, seen.following if seen else (), seen.alike if seen else (), strict=False
    ):
        rows += numbers.as_rows({"next": number, "alike": alike}, layer=name)
    table = pd.DataFrame(rows)
    table["hash"] = [hashed[name].value if name in hashed else np.nan for name in table.number]
    churned = between.checkpoints(traces, known, weights) if len(traces) > 1 else []
    return Analysis(
        trace, known, table, {name: np.stack(of) for name, of in maps.items()}, np.stack(loads),
        np.stack(pairs) if pairs else None, seen, pd.DataFrame(churned), controls(trace, known, seed) if trace.has_features else pd.DataFrame(),
        similarity.routers(trace, seed) if trace.has_features and len(trace.layers) > 1 else None,
    )  # fmt: skip


def _of_hash(known: tokens.Tokens, trace: Trace, given, weights) -> dict[str, numbers.Number]:
    """The numbers of a table of token ids that nobody trained, balanced over their occurrences (Roller et al. 2021)."""
    if "token" not in known.codes:
        return {}
    often = np.bincount(known.codes["token"], minlength=known.counts["token"])
    table, other = (balanced_table(often, trace.experts, trace.k, seed).astype(np.int16) for seed in (0, 1))
    found = counts.count(counts.of_table(known, table, trace.experts), known, given)
    both = np.zeros((trace.experts, trace.experts))
    np.add.at(both, (table[:, 0], other[:, 0]), often)
    after, alike = (
        numbers.Number(value, np.nan, np.nan, np.nan)
        for value in (information.mutual(both), similarity.matched(both)[0])
    )
    return numbers.numbers(found, trace.k, weights) | {"next": after, "alike": alike}
