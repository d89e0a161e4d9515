"""Traces written from arrays: at once, or part by part, so that a capture that was killed goes on where it stopped."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from routed.system import files
from routed.trace.arrays import Arrays, Layer, choices_of, half, refuse, token_table
from routed.trace.features import Features, join, store
from routed.trace.format import DESCRIPTION, NUMBERED, ROW_GROUP, TOKENS, Trace, describe, read

PARTS = "parts"


def write(
    out: str | os.PathLike,
    *,
    scores: Arrays = None,
    experts: Arrays = None,
    weights: Arrays = None,
    kept: Arrays = None,
    k: int | None = None,
    num_experts: int | np.integer | None = None,
    token_ids: Arrays = None,
    sequence: Arrays = None,
    position: Arrays = None,
    labels: Mapping[str, Arrays] | None = None,
    layers: Sequence[str] = (),
    keep_scores: bool = True,
    model: str = "",
    source: str = "",
    step: int | np.integer | None = None,
    rule: Mapping[str, Any] | None = None,
    features: Features | None = None,
) -> Trace:
    """Writes a trace into the folder `out` from arrays over layers and tokens, and returns it.

    `scores` [layers, T, E] are what the routers returned, before any softmax; a token's experts are its `k` highest, with softmax
    probabilities as weights, unless `experts` [layers, T, k] says them (-1: none), `weights` and `kept` beside it. All else is
    optional: `token_ids`, `sequence` and `position` [T] (tokens of a sequence stand together, in order), `labels` name -> [T].
    Scores are kept as float16, or float32 where they need it; `keep_scores=False` leaves them out. `features` are what routers saw of
    some tokens, with their weights. A trace that is in the folder is replaced.

    Raises:
      UserError: shapes that do not agree, scores or features that are not finite, experts beyond the count, rows without a label.
    """
    found = choices_of(scores, experts, weights, kept, k, num_experts, keep_scores)
    layer_count, tokens, experts_count, most, held, layer_arrays = found
    if layers and len(layers) != layer_count:
        refuse(f"layers names {len(layers)} layers, the arrays have {layer_count}")
    table = token_table(tokens, token_ids, sequence, position, labels or {})
    names = tuple(str(name) for name in layers) or tuple(str(i) for i in range(layer_count))
    trace = Trace(
        files.folder(out), names, experts_count, most, tokens, tuple(labels or {}), held, token_ids is not None,
        sequence is not None, model, source, None if step is None else int(step), dict(rule or {}), features is not None,
        position is not None,
    )  # fmt: skip
    with files.explained(trace.folder):
        trace.folder.mkdir(parents=True, exist_ok=True)
        (trace.folder / DESCRIPTION).unlink(missing_ok=True)
    _write_files(trace, table, layer_arrays)
    if features is not None:
        store(trace.folder, features, layer_count, tokens, experts_count)
    files.write(trace.folder / DESCRIPTION, describe(trace))
    return trace


def append(out: str | os.PathLike, **arrays: Any) -> int:
    """Adds a part to the trace that `finish` will make in `out`: the arguments of `write`, for further tokens. Returns their number.

    A part is there whole or not at all; `parts_of` counts those that are, so a capture begins behind them.
    """
    parts = files.folder(out) / PARTS
    place = parts / f"{parts_of(out):06d}"
    return write(place, **arrays).tokens


def parts_of(out: str | os.PathLike) -> int:
    """How many whole parts a capture has left in `out`."""
    parts, count = files.folder(out) / PARTS, 0
    while (parts / f"{count:06d}" / DESCRIPTION).exists():
        count += 1
    return count


def finish(out: str | os.PathLike) -> Trace:
    """Joins the parts in `out` into one trace, row group by row group, and removes them.

    Raises:
      UserError: there are none, or they are of different models.
    """
    folder = files.folder(out)
    parts = [read(folder / PARTS / f"{i:06d}") for i in range(parts_of(out))]
    if not parts:
        refuse(f"nothing was captured in {folder}: it has no parts")
    first = parts[0]
    for part in parts:
        if part._replace(folder=first.folder, tokens=first.tokens) != first:
            refuse(
                f"part {part.folder} is of another model or setting than the first: remove {folder / PARTS} and capture again"
            )
    files.write(folder / TOKENS, functools.partial(_join_tokens, [part.folder / TOKENS for part in parts]))
    for layer in range(len(first.layers)):
        files.write(
            folder / NUMBERED.format(layer), functools.partial(_join_layer, [part.path(layer) for part in parts])
        )
    if first.has_features:
        begins = np.cumsum([0, *(part.tokens for part in parts[:-1])])
        join([(part.folder, int(begin)) for part, begin in zip(parts, begins, strict=True)], folder, len(first.layers))
    whole = first._replace(folder=folder, tokens=sum(part.tokens for part in parts))
    files.write(folder / DESCRIPTION, describe(whole))
    files.remove(folder / PARTS)
    return whole


def _join_tokens(sources: list[pathlib.Path], path: pathlib.Path) -> None:
    """The tables of several files in one, with one dictionary a label."""
    tables = pa.concat_tables([pq.read_table(source) for source in sources]).unify_dictionaries()
    pq.write_table(tables.combine_chunks(), path, row_group_size=ROW_GROUP)


def _join_layer(sources: list[pathlib.Path], path: pathlib.Path) -> None:
    """The row groups of several files in one, whose scores are float32 if those of one of them are."""
    schema = max(map(pq.read_schema, sources), key=lambda one: sum(kind.bit_width for kind in one.types))
    with pq.ParquetWriter(path, schema, **_style(schema.names)) as writer:
        for source in sources:
            with pq.ParquetFile(source) as file:
                for group in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(group).cast(schema))


def _write_files(trace: Trace, table: pa.Table, arrays: Layer) -> None:
    """tokens.parquet and the layers' files, a row group at a time."""
    files.write(trace.folder / TOKENS, lambda path: pq.write_table(table, path, row_group_size=ROW_GROUP))
    for layer in range(len(trace.layers)):
        files.write(trace.path(layer), functools.partial(_write_layer, arrays(layer), trace))


def _write_layer(found: dict[str, np.ndarray], trace: Trace, path: pathlib.Path) -> None:
    kinds: dict[str, Any] = {"expert": np.int16, "weight": np.float32, "kept": bool}
    if "scores" in found:
        kinds["scores"] = half(found["scores"])
    writer = None
    try:
        for begin in range(0, trace.tokens, ROW_GROUP):
            here = {name: values[begin : begin + ROW_GROUP].astype(kinds[name]) for name, values in found.items()}
            group = pa.table(
                {
                    f"{name}_{i}": np.ascontiguousarray(values[:, i])
                    for name, values in here.items()
                    for i in range(values.shape[1])
                }
            )
            writer = writer or pq.ParquetWriter(path, group.schema, **_style(group.schema.names))
            writer.write_table(group)
    finally:
        if writer:
            writer.close()


def _style(names: list[str]) -> dict[str, Any]:
    """Few experts repeat, so they get dictionaries; numbers do not."""
    return {"use_dictionary": [name for name in names if name.startswith("expert_")], "compression": "zstd"}
