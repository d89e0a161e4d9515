"""The format of a trace: a folder with trace.json, tokens.parquet and one Parquet file per layer.

trace.json is written last: a folder without it is half-written. Columns are flat (expert_0, expert_1, ...), so that
any Parquet reader can query them; fixed-size lists take two to three times as long to read and write.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging as log

from routed.contracts import UserError
from routed.system import files
from routed.trace import checks, features

FORMAT = 1
#: Tokens of a row group: the part of a file that is in memory while the file is written.
ROW_GROUP = 1 << 16
#: Tokens of a stripe by default.
STRIPE = 1 << 19

DESCRIPTION, TOKENS, LAYER_FILE = "trace.json", "tokens.parquet", "layer_{:02d}.parquet"
#: Words of the token ids, where a vocabulary was given.
WORDS = "words.parquet"
#: Argument of `write` -> column of a layer's file, in the order of the file.
LAYER_COLUMNS = {"experts": "expert", "weights": "weight", "kept": "kept", "scores": "scores"}
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
    has_features: bool = False
    has_positions: bool = False

    def path(self, layer: int) -> pathlib.Path:
        """Returns the file of a layer."""
        return self.folder / LAYER_FILE.format(layer)


def describe(trace: Trace, digests: Mapping[str, str] | None = None) -> str:
    """Returns the content of trace.json, with the digests of the other files if they are given."""
    fields = {"held" if name == "columns" else name: value for name, value in trace._asdict().items()}
    del fields["folder"]
    if digests is not None:
        fields["digests"] = dict(digests)
    return json.dumps({"format": FORMAT} | fields, indent=1) + "\n"


def digests(trace: Trace) -> dict[str, str]:
    """Returns the SHA-256 of each file of a trace but trace.json, by name; a missing file is a `UserError`."""
    names = [TOKENS]
    for layer in range(len(trace.layers)):
        names += [LAYER_FILE.format(layer)] + ([features.LAYER_FILE.format(layer)] if trace.has_features else [])
    names += [WORDS] if (trace.folder / WORDS).exists() else []
    by_name = {}
    for name in names:
        try:
            with (trace.folder / name).open("rb") as file:
                by_name[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise missing(trace.folder / name) from error
    return by_name


def read(folder: str | os.PathLike) -> Trace:
    """Returns the trace in a folder, whose files are those that were written.

    The digests in trace.json say so. A trace without digests is of an older program: its values are looked at.

    Raises:
      UserError: the trace is missing, half-written, damaged or of another format, or its files do not agree.
    """
    path = files.folder(folder)
    if not (path / DESCRIPTION).exists():
        if (path / TOKENS).exists() or (path / "parts").exists():
            raise UserError(
                f"trace {path} is half-written: it has no {DESCRIPTION}; run the command that wrote it again"
            )
        raise UserError(f"no trace in {path}: it has no {DESCRIPTION}; routed.trace.write makes one from arrays")
    trace, stored = _parse(path)
    _check_columns(trace, path / TOKENS)
    for layer in range(len(trace.layers)):
        _check_columns(trace, trace.path(layer), layer)
    if stored is None:
        log.info("%s has no digests, since an older program wrote it: its values are looked at instead", path)
        _check_values(trace)
        return trace
    now = digests(trace)
    for name in sorted(now.keys() | stored.keys()):
        if stored.get(name) != now.get(name):
            raise UserError(f"{path / name} has changed since it was written: copy the folder again, or write it again")
    for layer in range(len(trace.layers)) if trace.has_features else ():
        features.check(path, layer, trace.tokens, trace.experts)
    return trace


def _parse(path: pathlib.Path) -> tuple[Trace, Mapping[str, str] | None]:
    """Returns the trace that trace.json describes, and its digests, if it has any."""
    file = path / DESCRIPTION
    try:
        content = json.loads(file.read_text("utf-8"))
        version, stored = content["format"], content.get("digests")
        if version != FORMAT or isinstance(version, bool):
            raise UserError(f"{file} has format {version}, this program reads {FORMAT}: write the trace again")
        for name in ("has_ids", "has_sequences", "has_features", "has_positions"):
            if type(content.get(name, False)) is not bool:
                checks.refuse(f"{name}={content[name]!r}: must be true or false")
        for name, kind in (("layers", list), ("labels", list), ("held", list), ("digests", dict)):
            if not isinstance(content.get(name, kind()), kind) and (name, stored) != ("digests", None):
                checks.refuse(f"{name} has another type than {kind.__name__}")
        layers, columns = checks.names("layers", content["layers"]), checks.names("held", content["held"])
        if not layers or "expert" not in columns or not {*columns} <= {*LAYER_COLUMNS.values()}:
            checks.refuse(
                f"layers {list(layers)} and held {list(columns)}: one layer and the column expert are the least"
            )
        experts = checks.whole("experts", content["experts"], 1, checks.MOST_EXPERTS)
        trace = Trace(
            folder=path,
            layers=layers,
            experts=experts,
            k=checks.whole("k", content["k"], 1, experts),
            tokens=checks.whole("tokens", content["tokens"], 1, 2**63 - 1),
            labels=checks.names("labels", content["labels"]),
            columns=columns,
            has_ids=content["has_ids"],
            has_sequences=content["has_sequences"],
            model=checks.text("model", content.get("model", "")),
            source=checks.text("source", content.get("source", "")),
            step=None if content.get("step") is None else checks.whole("step", content["step"], -(2**63), 2**63 - 1),
            has_features=content.get("has_features", False),
            has_positions=content.get("has_positions", False),
        )
        if set(trace.labels) & set(TOKEN_COLUMNS):
            checks.refuse(f"labels {list(trace.labels)} name a column of every trace")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}: {error}): write the trace again") from error
    return trace, stored


def _check_columns(trace: Trace, path: pathlib.Path, layer: int | None = None) -> None:
    """Refuses a file whose rows, columns or types are not those that trace.json tells; its values are not read."""
    try:
        metadata = pq.read_metadata(path)
        rows, schema = metadata.num_rows, metadata.schema.to_arrow_schema()
    except FileNotFoundError:
        raise missing(path) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(path, error) from error
    if rows != trace.tokens:
        raise UserError(f"{path} has {rows:,} rows, {DESCRIPTION} says {trace.tokens:,} tokens: write it again")
    if layer is None:
        expected = {name: pa.types.is_integer for name in TOKEN_COLUMNS if name != "token" or trace.has_ids}
        expected |= dict.fromkeys(trace.labels, _KINDS["label"])
    else:
        expected = {flat: _KINDS[name] for name in trace.columns for flat in _flat_names(trace, [name])[name]}
    if set(schema.names) != set(expected) or len(schema.names) != len(expected):
        first = sorted(set(schema.names) ^ set(expected))[:1] or schema.names[:1]
        raise UserError(f"{path} has other columns than {DESCRIPTION} says, such as {first[0]!r}: write it again")
    for field in schema:
        if not expected[field.name](field.type):
            raise UserError(f"{path}: column {field.name!r} has the type {field.type}: write the trace again")


#: Column of a layer's file -> test of its type.
_KINDS: dict[str, Callable[[pa.DataType], bool]] = {
    "expert": pa.types.is_integer,
    "weight": pa.types.is_floating,
    "kept": pa.types.is_boolean,
    "scores": pa.types.is_floating,
    "label": lambda kind: pa.types.is_string(kind.value_type if pa.types.is_dictionary(kind) else kind),
}


def _check_values(trace: Trace) -> None:
    """Looks at all values of a trace, as `write` does."""
    path = trace.folder / TOKENS
    try:
        checks.tokens({name: token_column(trace, name) for name in TOKEN_COLUMNS if name != "token" or trace.has_ids})
        for name in trace.labels:
            label_names(trace, name)
        for layer in range(len(trace.layers)):
            path = trace.path(layer)
            for arrays in stripes(trace, layer, *trace.columns):
                columns = dict(zip(trace.columns, arrays, strict=True))
                checks.experts(columns["expert"], layer, trace.experts)
                if "weight" in columns:
                    checks.weights(columns["weight"], layer, columns["expert"])
                if "scores" in columns:
                    checks.scores(columns["scores"], layer)
            if trace.has_features:
                features.check(trace.folder, layer, trace.tokens, trace.experts)
    except UserError as error:
        reason = str(error)
        raise (error if str(trace.folder) in reason else damaged(path, error)) from None


def missing(path: pathlib.Path) -> UserError:
    """Returns the error of a file of a trace that is not there."""
    return UserError(f"{path} is missing: copy the whole folder, or write the trace again")


def damaged(path: pathlib.Path, error: Exception) -> UserError:
    """Returns the error of a file of a trace that cannot be read."""
    if str(path) in str(error):
        return error if isinstance(error, UserError) else UserError(f"{error}: write the trace again")
    reason = (str(error).removeprefix("trace: ").splitlines() or [type(error).__name__])[0]
    return UserError(f"{path} is damaged ({reason}): write the trace again")


def stripes(trace: Trace, layer: int, *columns: str, size: int = STRIPE, most: int | None = None) -> Iterator[Arrays]:
    """Yields stripes of `size` tokens of a layer's columns: expert, weight and kept [n, k], scores [n, E] as stored.

    With `most` only so many ranks of each column are read.

    Raises: UserError: the file is damaged.
    """
    names = {name: flat[:most] for name, flat in _flat_names(trace, columns).items()}
    flat_columns = [name for flat in names.values() for name in flat]
    try:
        with pq.ParquetFile(trace.path(layer)) as file:
            for batch in file.iter_batches(size, columns=flat_columns):
                if any(column.null_count for column in batch.columns):
                    checks.refuse("a value is missing")
                arrays = tuple(
                    np.stack([batch.column(name).to_numpy(zero_copy_only=False) for name in flat], axis=1)
                    for flat in names.values()
                )
                for column, array in zip(columns, arrays, strict=True):
                    if column == "expert" and not -1 <= array.min() <= array.max() < trace.experts:
                        checks.refuse(f"an expert is beyond -1 to {trace.experts - 1}")
                yield arrays
    except (pa.ArrowException, OSError, KeyError, ValueError, UserError) as error:
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
    column = _column(trace, name)
    return (column.indices if isinstance(column, pa.DictionaryArray) else column).to_numpy(zero_copy_only=False)


def _column(trace: Trace, name: str) -> pa.Array:
    path = trace.folder / TOKENS
    try:
        column = pq.read_table(path, columns=[name]).column(0)
        if column.null_count:
            checks.refuse(f"column {name!r} lacks values")
        if pa.types.is_string(column.type):  # as other programs write labels
            column = column.dictionary_encode()
        column = column.unify_dictionaries().combine_chunks()
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column  # from an older pyarrow
        column.validate(full=True)
        return column
    except (OSError, pa.ArrowException, KeyError, ValueError, UserError) as error:
        raise damaged(path, error) from error


def label_names(trace: Trace, name: str) -> list[str]:
    """Returns the values of a label in the order of its codes."""
    try:
        return list(checks.names(f"labels[{name!r}]", _column(trace, name).dictionary.to_pylist()))
    except (UnicodeDecodeError, UserError) as error:
        raise damaged(trace.folder / TOKENS, error) from error
