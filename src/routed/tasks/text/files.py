"""Plain text: `train.txt`, `valid.txt` and `test.txt` in a folder, as enwik8, text8 and WikiText are laid out.

UTF-8, maybe one long line.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import BinaryIO

from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.tasks.text.documents import Damage, Source, choose, open_file, size_of, whole_fingerprint

#: split -> its file.
FILES = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}

#: The only language, as nobody says which it is.
LANGUAGE = "text"

#: Bytes of a piece of text that is tokenised as one, at least, where there is so much.
PIECE = 1 << 16


def files(data: ConfigDict) -> Source:
    """The three files of `data.directory`; a piece ends behind a space or a line.

    A file that another begins or ends with is told of.

    Raises:
      UserError: a file that is missing, cannot be read, or is not UTF-8.
    """
    directory = pathlib.Path(data.directory).expanduser()
    paths = {split: directory / name for split, name in FILES.items()}
    if missing := [path.name for path in paths.values() if not path.exists()]:
        raise UserError(
            f"data.directory={data.directory}: no {missing[0]} in it; data.name=files reads {', '.join(FILES.values())}"
        )

    for pair in itertools.combinations(paths.values(), 2):
        whole, part = sorted(pair, key=lambda path: path.stat().st_size, reverse=True)
        if _begins_or_ends_with(whole, part):
            words = "%s: all of %s is in %s too: what is held out has been seen; split the text without overlap"
            log.warning(words, directory, part.name, whole.name)

    def documents(language: str, split: str, damage: Damage) -> Iterator[str]:
        del language, damage
        return _pieces(paths[split])

    def size(language: str) -> int:
        del language
        with open_file(paths["train"]) as file:
            return size_of(file)

    return Source(
        choose(data, (LANGUAGE,)),
        documents,
        lambda language, split: whole_fingerprint(paths[split]),
        size,
        tuple(FILES),
    )


def _begins_or_ends_with(whole: pathlib.Path, part: pathlib.Path) -> bool:
    """Is a file the other's head or tail, as `head` and `tail` make one, or a copy of it? What was cut out of its middle takes a search."""
    with open_file(whole) as file, open_file(part) as other:
        size, room = size_of(other), size_of(file) - size_of(other)
        return size > 0 <= room and any(_alike_from(file, start, other) for start in {0, room})


def _alike_from(file: BinaryIO, start: int, other: BinaryIO) -> bool:
    file.seek(start), other.seek(0)
    return all(part == file.read(len(part)) for part in iter(lambda: other.read(PIECE), b""))


def _pieces(path: pathlib.Path) -> Iterator[str]:
    with open_file(path) as file:
        left = b""
        while read := file.read(PIECE):
            read = left + read
            end = 1 + max(read.rfind(b" "), read.rfind(b"\n"))  # of UTF-8 no part of another character
            piece, left = read[:end], read[end:]
            if piece:
                yield _text(piece, path)
        if left:
            yield _text(left, path)


def _text(piece: bytes, path: pathlib.Path) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error.reason}): write it in UTF-8") from error
