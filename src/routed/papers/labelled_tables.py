"""Tables of texts with a label and perhaps a language: tab-separated values with a head."""

from __future__ import annotations

import csv
import pathlib
from typing import NamedTuple

from routed.contracts import UserError
from routed.settings.setting import Allowed, Setting


class Row(NamedTuple):
    """A line of a table: its text, its label, its language."""

    text: str
    label: str
    language: str


#: The classes of a table: the setting `data.labels`.
LABELS = Setting(
    ("negative", "positive"),
    "labels that are classes; sentences with others are left out",
    Allowed(lambda v: len(set(v)) == len(v) > 1, lambda: "must be at least two different labels"),
)


def read_table(path: pathlib.Path) -> list[Row]:
    """Reads a table with the columns text, label and perhaps language.

    Raises:
      UserError: a missing file, another encoding than UTF-8, a missing column, or no row.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin with a byte-order mark
            csv.field_size_limit(2**31 - 1)  # a long text is one field
            reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            if not reader.fieldnames:
                raise UserError(f"{path}: empty; its head names text, label and perhaps language")
            if twice := [name for name in reader.fieldnames if reader.fieldnames.count(name) > 1]:
                raise UserError(f"{path}: two columns {twice[0]!r} in its head; keep one")
            missing = [name for name in ("text", "label") if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"{path}: no column {missing[0]!r} in its head; a head names text, label and perhaps language"
                )
            name = path.name.rpartition("-")[0]
            rows = [Row(line["text"] or "", line["label"] or "", line.get("language") or name) for line in reader]
    except OSError as error:
        problem = "missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise UserError(f"{path}: {problem}; every table has a training and a test part") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    if not rows:
        raise UserError(f"{path}: holds no sentence")
    return rows
