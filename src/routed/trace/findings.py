"""Values of the sentences about a trace; the sentences stand in findings.j2 and unsaid.j2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from routed.metrics import information
from routed.trace.analysis import Analysis
from routed.trace.sentences import paragraphs

#: Share of a number above which a hash of the token id counts as good as the router.
AS_GOOD = 0.8


class Layers(NamedTuple):
    """One number over layers; `above` counts layers whose interval is above chance (None without intervals)."""

    value: pd.Series
    chance: pd.Series
    hash: pd.Series
    above: int | None

    @property
    def beyond(self) -> pd.Series:
        """Returns the values minus chance, at least 0."""
        return (self.value - self.chance).clip(lower=0)

    @property
    def has_hash(self) -> bool:
        """True if a hash of the token id has this number."""
        return bool(self.hash.notna().all())

    @property
    def layers(self) -> int:
        """Returns the number of layers."""
        return len(self.value)


def findings(analysis: Analysis) -> list[str]:
    """Returns sentences on the median over layers, with the range."""
    table, entropy = _layers(analysis, "table.token"), _layers(analysis, "entropy_token")
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
        neighbours=_neighbours(analysis),
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
        number = _layers(analysis, f"mi.{name}")
        assert number is not None
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


def _neighbours(analysis: Analysis) -> dict[str, pd.Series] | None:
    """Returns the agreement of each layer's router with the next layer's on the same features, and that by chance."""
    if analysis.routers is None:
        return None
    shares, chance = analysis.routers
    after = np.diagonal(shares, 1)
    return {"value": pd.Series(after), "chance": pd.Series(chance)} if np.isfinite(after).all() else None


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
