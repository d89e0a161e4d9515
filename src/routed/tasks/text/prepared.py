"""A data set that TFDS prepared: `c4/multilingual` in ArrayRecord, read without TensorFlow."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.tasks.prepared import newest
from routed.tasks.text.documents import Damage, Source, choose, fingerprint

NAME = "c4/multilingual"

#: Records that are read at once.
BLOCK = 256


def tfds(data: ConfigDict) -> Source:
    """Returns the text of the newest version below `data.directory`, TFDS's data_dir; splits: LANG, LANG-validation.

    Raises:
      UserError: no prepared data set, another format than ArrayRecord, or a shard that is missing.
    """
    builder, folder = newest(data.directory, NAME)
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
            damage(f"{lost} of {len(records)} documents of {NAME}, split {name}, cannot be read ({reason})")

    return Source(
        languages,
        documents,
        lambda language, split: fingerprint([folder / "dataset_info.json", *paths(language, split)]),
        lambda language: int(splits[language].num_bytes),
    )


def _name(language: str, split: str) -> str:
    return language if split == "train" else f"{language}-validation"
