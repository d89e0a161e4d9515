"""Sources of text: documents of a language, one after the other, and a fingerprint of the documents."""

from __future__ import annotations

import hashlib
import os
import pathlib
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from io import BufferedReader
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from routed.contracts import UserError, nearest

SPLITS = ("train", "validation")

#: A split that a source may have beside SPLITS.
TEST = "test"

#: Bytes at both ends of a file that its fingerprint reads. The end of a gzip file is the checksum of all of it.
EDGE = 4096

#: Takes one line for each damaged file; may raise.
Damage = Callable[[str], None]


class Source(NamedTuple):
    """Text by language and split."""

    languages: tuple[str, ...]
    documents: Callable[[str, str, Damage], Iterator[str]]  # of language and split, in a fixed order
    fingerprint: Callable[[str, str], str]  # of language and split: changes when the texts do
    size: Callable[[str], int]  # of a language: roughly proportional to its training text
    splits: tuple[str, ...] = SPLITS


def choose(data: ConfigDict, available: Collection[str]) -> tuple[str, ...]:
    """Returns the languages of `data.languages`, each once and in order; all, sorted, if the setting is empty.

    Raises:
      UserError: a language is not available.
    """
    for language in data.languages:
        if language not in available:
            names = ", ".join(sorted(available))
            raise UserError(f"data.languages: no {language!r}{nearest(language, available)}; there are: {names}")
    return tuple(dict.fromkeys(data.languages)) or tuple(sorted(available))


def shares(sizes: Sequence[int], temperature: float) -> Float[np.ndarray, " N"]:
    """Computes the probability of each language: size^(1/temperature), normalised; 1 is natural, infinity uniform."""
    logs = np.log(np.maximum(sizes, 1))
    power = np.exp((logs - logs.max()) / temperature)  # relative to the largest, as 10^6 to the power 1000 is infinite
    return power / power.sum()


def whole_fingerprint(path: pathlib.Path) -> str:
    """Hashes the whole content of a file, for plain text, which may be edited anywhere."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(paths: Iterable[pathlib.Path]) -> str:
    """Hashes names, sizes and both ends of files: cheap, and independent of their folder.

    For formats that end in a checksum, or that nobody edits.
    """
    total = hashlib.sha256()
    for path in paths:
        with open_file(path) as file:
            size = size_of(file)
            total.update(f"{path.name} {size} ".encode(errors="surrogateescape"))
            total.update(file.read(EDGE))
            file.seek(max(size - EDGE, 0))
            total.update(file.read(EDGE))
    return total.hexdigest()


def open_file(path: pathlib.Path) -> BufferedReader:
    """Opens a file of text.

    Raises:
      UserError: it cannot be read, or is a folder, a pipe, a link that leads nowhere.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "not a file")
        return open(path, "rb")
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: pathlib.Path, error: OSError) -> UserError:
    """Returns the error for a file or a folder of text that cannot be read."""
    return UserError(
        f"cannot read {path} ({error.strerror}): make it readable, or leave its language out of data.languages"
    )


def size_of(file: BinaryIO) -> int:
    """Returns the number of bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def file_size(path: pathlib.Path) -> int:
    """Returns the number of bytes of a file.

    Raises:
      UserError: as `open_file`.
    """
    with open_file(path) as file:
        return size_of(file)


def damage_rule(data: ConfigDict, damaged: list[str]) -> Damage:
    """Returns the rule of `data.damaged`: `skip` collects a damaged file in `damaged`, `refuse` raises UserError."""

    def report(line: str) -> None:
        if data.damaged == "refuse":
            raise UserError(f"{line}: fetch it again, or set data.damaged=skip (now refuse) to do without the rest")
        damaged.append(line)

    return report


def because(damaged: Sequence[str]) -> str:
    """Returns the end of a sentence: the number of damaged files and the first file; empty if no file is damaged."""
    more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
    return f": {len(damaged)} damaged files: {damaged[0]}{more}" if damaged else ""
