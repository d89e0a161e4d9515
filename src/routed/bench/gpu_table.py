"""The table that `bench gpu` prints at its end: a row for each shape, load and way, a column for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from routed.bench.gpu_cells import WAYS
from routed.bench.gpu_layers import COLUMNS, DENSE_FFN, LOADS, OURS, SHAPES

#: Aims of the bench: share of the dense FFN, both ways and at balanced load, at this many shapes; eight seeds in turn.
SHARE, SHAPES_AT_LEAST, SEEDS_AT_MOST = 0.7, 3, 1.1


class Shares:
    """Times of the dense FFN, and the shares of them that the other columns reach."""

    def __init__(self) -> None:
        self.dense: dict[tuple[str, str], float] = {}

    def add(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns a record with `of_dense`: the time of the dense FFN over its own."""
        if "column" not in record or "ms" not in record:
            return record
        key = record["shape"], record["way"]
        if record["column"] == DENSE_FFN:
            self.dense[key] = record["ms"]
        return record | ({"of_dense": self.dense[key] / record["ms"]} if key in self.dense else {})


def aims(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the records say of the aims; None where nothing was measured."""
    best: dict[str, float] = {}
    for record in records:
        named = record.get("way"), record.get("load"), record.get("column") in OURS
        if "of_dense" in record and named == ("both", "balanced", True):
            best[record["shape"]] = max(best.get(record["shape"], 0.0), record["of_dense"])
    ratios = {r["column"]: r["vmap_over_in_turn"] for r in records if "vmap_over_in_turn" in r}
    reached = sum(share >= SHARE for share in best.values()) >= SHAPES_AT_LEAST
    return {
        "best_of_ours": best,
        "reached": reached if len(best) == len(SHAPES) else None,
        "seeds_vmap_over_in_turn": ratios,
        "seeds_reached": min(ratios.values()) <= SEEDS_AT_MOST if ratios else None,
    }


def as_table(records: Iterable[dict[str, Any]]) -> str:
    """Returns the records of cells as a table, and below it why a cell has no number."""
    cells = {record["case"]: record for record in records if record.get("part") in ("table", "torch")}
    names, reasons = (*COLUMNS, "torch"), list[str]()

    def text(shape: str, load: str, way: str, column: str) -> str:
        load = LOADS[0] if column == DENSE_FFN else load
        record = cells.get(f"{shape} {load} {way}: {column}")
        if record is None:
            return ""
        if reason := record.get("failed") or record.get("left_out"):
            reason = reason.partition("; alone:")[0]
            if reason not in reasons:
                reasons.append(reason)
            return f"[{reasons.index(reason) + 1}]"
        return _number(record)

    lines = ["| shape | load | way | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for shape in SHAPES:
        for load in LOADS:
            for way in WAYS:
                row = (shape, load, way, *(text(shape, load, way, name) for name in names))
                lines.append("| " + " | ".join(row) + " |")
    lines += ["", "TFLOP/s of the model's FLOPs, share of the dense FFN's speed, GB of temporary memory."]
    return "\n".join(lines + [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)])


def _number(record: dict[str, Any]) -> str:
    parts = []
    if "tflops" in record:
        parts.append(f"{record['tflops']:.3g}")
    if "of_dense" in record:
        parts.append(f"({record['of_dense']:.0%})")
    if record.get("temporary_bytes") is not None:
        parts.append(f"{record['temporary_bytes'] / 1e9:.3g} GB")
    if record.get("dropped"):
        parts.append(f"drops {record['dropped']:.0%}")
    return " ".join(parts)
