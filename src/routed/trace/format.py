"""The format of a trace: a folder with trace.json, tokens.parquet and a Parquet file a layer, read in stripes of tokens.

trace.json appears last: a folder without it is half-written. Columns are flat (expert_0, expert_1, ...), which any reader of Parquet
can query; a list a row, as fixed-size lists, takes two to three times as long to read and write.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from routed.contracts import UserError
from routed.system import files

FORMAT = 1
#: Tokens of a row group: what is in memory while a file is written.
ROW_GROUP = 1 << 16
#: Tokens of a stripe, unless a reader asks for another number.
STRIPE = 1 << 19

DESCRIPTION, TOKENS, NUMBERED = "trace.json", "tokens.parquet", "layer_{:02d}.parquet"
#: Columns of tokens.parquet that are no labels.
OWN = ("sequence", "position", "token")


class Trace(NamedTuple):
    """What trace.json says: `layers` are names, `labels` the columns of tokens.parquet beside its own.

    `k` is the most experts of a token; `files` names the Parquet file of each layer. `held` are the columns of a layer's file:
    expert always; weight, kept and scores where they were captured.
    """

    folder: pathlib.Path
    layers: tuple[str, ...]
    experts: int
    k: int
    tokens: int
    labels: tuple[str, ...]
    held: tuple[str, ...]
    has_ids: bool
    has_sequences: bool
    model: str = ""
    source: str = ""
    step: int | None = None
    rule: Mapping[str, Any] = {}
    has_features: bool = False
    has_positions: bool = False

    def path(self, layer: int) -> pathlib.Path:
        """The file of a layer."""
        return self.folder / NUMBERED.format(layer)


def describe(trace: Trace) -> str:
    """The content of trace.json."""
    held = trace._asdict()
    del held["folder"]
    return json.dumps({"format": FORMAT} | held, indent=1) + "\n"


def read(folder: str | os.PathLike) -> Trace:
    """The trace in a folder, its files looked at and not read.

    Raises:
      UserError: there is none, it is half-written, of another format, or its files do not agree.
    """
    path = files.folder(folder)
    if not (path / DESCRIPTION).exists():
        if (path / TOKENS).exists() or (path / "parts").exists():
            raise UserError(
                f"trace {path} is half-written: it has no {DESCRIPTION}; run the command that wrote it again"
            )
        raise UserError(f"no trace in {path}: it has no {DESCRIPTION}; routed.trace.write makes one from arrays")
    try:
        held = json.loads((path / DESCRIPTION).read_text("utf-8"))
        version = held.pop("format")
        known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in held.items()}
        trace = Trace(path, **{key: value for key, value in known.items() if key in Trace._fields})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / DESCRIPTION} is damaged ({error}): write the trace again") from error
    if version != FORMAT:
        raise UserError(f"{path / DESCRIPTION} is of format {version}, and this is {FORMAT}: write the trace again")
    for name in (TOKENS, *(NUMBERED.format(i) for i in range(len(trace.layers)))):
        rows = _rows(path / name)
        if rows != trace.tokens:
            raise UserError(
                f"{path / name} has {rows:,} rows, {DESCRIPTION} says {trace.tokens:,} tokens: write it again"
            )
    return trace


def _rows(path: pathlib.Path) -> int:
    try:
        return pq.read_metadata(path).num_rows
    except FileNotFoundError:
        raise UserError(f"{path} is missing: copy the whole folder, or write the trace again") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}): write the trace again") from error


def names_of(column: str, trace: Trace) -> list[str]:
    """The flat columns of `expert`, `weight`, `kept` or `scores`."""
    return [f"{column}_{i}" for i in range(trace.experts if column == "scores" else trace.k)]


def stripes(trace: Trace, layer: int, *columns: str, size: int = STRIPE) -> Iterator[tuple[np.ndarray, ...]]:
    """Arrays of a layer's columns for stripes of `size` tokens: expert, weight and kept [n, k], scores [n, E], float16 as stored.

    Raises:
      UserError: the file is damaged.
    """
    wanted = [name for column in columns for name in names_of(column, trace)]
    try:
        with pq.ParquetFile(trace.path(layer)) as file:
            for batch in file.iter_batches(size, columns=wanted):
                found = []
                for column in columns:
                    one = [batch.column(name).to_numpy(zero_copy_only=False) for name in names_of(column, trace)]
                    found.append(np.stack(one, axis=1))
                yield tuple(found)
    except (pa.ArrowInvalid, OSError, KeyError) as error:
        raise UserError(
            f"{trace.path(layer)} is damaged ({str(error).splitlines()[0]}): write the trace again"
        ) from error


def token_column(trace: Trace, name: str) -> np.ndarray:
    """A column of tokens.parquet, whole: integers [T], of a label codes into `label_names`."""
    column = _column(trace, name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of an older pyarrow, or of no rows
        column = column.unify_dictionaries().combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.indices
    return column.to_numpy(zero_copy_only=False)


def _column(trace: Trace, name: str) -> pa.ChunkedArray:
    try:
        return pq.read_table(trace.folder / TOKENS, columns=[name]).column(0)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{trace.folder / TOKENS} is damaged ({type(error).__name__}): write the trace again"
        ) from error


def label_names(trace: Trace, name: str) -> list[str]:
    """The values of a label, in the order of its codes."""
    column = _column(trace, name).unify_dictionaries()
    chunk = column.chunk(0) if column.num_chunks else None
    return [] if chunk is None else [str(value) for value in chunk.dictionary.to_pylist()]
