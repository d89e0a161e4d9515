"""The folder of what is expensive to make again: trained tokenizers and tokenised text, by the hash of what made them.

An entry is a file and a note beside it, whose digest covers both: a damaged entry is never used, but named and made
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
    """`data.cache`, made if need be.

    Raises:
      UserError: nothing can be written there.
    """
    path = pathlib.Path(data.cache or "~/.cache/routed")
    try:
        path = path.expanduser()
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(0, "not writable")
    except (OSError, RuntimeError) as error:  # the latter where nobody has the name behind ~
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"data.cache={path}: cannot be used ({reason}); name another folder") from error
    return path


def key(*parts: str) -> str:
    """A short hash, for a file name."""
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:24]


def store(path: pathlib.Path, content: bytes | Callable[[pathlib.Path], None], note: dict[str, Any]) -> None:
    """Keeps an entry.

    Its note, which `content` may still change while it writes, comes last: without it there is no entry.
    """
    _write(path, content)
    _write(_beside(path), json.dumps(note | {"digest": _digest(path, note)}).encode())


def note_of(path: pathlib.Path) -> dict[str, Any] | None:
    """The note of a whole entry; None where there is none, or a damaged one, which the log names."""
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
    """`files.write` for several processes that may make the same file at the same time: each writes its own first."""
    own = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        files.write(own, content)
        if path.is_dir():
            files.remove(path)
        os.replace(own, path)
    finally:
        for left in (own, own.with_name(f".{own.name}.writing")):
            left.unlink(missing_ok=True)
