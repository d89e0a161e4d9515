"""Files that appear whole or not at all, on a disk or in a bucket, and errors of both in one line."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import fcntl
import hashlib
import io
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from routed.contracts import UserError

if TYPE_CHECKING:
    import pandas as pd

#: Errors of the disk that another folder mends; libraries may wrap them, so the texts of errors are searched for them
#: too.
FOLDER_ERRORS = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.EIO,
)

#: What the words of the system leave out.
HINTS = {
    errno.EEXIST: ", and a folder is needed",
    errno.EFBIG: ": above the limit of this shell or disk, see ulimit -f",
}

_FOLDER_FLAG = contextvars.ContextVar("folder flag", default="workdir")


@contextlib.contextmanager
def folders_by(flag: str) -> Iterator[None]:
    """Makes errors of the disk name the flag by which this command takes its folder; else it is --workdir."""
    before = _FOLDER_FLAG.set(flag)
    try:
        yield
    finally:
        _FOLDER_FLAG.reset(before)


#: Signs that move the cursor, colour text, or turn its direction.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
#: Texts that a spreadsheet takes for a formula. Numbers, intervals and signs alone are none.
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![-+0-9.,eE%\s\[\]]*$)")


def shown(text: str) -> str:
    """Returns a text for a terminal: a sign that would command it is written as its number."""
    return _UNSAFE.sub(lambda sign: f"\\x{ord(sign[0]):02x}", text)


def csv_text(table: pd.DataFrame) -> str:
    """Returns a table as CSV, with a quote before each text that a spreadsheet would take for a formula."""
    quoted = lambda cell: f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell  # noqa: E731
    texts = table.select_dtypes(exclude="number").map(quoted)
    return table.assign(**texts).rename(columns=quoted).to_csv(index=False)


def own_folder(path: pathlib.Path) -> pathlib.Path:
    """Makes a folder, and returns it.

    Raises:
      UserError: a link is in its place, whose target is of somebody else.
    """
    with explained(path):
        if not remote(path) and path.is_symlink():
            raise UserError(f"{path} is a symbolic link: nothing is written behind one; remove it")
        path.mkdir(parents=True, exist_ok=True)
    return path


def accept_any_text() -> None:
    """Makes standard output and error escape characters that their encoding lacks, as in a C locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(text: str) -> None:
    """Prints to the standard output; a reader such as `head` may close it early.

    Raises:
      UserError: the standard output takes nothing more, such as a file on a full disk.
    """
    try:
        print(shown(text), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails again as it ends
        if isinstance(error, BrokenPipeError):
            return
        raise UserError(
            f"the standard output takes nothing more ({error.strerror}): send it elsewhere; what belongs in files is"
            " written"
        ) from error


def folder(name: str | os.PathLike) -> pathlib.Path:
    """The folder of this name, on the disk or, as gs://BUCKET/..., in a bucket.

    Raises:
      UserError: the name is no text in this locale; JAX's libraries refuse such names. Or no user has it, behind `~`.
    """
    if any("\udc80" <= sign <= "\udcff" for sign in str(name)):  # Python's form of bytes that are no text
        raise UserError(
            f"folder {name!r}: its name is not UTF-8 in this locale: set PYTHONUTF8=1, or choose another name"
        )
    if "://" not in str(name):
        return home(name)
    from etils import epath  # lazily: few commands need it

    for library in ("gcsfs", "fsspec"):  # each logs its caches
        logging.getLogger(library).setLevel(logging.WARNING)
    return epath.Path(name)  # type: ignore[return-value]  # a PurePosixPath with the methods of a Path


def home(name: str | os.PathLike) -> pathlib.Path:
    """Returns the path of this name on the disk, `~` replaced: a shell leaves it in --workdir=~/runs."""
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"{name}: no user has the name behind ~; write the whole path") from error


def remote(path: pathlib.Path) -> bool:
    """True if a path is in a bucket, where an object appears whole, and nothing can be renamed or locked."""
    return "://" in str(path)


def remove(directory: pathlib.Path) -> None:
    """Removes a directory, if it exists, with everything below it."""
    if remote(directory):
        directory.rmtree(missing_ok=True)  # type: ignore[attr-defined]
    else:
        shutil.rmtree(directory, ignore_errors=True)


def copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the tree `source` to the new folder `target`: on a disk as a whole, in a bucket meta.json comes last."""
    temporary = target if remote(target) else target.with_name(f".{target.name}.writing")
    if temporary != target:
        remove(temporary)  # a kill may have left one
    try:
        for path in sorted(_files_below(source), key=lambda path: path.name == "meta.json"):
            copied = temporary / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(path.read_bytes())
        if temporary != target:
            os.replace(temporary, target)
    except OSError:
        if temporary != target:
            remove(temporary)  # half a copy would keep a full disk full
        raise


def write(path: pathlib.Path, content: str | bytes | Callable[[pathlib.Path], None]) -> None:
    """Writes a temporary file, flushes it to disk, then renames it. `content` may be a function that writes to a path.

    Raises:
      UserError: the disk is full or read-only; no such bucket, or no right to it.
    """
    if remote(path):
        with explained(path):
            if callable(content):
                with tempfile.TemporaryDirectory() as local:
                    content(pathlib.Path(local, path.name))
                    content = pathlib.Path(local, path.name).read_bytes()
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    temporary = path.with_name(f".{path.name}.writing")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if temporary.is_symlink():  # of somebody else, who means another file
                temporary.unlink()
            if callable(content):
                content(temporary)
            else:
                temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()  # half a file would keep a full disk full
            raise


@contextlib.contextmanager
def explained(path: pathlib.Path) -> Iterator[None]:
    """Turns an error of the disk into a UserError that says how to mend it.

    Libraries wrap the error (Orbax raises ValueError from TensorStore), so the text of the chain is searched as well.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, ImportError) and remote(path):
            raise UserError(f"cannot use {path}: install what reads buckets: pip install '.[gcs]'") from error
        is_peer_lost = isinstance(error, RuntimeError) or "Gloo" in str(error)  # JAX's errors when a process died
        if remote(path) and not is_peer_lost:
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"cannot use {path} ({first}): check the bucket's name and your right to it (gcloud auth"
                f" application-default login), or choose another --{_FOLDER_FLAG.get()}"
            ) from error
        text = " ".join(str(e) for e in _causes(error))
        codes = {e.errno for e in _causes(error) if isinstance(e, OSError) and e.errno}
        if codes & {errno.ENOSPC, errno.EDQUOT} or "No space left" in text or "RESOURCE_EXHAUSTED" in text:
            raise UserError(
                f"disk full while writing {path}: free some space and run the same command; finished runs are kept"
            ) from error
        for code in (*codes, *FOLDER_ERRORS):
            if code in codes or os.strerror(code) in text:
                reason = os.strerror(code).lower() + HINTS.get(code, "")
                raise UserError(f"cannot use {path} ({reason}): choose another --{_FOLDER_FLAG.get()}") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def locked(directory: pathlib.Path, flag: str = "workdir") -> Iterator[None]:
    """Locks the directory that a flag names; the kernel releases the lock when the process ends. Buckets have no lock.

    Raises:
      UserError: another process has the lock, or the file system has no locks.
    """
    if remote(directory):
        yield
        return
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
                f"{flag} {directory} is in use by process {holder}: wait for it, stop it, or choose another --{flag}"
            ) from None
        except OSError as error:  # Lustre and NFS with some mount options
            raise UserError(
                f"{flag} {directory} cannot be locked ({os.strerror(error.errno or 0).lower()}), so two commands"
                f" might write into it: choose another --{flag}, on a file system with locks"
            ) from error
        with explained(directory):
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        yield


def digest(directory: pathlib.Path) -> str:
    """A hash of names and contents of all files below `directory`; of sizes in a bucket, which checks contents."""
    total = hashlib.sha256()
    for path in _files_below(directory):
        total.update(str(path.relative_to(directory)).encode())
        if remote(path):
            total.update(str(path.stat().length).encode())  # type: ignore[attr-defined]
        else:
            total.update(path.read_bytes())
    return total.hexdigest()


def _files_below(directory: pathlib.Path) -> list[pathlib.Path]:
    """All files below a directory; without rglob, which buckets refuse."""
    by_entry = [_files_below(path) if path.is_dir() else [path] for path in directory.iterdir()]
    return sorted(path for paths in by_entry for path in paths)
