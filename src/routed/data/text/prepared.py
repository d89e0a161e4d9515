"""A data set that TFDS prepared: `c4/multilingual` in ArrayRecord, read without TensorFlow."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from routed.data.text.documents import Damage, Source, choose, fingerprint
from routed.words import UserError

NAME = "c4/multilingual"

#: Records read at once.
BLOCK = 256


def tfds(data: ConfigDict) -> Source:
    """The newest version below `data.directory`, TFDS's data_dir; splits are called LANG and LANG-validation.

    Raises:
      UserError: nothing prepared there, another format than ArrayRecord, or a shard that is missing.
    """
    import tensorflow_datasets  # here, as it costs half a second

    infos = pathlib.Path(data.directory).expanduser().glob(f"{NAME}/*/dataset_info.json") if data.directory else ()
    folders = sorted((path.parent for path in infos), key=_version)
    if not folders:
        raise UserError(
            f"data.directory={data.directory!r}: no {NAME}/VERSION/dataset_info.json in it; name the data_dir of a "
            f"TFDS that prepared {NAME}"
        )
    builder = tensorflow_datasets.builder_from_directory(folders[-1])
    wanted = tensorflow_datasets.core.FileFormat.ARRAY_RECORD
    if wanted not in builder.info.available_file_formats():
        raise UserError(
            f"data.directory={data.directory}: {folders[-1]} is prepared as {builder.info.file_format.value}; convert it "
            "where TensorFlow is installed: python -m tensorflow_datasets.scripts.convert_format "
            f"--dataset_version_dir={folders[-1]} --out_file_format=array_record"
        )
    if builder.info.file_format != wanted:
        builder.info.set_file_format(wanted, override=True, override_if_initialized=True)

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
            except RuntimeError as error:  # ArrayRecord compares the checksum of what it reads
                lost, reason = lost + len(block), str(error)
                continue
            yield from texts
        if lost:
            damage(f"{lost} of {len(records)} documents of {NAME}, split {name}, cannot be read ({reason})")

    return Source(
        languages,
        documents,
        lambda language, split: fingerprint([folders[-1] / "dataset_info.json", *paths(language, split)]),
        lambda language: int(splits[language].num_bytes),
    )


def _name(language: str, split: str) -> str:
    return language if split == "train" else f"{language}-validation"


def _version(folder: pathlib.Path) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in folder.name.split("."))
