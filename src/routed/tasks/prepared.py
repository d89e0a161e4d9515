"""A data set that TFDS prepared, opened without TensorFlow."""

from __future__ import annotations

import pathlib
from typing import Any

from routed.contracts import UserError
from routed.system import files


def newest(directory: str, name: str) -> tuple[Any, pathlib.Path]:
    """Returns the builder of the newest version of `name` below TFDS's data_dir, for ArrayRecord, and its folder.

    Raises:
      UserError: the data set is missing, or has a format that only TensorFlow reads.
    """
    import tensorflow_datasets as tfds  # imported here, since the import takes half a second

    infos = files.home(directory).glob(f"{name}/*/dataset_info.json") if directory else ()
    folders = sorted((path.parent for path in infos), key=_version)
    if not folders:
        raise UserError(
            f"data.directory={directory!r}: no {name}/VERSION/dataset_info.json in it; name the data_dir of a TFDS that"
            f" prepared {name}"
        )
    try:
        builder, wanted = tfds.builder_from_directory(folders[-1]), tfds.core.FileFormat.ARRAY_RECORD
    except Exception as error:  # damaged JSON raises errors of TFDS, protobuf or the disk
        raise UserError(
            f"data.directory={directory}: {folders[-1]} cannot be read ({type(error).__name__}); prepare {name} again"
        ) from error
    if wanted not in builder.info.available_file_formats():
        raise UserError(
            f"data.directory={directory}: {folders[-1]} is prepared as {builder.info.file_format.value}; convert it"
            " where TensorFlow is installed: python -m tensorflow_datasets.scripts.convert_format"
            f" --dataset_version_dir={folders[-1]} --out_file_format=array_record"
        )
    if builder.info.file_format != wanted:
        builder.info.set_file_format(wanted, override=True, override_if_initialized=True)
    return builder, folders[-1]


def _version(folder: pathlib.Path) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in folder.name.split("."))
