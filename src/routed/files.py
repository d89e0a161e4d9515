"""Files that appear whole or not at all, and errors of the disk in one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator

from routed.words import UserError

#: Errors of the disk that another folder mends, in the order in which they are looked for.
ELSEWHERE = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.EIO,
)


def write(path: pathlib.Path, content: str | bytes | Callable[[pathlib.Path], None]) -> None:
    """Writes beside `path`, flushes to disk, then renames. `content` may be a function that writes to a path.

    Raises:
      UserError: the disk is full or read-only.
    """
    beside = path.with_name(f".{path.name}.writing")
    with explained(path):
        try:
            if callable(content):
                content(beside)
            else:
                beside.write_bytes(content.encode() if isinstance(content, str) else content)
            with open(beside, "rb") as file:
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()  # half a file would keep a full disk full
            raise


@contextlib.contextmanager
def explained(path: pathlib.Path) -> Iterator[None]:
    """Turns an error of the disk into one line that says what to do.

    Libraries wrap the error (Orbax raises ValueError from TensorStore), so the text of the chain is searched as well.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(e) for e in _causes(error))
        codes = {e.errno for e in _causes(error) if isinstance(e, OSError)}
        if codes & {errno.ENOSPC, errno.EDQUOT} or "No space left" in text or "RESOURCE_EXHAUSTED" in text:
            raise UserError(
                f"disk full while writing {path}: free some space and run the same command; finished runs are kept"
            ) from error
        for code in ELSEWHERE:
            if code in codes or os.strerror(code) in text:
                raise UserError(f"cannot use {path} ({os.strerror(code).lower()}): choose another --workdir") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
    """Holds the directory for this process; the kernel lets go when the process ends, however it ends.

    Raises:
      UserError: another process holds it.
    """
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / ".lock", "ab+", buffering=0)  # noqa: SIM115 (open as long as the lock is held)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "unknown"
            raise UserError(
                f"workdir {directory} is in use by process {holder}: wait for it, stop it, or choose another --workdir"
            ) from None
        with explained(directory):
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        yield


def digest(directory: pathlib.Path) -> str:
    """A hash of the names and contents of all files below `directory`."""
    total = hashlib.sha256()
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        total.update(str(path.relative_to(directory)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()
