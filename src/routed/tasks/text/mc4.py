"""mC4: its public shards, with a document a line, and `c4/multilingual` in ArrayRecord as TFDS prepared it.

Shards are named `c4-LANG[-validation].tfrecord-NNNNN-of-NNNNN.json.gz`. TensorFlow is needed for neither.
"""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator

from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.system import files
from routed.tasks.prepared import newest
from routed.tasks.text.documents import (
    Damage,
    Source,
    choose,
    file_size,
    fingerprint,
    open_file,
    size_of,
    unreadable,
    whole_fingerprint,
)

#: The name of the data set that TFDS prepares, and the records of it that are read at once.
PREPARED, BLOCK = "c4/multilingual", 256

#: Bytes of a line that are read at once: a longer line is not a document, and would fill the memory.
LONGEST = 1 << 26

#: The name of a shard, to write it and to read it.
NAME = "c4-{stem}.tfrecord-{index:05d}-of-{count:05d}.json.gz"
PATTERN = re.compile(r"c4-(.+)\.tfrecord-(\d{5})-of-(\d{5})\.json\.gz")


def mc4_jsonl(data: ConfigDict) -> Source:
    """Returns the text of the shards in `data.directory`; lines are {"text", "timestamp", "url"}.

    Raises:
      UserError: not such a directory, a language that is not in it, or a shard that is missing.
    """
    paths, directory = _listed(data.directory), files.home(data.directory)
    shards_of = defaultdict(set)  # en or en-validation -> {(index, count)}
    for path in paths:
        # Printable: a name that is not UTF-8 tells no language.
        if (match := PATTERN.fullmatch(path.name)) and path.name.isprintable():
            shards_of[match[1]].add((int(match[2]), int(match[3])))
    if not shards_of:
        example = NAME.format(stem="LANG", index=0, count=1)
        raise UserError(f"data.directory={data.directory}: no mC4 shards in it (names like {example})")

    languages = choose(data, {stem.removesuffix("-validation") for stem in shards_of})
    stems = {(language, "train"): language for language in languages}
    stems |= {(language, "validation"): f"{language}-validation" for language in languages}
    shards = {key: _complete(directory, stem, shards_of[stem]) for key, stem in stems.items()}
    for language in languages:
        _refuse_same(shards[language, "train"], shards[language, "validation"])

    def documents(language: str, split: str, damage: Damage) -> Iterator[str]:
        for path in shards[language, split]:
            yield from _read(path, damage)

    return Source(
        languages,
        documents,
        lambda language, split: fingerprint(shards[language, split]),
        lambda language: sum(file_size(path) for path in shards[language, "train"]),
    )


def _listed(name: str) -> list[pathlib.Path]:
    directory = files.home(name)
    try:
        if name and directory.is_dir():
            return list(directory.iterdir())
        problem = "no such folder"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise UserError(f"data.directory={name!r}: {problem}; name the one that holds mC4's shards")


def _complete(directory: pathlib.Path, stem: str, shards: set[tuple[int, int]]) -> list[pathlib.Path]:
    """Returns the paths of a complete set, in order; raises UserError for a missing shard or for two mixed sets."""
    counts = sorted({count for _, count in shards})
    if len(counts) > 1:
        raise UserError(
            f"data.directory={directory}: c4-{stem} has shards of {len(counts)} different sets "
            f"(of {' and of '.join(map(str, counts))}): keep one set"
        )
    count = counts[0] if counts else 1
    missing = sorted(set(range(count)) - {index for index, _ in shards})
    if missing:
        first = NAME.format(stem=stem, index=missing[0], count=count)
        raise UserError(
            f"data.directory={directory}: {len(missing)} of {count} shards of c4-{stem} missing, first {first}: "
            "fetch them, or leave the language out of data.languages"
        )
    return [directory / NAME.format(stem=stem, index=index, count=count) for index in range(count)]


def _refuse_same(train: list[pathlib.Path], held_out: list[pathlib.Path]) -> None:
    """Raises UserError if a shard of training is held out for validation too."""
    for path, valid in itertools.product(train, held_out):
        if file_size(path) == file_size(valid) and whole_fingerprint(path) == whole_fingerprint(valid):
            raise UserError(f"{valid} is the same file as {path.name}: what is held out must not be trained on")


def _read(path: pathlib.Path, damage: Damage) -> Iterator[str]:
    """Yields the texts of a shard up to the point of damage."""
    good = bad = 0
    with open_file(path) as raw:
        end = "" if size_of(raw) else "empty file"  # gzip would read an empty text
        try:
            with gzip.open(raw) as file:
                while line := file.readline(LONGEST):
                    try:
                        text = json.loads(line)["text"]
                        text.encode()  # half a surrogate pair is valid JSON and no text
                    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                        bad += 1
                        continue
                    good += 1
                    yield text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            end = str(error)
        except OSError as error:
            raise unreadable(path, error) from error
    if end:
        damage(f"{path.name} is damaged after {good} documents ({end})")
    if bad:
        damage(f"{path.name} has {bad} lines that are not JSON with a text, beside {good} that are")


def tfds(data: ConfigDict) -> Source:
    """Returns the text of the newest version below `data.directory`, TFDS's data_dir; splits: LANG, LANG-validation.

    Raises:
      UserError: no prepared data set, another format than ArrayRecord, or a shard that is missing.
    """
    builder, folder = newest(data.directory, PREPARED)
    splits = builder.info.splits
    languages = choose(data, {name for name in splits if f"{name}-validation" in splits})

    def paths(language: str, split: str) -> list[pathlib.Path]:
        return [pathlib.Path(path) for path in splits[_name(language, split)].filepaths]

    for language in languages:
        if missing := [
            path for split in ("train", "validation") for path in paths(language, split) if not path.exists()
        ]:
            raise UserError(
                f"data.directory={data.directory}: {len(missing)} shards of {language} missing, first {missing[0]}: "
                "prepare the data set again, or leave the language out of data.languages"
            )

    def documents(language: str, split: str, damage: Damage) -> Iterator[str]:
        name = _name(language, split)
        if not splits[name].num_examples:
            return
        records = builder.as_data_source(split=name)
        lost, reason = 0, ""
        for start in range(0, len(records), BLOCK):
            block = range(start, min(start + BLOCK, len(records)))
            try:
                texts = [record["text"].decode(errors="replace") for record in records.__getitems__(block)]
            except RuntimeError as error:  # ArrayRecord verifies a checksum
                lost, reason = lost + len(block), str(error)
                continue
            yield from texts
        if lost:
            damage(f"{lost} of {len(records)} documents of {PREPARED}, split {name}, cannot be read ({reason})")

    return Source(
        languages,
        documents,
        lambda language, split: fingerprint([folder / "dataset_info.json", *paths(language, split)]),
        lambda language: int(splits[language].num_bytes),
    )


def _name(language: str, split: str) -> str:
    return language if split == "train" else f"{language}-validation"
