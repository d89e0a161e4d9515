"""Published results judged anew from their values per seed, and compared with what is committed."""

from __future__ import annotations

import csv
import io
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from routed.analysis import answer
from routed.contracts import UserError
from routed.publish import committed, per_seed, published
from routed.system import files, stored

#: Largest relative difference of numbers that count as equal: other machines round in another way.
ROUNDING = 1e-6


def rejudge(root: pathlib.Path, is_written: bool, named: Sequence[str] = ()) -> bool:
    """Prints a line for each result: it agrees, what differs, or that it has no values per seed; True if all agree.

    If `is_written`, results that differ are stored, and the pages are made again. `named` are users' experiments.

    Raises:
      UserError: no result is there.
    """
    folders = [path.parent for path in sorted((root / "data").glob("*/arms.csv"))]
    if not folders:
        raise UserError(f"{root / 'data'} holds no results: name the folder of result pages")
    agreeing, missing = 0, 0
    for folder in folders:
        if not (folder / per_seed.TABLE).exists():
            files.tell(f"{folder.name}: no values per seed")
            missing += 1
            continue
        tables = committed.judged(folder, named)
        changes = differences(folder, tables)
        files.tell(f"{folder.name}: {'differs: ' + '; '.join(changes) if changes else 'agrees'}")
        agreeing += not changes
        if changes and is_written:
            committed.store(folder, tables)
    pages = published.pages(root).items()
    old_pages = [path for path, text in pages if not (path.is_file() and path.read_bytes() == text.encode())]
    for path in old_pages:
        files.tell(f"{path.name}: differs from its tables")
    if is_written:
        published.write_pages(root)
    differing = len(folders) - agreeing - missing
    files.tell(f"{agreeing} agree, {differing} differ, {missing} have no values per seed")
    return not (differing or old_pages)


def differences(folder: pathlib.Path, tables: dict[str, str]) -> list[str]:
    """Returns a text for each difference of the committed tables of a result from others: old and new."""
    old, new = answer.read(folder), json.loads(tables["claims.json"])
    changes = _changed_claims(*({(claim["id"], claim["statement"]): claim for claim in part} for part in (old, new)))
    about = stored.read(folder / "about.json", committed.ABOUT, committed.RESTORE)
    fresh = json.loads(tables["about.json"])
    for name in ("rules", "gap_at", "gap", "shares", "experts"):
        if not _equal(about.get(name), fresh[name]):
            numbers = f" was {about.get(name)}, is {fresh[name]}" if name == "rules" else " is another"
            changes.append(name + numbers)
    lines = [published.read_arms(folder), [*csv.reader(io.StringIO(tables[committed.LAST]))]]
    if lines[0] != lines[1]:
        cells = (f"{a} is now {b}" for x, y in zip(*lines, strict=False) for a, b in zip(x, y, strict=False) if a != b)
        changes.append(f"the losses by arm: {next(cells, 'another number of lines')}")
    return changes


def _changed_claims(old: dict[Any, dict[str, Any]], new: dict[Any, dict[str, Any]]) -> list[str]:
    """Returns a text for each claim that is in one of both only, or whose record differs."""
    changes = [f"{key[0]} is no claim now" for key in old if key not in new]
    for key, claim in new.items():
        if key not in old:
            changes.append(f"{key[0]} is new: {claim['verdict']}")
        elif parts := [name for name in claim if not _equal(old[key].get(name), claim[name])]:
            name = "verdict" if "verdict" in parts else parts[0]
            reason = f" ({claim['reason']})" if name == "verdict" and claim["reason"] else ""
            changes.append(f"{key[0]}: {name} was {old[key].get(name)!r}, is {claim[name]!r}{reason}")
    return changes


def _equal(old: Any, new: Any) -> bool:
    """True if two values of JSON are equal, numbers up to rounding."""
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=ROUNDING, abs_tol=ROUNDING**2)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_equal, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_equal(old[key], new[key]) for key in old)
    return bool(old == new)
