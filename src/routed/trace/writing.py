"""Writing of traces from arrays: in one call, or part by part, so that a killed capture can continue."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from routed.system import files
from routed.trace import checks
from routed.trace import words as words_file
from routed.trace.arrays import Choices, choices_of, token_table
from routed.trace.checks import Arrays, half, refuse
from routed.trace.features import Features, join, store
from routed.trace.format import DESCRIPTION, LAYER_FILE, ROW_GROUP, TOKENS, Trace, describe, digests, read
from routed.trace.words import words_of

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
    vocabulary: Any = None,
    layers: Sequence[str] = (),
    keep_scores: bool = True,
    model: str = "",
    source: str = "",
    step: int | np.integer | None = None,
    features: Features | None = None,
) -> Trace:
    """Writes a trace into the folder `out` from arrays over layers and tokens, and returns it.

    `scores` [layers, T, E] are outputs of the routers before any softmax. The experts of a token are its `k` highest,
    unless `experts` [layers, T, k] gives them (-1: none), with `weights` and `kept` of the same shape. The rest is
    optional: `token_ids`, `sequence` and `position` [T] (tokens of a sequence stand together, in order), `labels` name
    -> [T], and `vocabulary`, words by token id: a list, a dict, or a tokenizer (`words.words_of`). Scores are stored as
    float16, or as float32 where they need it; `keep_scores=False` leaves them out. `features` are inputs of the routers
    for some tokens, with the routers' weights. A trace that is already in the folder is replaced.

    Raises:
      UserError: shapes or names do not agree, a value cannot be stored, an expert is beyond the count.
    """
    given = {"scores": scores, "experts": experts, "weights": weights, "kept": kept}
    choices = choices_of(given, k, num_experts, keep_scores)
    layers = [] if layers is None else [*layers]
    if layers and len(layers) != choices.layers:
        refuse(f"layers names {len(layers)} layers, the arrays have {choices.layers}")
    by_token = {"token_ids": token_ids, "sequence": sequence, "position": position}
    table = token_table(choices.tokens, by_token, labels or {})
    trace = Trace(
        folder=files.folder(out),
        layers=checks.names("layers", layers or map(str, range(choices.layers))),
        experts=choices.experts,
        k=choices.k,
        tokens=choices.tokens,
        labels=tuple(labels or {}),
        columns=choices.columns,
        has_ids=token_ids is not None,
        has_sequences=sequence is not None,
        model=checks.text("model", model),
        source=checks.text("source", source),
        step=None if step is None else checks.whole("step", step, -(2**63), 2**63 - 1),
        has_features=features is not None,
        has_positions=position is not None,
    )
    _write_files(trace, choices, table, features, _texts(vocabulary, table))
    return trace


def _texts(vocabulary: Any, table: pa.Table) -> dict[int, str]:
    """Returns the words of the token ids of a trace; none without a vocabulary."""
    if vocabulary is None:
        return {}
    if "token" not in table.column_names:
        refuse("vocabulary: its words are those of token ids: give token_ids too")
    return words_of(vocabulary, pc.unique(table["token"]).to_pylist())


def append(out: str | os.PathLike, **arrays: Any) -> int:
    """Adds a part to the trace that `finish` will make in `out`, and returns its number of tokens.

    The arguments are those of `write`, for further tokens. A part is complete or absent; `parts_of` counts complete
    parts, so that a capture continues behind them.
    """
    return write(files.folder(out) / PARTS / f"{parts_of(out):06d}", **arrays).tokens


def parts_of(out: str | os.PathLike) -> int:
    """Returns the number of complete parts that a capture has left in `out`."""
    parts, count = files.folder(out) / PARTS, 0
    while (parts / f"{count:06d}" / DESCRIPTION).exists():
        count += 1
    return count


def finish(out: str | os.PathLike) -> Trace:
    """Joins the parts in `out` into one trace, row group by row group, and removes them.

    Raises:
      UserError: `out` has no parts, or parts of different models.
    """
    folder = files.folder(out)
    parts = [read(folder / PARTS / f"{i:06d}") for i in range(parts_of(out))]
    if not parts:
        refuse(f"nothing was captured in {folder}: it has no parts")
    first = parts[0]
    for part in parts:
        if part._replace(folder=first.folder, tokens=first.tokens) != first:
            advice = f"remove {folder / PARTS} and capture again"
            refuse(f"part {part.folder} is of another model or setting than the first: {advice}")
    files.write(folder / TOKENS, functools.partial(_join_tokens, [part.folder / TOKENS for part in parts]))
    for layer in range(len(first.layers)):
        sources = [part.path(layer) for part in parts]
        files.write(folder / LAYER_FILE.format(layer), functools.partial(_join_layer, sources))
    if first.has_features:
        begins = np.cumsum([0, *(part.tokens for part in parts[:-1])])
        join([(part.folder, int(begin)) for part, begin in zip(parts, begins, strict=True)], folder, len(first.layers))
    words_file.store(folder, dict(pair for part in parts for pair in words_file.load(part.folder).items()))
    whole = first._replace(folder=folder, tokens=sum(part.tokens for part in parts))
    files.write(folder / DESCRIPTION, describe(whole, digests(whole)))
    files.remove(folder / PARTS)
    return whole


def _join_tokens(sources: list[pathlib.Path], path: pathlib.Path) -> None:
    """Writes the tables of several files into one file, with one dictionary per label."""
    tables = pa.concat_tables([pq.read_table(source) for source in sources]).unify_dictionaries()
    pq.write_table(tables.combine_chunks(), path, row_group_size=ROW_GROUP)


def _join_layer(sources: list[pathlib.Path], path: pathlib.Path) -> None:
    """Writes the row groups of several files into one file, with scores of float32 if one file has them."""
    schema = max(map(pq.read_schema, sources), key=lambda schema: sum(kind.bit_width for kind in schema.types))
    with pq.ParquetWriter(path, schema, **_options(schema.names)) as writer:
        for source in sources:
            with pq.ParquetFile(source) as file:
                for group in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(group).cast(schema))


def _write_files(
    trace: Trace, choices: Choices, table: pa.Table, features: Features | None, texts: Mapping[int, str]
) -> None:
    with files.explained(trace.folder):
        trace.folder.mkdir(parents=True, exist_ok=True)
        (trace.folder / DESCRIPTION).unlink(missing_ok=True)
    files.write(trace.folder / TOKENS, lambda path: pq.write_table(table, path, row_group_size=ROW_GROUP))
    for layer in range(choices.layers):
        files.write(trace.path(layer), functools.partial(_write_layer, choices.of_layer(layer)))
    if features is not None:
        store(trace.folder, features, choices.layers, choices.tokens, choices.experts)
    words_file.store(trace.folder, texts)
    files.write(trace.folder / DESCRIPTION, describe(trace, digests(trace)))


def _write_layer(columns: dict[str, np.ndarray], path: pathlib.Path) -> None:
    kinds: dict[str, Any] = {"expert": np.int16, "weight": np.float32, "kept": bool}
    if "scores" in columns:
        kinds["scores"] = half(columns["scores"])
    flat = {
        f"{name}_{i}": (values[:, i], kinds[name]) for name, values in columns.items() for i in range(values.shape[1])
    }
    schema = pa.schema([(name, pa.from_numpy_dtype(kind)) for name, (_, kind) in flat.items()])
    with pq.ParquetWriter(path, schema, **_options(schema.names)) as writer:
        for begin in range(0, len(columns["expert"]), ROW_GROUP):
            group = {name: values[begin : begin + ROW_GROUP].astype(kind) for name, (values, kind) in flat.items()}
            writer.write_table(pa.table(group))


def _options(names: list[str]) -> dict[str, Any]:
    """Returns options of a Parquet file: dictionaries for experts, which repeat, and none for other numbers."""
    return {"use_dictionary": [name for name in names if name.startswith("expert_")], "compression": "zstd"}
