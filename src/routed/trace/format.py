"""The format of a trace: a folder with trace.json, tokens.parquet and one Parquet file per layer.

trace.json is written last: a folder without it is half-written. Columns are flat (expert_0, expert_1, ...), so that
any Parquet reader can query them; fixed-size lists take two to three times as long to read and write.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from routed.contracts import UserError
from routed.system import files

FORMAT = 1
#: Tokens of a row group: the part of a file that is in memory while the file is written.
ROW_GROUP = 1 << 16
#: Tokens of a stripe by default.
STRIPE = 1 << 19

DESCRIPTION, TOKENS, LAYER_FILE = "trace.json", "tokens.parquet", "layer_{:02d}.parquet"
#: Columns of tokens.parquet that are not labels.
TOKEN_COLUMNS = ("sequence", "position", "token")

Arrays = tuple[np.ndarray, ...]


class Trace(NamedTuple):
    """The description of a trace: `layers` are names, `labels` the label columns of tokens.parquet.

    `k` is the largest number of experts of a token. `columns` (`held` in trace.json) are the columns of a layer's
    file: always expert; weight, kept and scores where they were captured.
    """

    folder: pathlib.Path
    layers: tuple[str, ...]
    experts: int
    k: int
    tokens: int
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    has_ids: bool
    has_sequences: bool
    model: str = ""
    source: str = ""
    step: int | None = None
    rule: Mapping[str, Any] = {}
    has_features: bool = False
    has_positions: bool = False

    def path(self, layer: int) -> pathlib.Path:
        """Returns the file of a layer."""
        return self.folder / LAYER_FILE.format(layer)


def describe(trace: Trace) -> str:
    """Returns the content of trace.json."""
    fields = {"held" if name == "columns" else name: value for name, value in trace._asdict().items()}
    del fields["folder"]
    return json.dumps({"format": FORMAT} | fields, indent=1) + "\n"


def read(folder: str | os.PathLike) -> Trace:
    """Returns the trace in a folder, whose files are checked and not read.

    Raises:
      UserError: the trace is missing, half-written or of another format, or its files do not agree.
    """
    path = files.folder(folder)
    if not (path / DESCRIPTION).exists():
        if (path / TOKENS).exists() or (path / "parts").exists():
            raise UserError(
                f"trace {path} is half-written: it has no {DESCRIPTION}; run the command that wrote it again"
            )
        raise UserError(f"no trace in {path}: it has no {DESCRIPTION}; routed.trace.write makes one from arrays")
    try:
        content = json.loads((path / DESCRIPTION).read_text("utf-8"))
        version, content["columns"] = content.pop("format"), content.pop("held")
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
        }
        trace = Trace(path, **{key: value for key, value in fields.items() if key in Trace._fields})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / DESCRIPTION} is damaged ({error}): write the trace again") from error
    if version != FORMAT:
        raise UserError(
            f"{path / DESCRIPTION} has format {version}, this program reads {FORMAT}: write the trace again"
        )
    for file in (path / TOKENS, *map(trace.path, range(len(trace.layers)))):
        try:
            rows = pq.read_metadata(file).num_rows
        except FileNotFoundError:
            raise UserError(f"{file} is missing: copy the whole folder, or write the trace again") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise damaged(file, error) from error
        if rows != trace.tokens:
            raise UserError(f"{file} has {rows:,} rows, {DESCRIPTION} says {trace.tokens:,} tokens: write it again")
    return trace


def damaged(path: pathlib.Path, error: Exception) -> UserError:
    """Returns the error of a file of a trace that cannot be read."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"{path} is damaged ({reason}): write the trace again")


def stripes(trace: Trace, layer: int, *columns: str, size: int = STRIPE) -> Iterator[Arrays]:
    """Yields stripes of `size` tokens of a layer's columns: expert, weight and kept [n, k], scores [n, E] as stored.

    Raises:
      UserError: the file is damaged.
    """
    names = _flat_names(trace, columns)
    flat_columns = [name for flat in names.values() for name in flat]
    try:
        with pq.ParquetFile(trace.path(layer)) as file:
            for batch in file.iter_batches(size, columns=flat_columns):
                yield tuple(
                    np.stack([batch.column(name).to_numpy(zero_copy_only=False) for name in flat], axis=1)
                    for flat in names.values()
                )
    except (pa.ArrowInvalid, OSError, KeyError) as error:
        raise damaged(trace.path(layer), error) from error


def rows_of(trace: Trace, layer: int, where: np.ndarray, *columns: str) -> Arrays:
    """Returns a layer's columns for the tokens `where` [n], which ascend; row groups without them are not read.

    Raises:
      UserError: the file is damaged.
    """
    names, parts, begin = _flat_names(trace, columns), list[pa.Table](), 0
    try:
        with pq.ParquetFile(trace.path(layer)) as file:
            for group in range(file.num_row_groups):
                stop = begin + file.metadata.row_group(group).num_rows
                here = where[slice(*np.searchsorted(where, (begin, stop)))] - begin
                if len(here):
                    flat = [name for of_column in names.values() for name in of_column]
                    parts.append(file.read_row_group(group, columns=flat).take(here))
                begin = stop
        table = pa.concat_tables(parts)
        return tuple(np.stack([table.column(name).to_numpy() for name in flat], axis=1) for flat in names.values())
    except (pa.ArrowException, OSError, KeyError) as error:
        raise damaged(trace.path(layer), error) from error


def _flat_names(trace: Trace, columns: Sequence[str]) -> dict[str, list[str]]:
    counts = [trace.experts if column == "scores" else trace.k for column in columns]
    return {column: [f"{column}_{i}" for i in range(n)] for column, n in zip(columns, counts, strict=True)}


def with_slices(stripes: Iterable[Arrays]) -> Iterator[tuple[slice, Arrays]]:
    """Yields each stripe behind the slice of the trace's tokens that it holds."""
    begin = 0
    for arrays in stripes:
        yield slice(begin, begin := begin + len(arrays[0])), arrays


def token_column(trace: Trace, name: str) -> np.ndarray:
    """Returns a whole column of tokens.parquet: integers [T]; for a label, codes into `label_names`."""
    column = _column(trace, name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # from an older pyarrow, or without rows
        column = column.unify_dictionaries().combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.indices
    return column.to_numpy(zero_copy_only=False)


def _column(trace: Trace, name: str) -> pa.ChunkedArray:
    try:
        return pq.read_table(trace.folder / TOKENS, columns=[name]).column(0)
    except (OSError, pa.ArrowException) as error:
        raise damaged(trace.folder / TOKENS, error) from error


def label_names(trace: Trace, name: str) -> list[str]:
    """Returns the values of a label in the order of its codes."""
    column = _column(trace, name).unify_dictionaries()
    return [str(value) for value in column.chunk(0).dictionary.to_pylist()] if column.num_chunks else []
