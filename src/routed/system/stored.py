"""Files that come back from a disk or from somebody else: JSON of a known form, and digests that tell edits."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging as log

from routed.contracts import UserError
from routed.system import files

#: The field of a JSON file with the digest of the others, and the file with the digests of a folder's tables.
DIGEST, DIGESTS = "digest", ".digests.json"
#: A type, a test, [form] of each element, {str: form} of each value, or {name: form}, where "name?" may be missing.
Form = Any
#: True where a command reads edited files as they are, and tells of each.
ACCEPTS_EDITS = contextvars.ContextVar("edits are accepted", default=False)


def number(value: Any) -> bool:
    """True for a number that fits into a float."""
    return type(value) is float or (type(value) is int and abs(value) < 10**300)


def read(path: pathlib.Path, form: Form, mend: str, content: bytes | None = None) -> Any:
    """Returns the JSON of a file, or of its `content` where that is read already.

    Raises:
      UserError: the file is missing, no JSON, or of another form; it names the field and the way to `mend` it.
    """
    try:
        value = json.loads((path.read_bytes() if content is None else content).decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a pair of UTF-16 is in no page
        problem = _problem(value, form, "")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise UserError(f"{path} is damaged ({problem}): {mend}")
    return value


def remember(file: pathlib.Path, settings: dict[str, Any], mend: str, form: Form = {}) -> dict[str, Any]:  # noqa: B006
    """Returns the settings of the command that began a folder, from a file in it; without the file writes `settings`.

    Raises:
      UserError: the file is damaged; it names the way to `mend` it.
    """
    if file.exists():
        return read(file, form, mend)
    with files.explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    files.write(file, json.dumps(settings, indent=1) + "\n")
    return settings


def _problem(value: Any, form: Form, field: str) -> str:
    """Returns a text about the first field of another form; empty if there is none."""
    parts: list[tuple[str, Any, Form]] = []
    if isinstance(form, list | dict):
        fits = isinstance(value, list if isinstance(form, list) else dict)
    else:
        fits = form is object or (type(value) is form if isinstance(form, type) else form(value))
    if not fits:
        return f"{field or 'the file'} cannot be {json.dumps(value)[:60]}"
    if isinstance(form, list):
        parts = [(f"{field}[{index}]", each, form[0]) for index, each in enumerate(value)]
    elif isinstance(form, dict) and str in form:
        parts = [(f"{field}[{key!r}]", each, form[str]) for key, each in value.items()]
    elif isinstance(form, dict):
        if missing := [name for name in form if name not in value and not name.endswith("?")]:
            return f"{field or 'the file'} has no {missing[0]!r}"
        names = {name.removesuffix("?"): part for name, part in form.items()}
        parts = [(f"{field}.{name}".lstrip("."), value[name], part) for name, part in names.items() if name in value]
    return next(filter(None, (_problem(each, part, name) for name, each, part in parts)), "")


@contextlib.contextmanager
def fitting(what: str, mend: str, is_ours: bool = False) -> Iterator[None]:
    """Turns any error of files that are damaged or contradict each other into one line, unless they are as written."""
    try:
        yield
    except Exception as error:
        if is_ours or isinstance(error, UserError):
            raise
        first = str(error).partition("\n")[0]
        raise UserError(f"{what} cannot be used ({type(error).__name__}: {first}): {mend}") from error


def digest(content: bytes) -> str:
    """Returns the digest of a file's content."""
    return hashlib.sha256(content).hexdigest()[:32]


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a JSON file with its digest."""
    content = {key: value for key, value in content.items() if key != DIGEST}
    return content | {DIGEST: digest(json.dumps(content, default=list, sort_keys=True).encode())}


def is_sealed(content: Mapping[str, Any]) -> bool | None:
    """True if a JSON file is as a command wrote it; None if it has no digest."""
    return content[DIGEST] == sealed(content)[DIGEST] if DIGEST in content else None


def check(path: pathlib.Path, is_whole: bool | None, mend: str = "restore it") -> None:
    """Refuses a file that was edited, unless the command accepts edits; tells of one without a digest (None).

    Raises:
      UserError: names the file and the way to `mend` it.
    """
    if is_whole is None and not (path.parent / "about.json").exists():  # of published results a checkout tells
        _warn(f"{path.parent} has no digests, since an older program wrote it: an edit of its files shows nowhere")
    elif is_whole is False and ACCEPTS_EDITS.get():
        _warn(f"{path} has changed since it was written, and is read as it is")
    elif is_whole is False:
        accept = "routed report and routed findings read it as it is with --accept_edits"
        raise UserError(f"{path} has changed since it was written: {mend}; {accept}")


@functools.cache
def _warn(text: str) -> None:
    log.warning("%s", text)


def write_tables(folder: pathlib.Path, tables: Mapping[str, str]) -> None:
    """Writes tables of a folder, whose digests it notes before, beside those of the tables that it replaces."""
    noted = _noted(folder)
    for name, text in tables.items():  # a kill leaves a table with one of its two digests
        path = folder / name
        before = [digest(path.read_bytes())] if path.is_file() else []
        noted[name] = [digest(text.encode()), *(each for each in before if each in noted.get(name, before))]
    files.write(folder / DIGESTS, json.dumps(noted, indent=1) + "\n")
    for name, text in tables.items():
        files.write(folder / name, text)


def read_table(path: pathlib.Path, mend: str) -> bytes:
    """Returns the content of a table that `write_tables` wrote.

    Raises:
      UserError: it is missing, or was edited.
    """
    with files.explained(path):
        content, noted = path.read_bytes(), _noted(path.parent).get(path.name)
    check(path, None if noted is None else digest(content) in noted, mend)
    return content


def _noted(folder: pathlib.Path) -> dict[str, list[str]]:
    """Returns the noted digests; none where their file is missing or damaged."""
    try:
        return read(folder / DIGESTS, {str: [str]}, "")
    except UserError:
        return {}
