"""Plain text: `train.txt`, `valid.txt` and `test.txt` in a folder, like enwik8, text8 and WikiText.

UTF-8; a file may be one long line.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import BinaryIO

from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.system.files import home
from routed.tasks.text.documents import Damage, Source, choose, file_size, open_file, size_of, whole_fingerprint

#: split -> its file.
FILES = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}

#: The name of the only language, which plain files do not tell.
LANGUAGE = "text"

#: Least number of bytes of a piece, which is tokenised as one text.
PIECE = 1 << 16


def files(data: ConfigDict) -> Source:
    """Returns the text of the three files of `data.directory`; a piece ends behind a space or a line.

    The log warns of a file that is the begin or the end of another file.

    Raises:
      UserError: a file that is missing, cannot be read, or is not UTF-8.
    """
    directory = home(data.directory)
    paths = {split: directory / name for split, name in FILES.items()}
    if missing := [path.name for path in paths.values() if not path.exists()]:
        raise UserError(
            f"data.directory={data.directory}: no {missing[0]} in it; data.name=files reads {', '.join(FILES.values())}"
        )

    for pair in itertools.combinations(paths.values(), 2):
        whole, part = sorted(pair, key=lambda path: path.stat().st_size, reverse=True)
        if _begins_or_ends_with(whole, part):
            log.warning(
                "%s: all of %s is in %s too: what is held out has been seen; split the text without overlap",
                directory,
                part.name,
                whole.name,
            )

    def documents(language: str, split: str, damage: Damage) -> Iterator[str]:
        return _pieces(paths[split])

    return Source(
        choose(data, (LANGUAGE,)),
        documents,
        lambda language, split: whole_fingerprint(paths[split]),
        lambda language: file_size(paths["train"]),
        tuple(FILES),
    )


def _begins_or_ends_with(whole: pathlib.Path, part: pathlib.Path) -> bool:
    """True if `part` equals the begin or the end of `whole`. A part from the middle would take a search."""
    with open_file(whole) as file, open_file(part) as part_file:
        size, room = size_of(part_file), size_of(file) - size_of(part_file)
        return size > 0 <= room and any(_equal_from(file, start, part_file) for start in {0, room})


def _equal_from(file: BinaryIO, start: int, part_file: BinaryIO) -> bool:
    file.seek(start), part_file.seek(0)
    return all(part == file.read(len(part)) for part in iter(lambda: part_file.read(PIECE), b""))


def _pieces(path: pathlib.Path) -> Iterator[str]:
    with open_file(path) as file:
        left = b""
        while read := file.read(PIECE):
            read = left + read
            end = 1 + max(read.rfind(b" "), read.rfind(b"\n"))  # in UTF-8 neither byte is part of another character
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
