"""The rows and maps of finished runs on disk: a part for each batch, merged into results.parquet and routing.npz.

A batch costs the same however large the tables are: its rows are one file under results/, and its maps another, each
named by the digest of its content. Parts are merged when a command opens the workdir and when it is done. Every file
appears whole or not at all, and no order of runs, kills and merges changes a bit of the merged files.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import pathlib
import zipfile
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging as log

from routed.engine.rows import order_of, ordered
from routed.settings.renamed import new_name
from routed.system import files, stored

#: All rows, a second copy in case the first is damaged, all maps, and the folder of the parts.
TABLE, COPY, MAPS, PARTS = "results.parquet", ".results.copy.parquet", "routing.npz", "results"
#: The number of parts that are opened at a time.
AT_ONCE = 256
#: The metadata key for the digest of a table's content: Parquet's own checksums do not cover names and types.
DIGEST = b"routed.digest"


def add_part(workdir: pathlib.Path, rows: list[dict[str, Any]], maps: Mapping[str, np.ndarray]) -> None:
    """Writes the rows of finished runs, and their arrays for figures by run key and name.

    Raises:
      UserError: the disk is full or read-only.
    """
    with files.explained(workdir / PARTS):
        (workdir / PARTS).mkdir(exist_ok=True)
    if maps:
        packed = io.BytesIO()
        np.savez(packed, allow_pickle=False, **maps)
        _write_part(workdir, "npz", packed.getvalue())
    names = dict.fromkeys(name for row in rows for name in row)
    table, content = pa.table({name: [row.get(name) for row in rows] for name in names}), io.BytesIO()
    with pa.ipc.new_file(content, table.schema) as writer:
        writer.write_table(table)
    _write_part(workdir, "arrow", content.getvalue())  # last: the rows mark the runs as finished


def _write_part(workdir: pathlib.Path, kind: str, content: bytes) -> None:
    files.write(workdir / PARTS / f"{stored.digest(content)}.{kind}", content)


def _parts(workdir: pathlib.Path, kind: str) -> Iterator[bytes]:
    """Yields the contents of undamaged parts; the log names damaged ones."""
    folder = workdir / PARTS
    for path in sorted(folder.glob(f"*.{kind}")) if folder.is_dir() else ():
        with files.explained(path):
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # merged by another process since it was listed
                continue
        if stored.digest(content) == path.stem:
            yield content
        else:
            log.warning("%s is damaged: its runs are run again, and no others", path)


def read_table(workdir: pathlib.Path) -> pd.DataFrame:
    """All rows of a workdir, merged or not, in an order that does not depend on when they were computed."""
    return gather(workdir)[0]


def gather(workdir: pathlib.Path) -> tuple[pd.DataFrame, bool]:
    """All rows of a workdir, and True if results.parquet has all of them; the log names damaged files."""
    # Parts first: a process that merges them writes the table before it removes them.
    parts = _read_parts(workdir)
    table, settled = _read_merged(workdir)
    if not parts:
        return table, settled
    if not len(table):
        return _ordered_table(parts), False
    rows = parts.pop().to_pandas()
    # Rows of a run are merged all at once. If a kill came before its part was removed, the part may lack the column of
    # a key that was swept since, and its rows would count as another point.
    if (merged := rows.run.isin(table.run.unique())).any():
        rows = rows[~merged]
    table = pd.concat([table, rows], ignore_index=True) if len(rows) else table
    del rows  # they may be large
    return ordered(table), False


def _read_parts(workdir: pathlib.Path) -> list[pa.Table]:
    """All parts as a list of one table or none. A few at a time, since a part keeps its whole file in memory."""
    parts = (pa.ipc.open_file(content).read_all() for content in _parts(workdir, "arrow"))
    tables = []
    while some := list(itertools.islice(parts, AT_ONCE)):
        part = pa.concat_tables(some, promote_options="permissive").combine_chunks()
        tables.append(part.rename_columns([new_name(name) for name in part.column_names]))
    return [pa.concat_tables(tables, promote_options="permissive")] if tables else []


def _ordered_table(parts: list[pa.Table]) -> pd.DataFrame:
    """Pops the only table of a list and orders its rows, column by column, so that they are in memory once."""
    table = parts.pop()
    names = table.column_names
    rows, order = order_of(table.select(names[: names.index("step") + 1]).to_pandas(), names)
    indices, columns = pa.array(rows), dict[str, Any]()
    for name in order:
        columns[name] = table.column(name).take(indices).to_pandas()
        table = table.drop_columns([name])
    return pd.DataFrame(columns, copy=False)


def _read_merged(workdir: pathlib.Path) -> tuple[pd.DataFrame, bool]:
    """The merged rows, and True if they come from the table and not from its copy."""
    for name in (TABLE, COPY):
        table, problem = _read(workdir / name)
        if table is not None:
            return table, name == TABLE
        if not problem:  # somebody removed it, and with it its rows
            break
        log.warning("%s is damaged (%s): runs that no other file has are run again", workdir / name, problem)
    return pd.DataFrame(), False


def _read(file: pathlib.Path) -> tuple[pd.DataFrame | None, str]:
    """The table of a file and ""; or None and the problem, which is empty if there is no file."""
    with files.explained(file):
        if not file.exists():
            return None, ""
        opened = file.open("rb")
    try:
        with opened:
            read = pq.read_table(opened, page_checksum_verification=True)
        digest = (read.schema.metadata or {}).get(DIGEST)
        table = read.to_pandas(split_blocks=True, self_destruct=True)  # each column is in memory once
        beside = file.with_name("config.json")  # whose digest is younger than those of tables
        is_old = digest is None and not (beside.exists() and b'"digest": ' in beside.read_bytes())
        stored.check(file, None if is_old else digest == _digest(table))
        table = table.rename(columns=new_name)
    except Exception as error:  # a flipped bit in the footer makes pyarrow and pandas raise almost anything
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return table, ""


def _digest(table: pd.DataFrame) -> bytes:
    """A hash of names, types and values."""
    total = hashlib.sha256(repr([*zip(table.columns, map(str, table.dtypes), strict=True)]).encode())
    total.update(pd.util.hash_pandas_object(table, index=False).to_numpy().tobytes())
    return total.hexdigest().encode()


def merge(workdir: pathlib.Path, table: pd.DataFrame) -> None:
    """Writes `table` and all maps as the merged files, and removes the parts.

    Raises:
      UserError: the disk is full or read-only.
    """
    maps = read_heatmaps(workdir)
    if maps:
        files.write(workdir / MAPS, lambda path: _pack(path, maps))
    content = pa.Table.from_pandas(table, preserve_index=False)
    content = content.replace_schema_metadata((content.schema.metadata or {}) | {DIGEST: _digest(table)})
    for name in (COPY, TABLE):
        files.write(workdir / name, lambda path: pq.write_table(content, path, write_page_checksum=True))
    files.remove(workdir / PARTS)


def _pack(path: pathlib.Path, maps: Mapping[str, np.ndarray]) -> None:
    """Writes an npz file, one array at a time in memory."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for key in sorted(maps):
            with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, maps[key], allow_pickle=False)
        archive.comment = _digest_of_maps(archive)


def _digest_of_maps(archive: zipfile.ZipFile) -> bytes:
    members = sorted((each.filename, each.CRC, each.file_size) for each in archive.infolist())
    return stored.digest(repr(members).encode()).encode()


def read_heatmaps(*workdirs: pathlib.Path) -> Mapping[str, np.ndarray]:
    """The arrays of workdirs, merged or not, each unpacked on demand; without the arrays of damaged files."""
    archives: list[Any] = []
    for workdir in workdirs:
        archives += [np.load(io.BytesIO(content), allow_pickle=False) for content in _parts(workdir, "npz")]
        try:
            merged = np.load(io.BytesIO((workdir / MAPS).read_bytes()), allow_pickle=False)
            if damaged := merged.zip.testzip():
                raise ValueError(f"{damaged} has another checksum")
            comment = merged.zip.comment
            stored.check(workdir / MAPS, comment == _digest_of_maps(merged.zip) if comment else None)
            if not comment and any(merged[name].ndim < 2 for name in merged.files):
                raise ValueError("its arrays have no experts")
            archives.append(merged)
        except FileNotFoundError:
            pass
        except Exception as error:  # zipfile, zlib and numpy each raise their own
            log.warning("%s is damaged (%s): its heatmaps are lost, the tables are not", workdir / MAPS, error)
    return ChainMap(*archives)
