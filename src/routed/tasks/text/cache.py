"""The folder of what is expensive to make again: trained tokenizers and tokenised text, by the hash of what made them."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Callable

from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.system import files


def folder(data: ConfigDict) -> pathlib.Path:
    """`data.cache`, made if need be.

    Raises:
      UserError: nothing can be written there.
    """
    path = pathlib.Path(data.cache or "~/.cache/routed").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(0, "not writable")
    except OSError as error:
        raise UserError(f"data.cache={path}: cannot be used ({error.strerror}); name another folder") from error
    return path


def key(*parts: str) -> str:
    """A short hash, for a file name."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def store(path: pathlib.Path, content: bytes | Callable[[pathlib.Path], None]) -> None:
    """`files.write` for several processes that may make the same file at the same time: each writes its own first."""
    own = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        files.write(own, content)
        os.replace(own, path)
    finally:
        for left in (own, own.with_name(f".{own.name}.writing")):
            left.unlink(missing_ok=True)
