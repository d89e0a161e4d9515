"""The cache of trained tokenizers and tokenised text, named by a hash of their inputs.

An entry is a file and a note beside the file. The note has a digest of both: a damaged entry is reported and made
again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.system import files


def folder(data: ConfigDict) -> pathlib.Path:
    """Returns the folder `data.cache`, which is made if it does not exist.

    Raises:
      UserError: nothing can be written there.
    """
    path = files.home(data.cache or "~/.cache/routed")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(0, "not writable")
    except OSError as error:
        raise UserError(f"data.cache={path}: cannot be used ({error.strerror}); name another folder") from error
    return path


def key(*parts: str) -> str:
    """Returns a short hash for a file name."""
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:24]


def store(path: pathlib.Path, content: bytes | Callable[[pathlib.Path], None], note: dict[str, Any]) -> None:
    """Writes an entry, with its note last: an entry without a note does not count.

    `content` may change the note while it writes.
    """
    _write(path, content)
    _write(_beside(path), json.dumps(note | {"digest": _digest(path, note)}).encode())


def note_of(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the note of a complete entry; None if the entry is missing or damaged. The log names a damaged entry."""
    if not os.path.lexists(path) or not os.path.lexists(_beside(path)):
        return None
    try:
        note = json.loads(_beside(path).read_text("utf-8"))
        if note.pop("digest") == _digest(path, note):
            return note
        problem = "its digest is another"
    except OSError as error:
        problem = str(error.strerror)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        problem = "its note cannot be read"
    log.warning("%s is damaged (%s): it is made again", path, problem)
    return None


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".json")


def _digest(path: pathlib.Path, note: dict[str, Any]) -> str:
    begun = hashlib.sha256(json.dumps(note, sort_keys=True).encode())
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: begun).hexdigest()


def _write(path: pathlib.Path, content: bytes | Callable[[pathlib.Path], None]) -> None:
    """Writes a file that other processes may write at the same time: each process writes a file of its own first."""
    private = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        files.write(private, content)
        if path.is_dir():
            files.remove(path)
        os.replace(private, path)
    finally:
        for left in (private, private.with_name(f".{private.name}.writing")):
            left.unlink(missing_ok=True)
