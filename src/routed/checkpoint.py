"""The unfinished batch on disk: its runs and its whole state, saved with Orbax after every chunk.

A checkpoint is a directory that appears by one rename, with a digest of its files. The last two are kept, so a damaged
one costs a chunk, not the batch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import shutil
import warnings
from typing import Any

import jax
from absl import logging as log
from orbax.checkpoint import v1 as ocp

from routed import files

KEPT = 2

# Orbax reports every save, and a failed one with a traceback from each of its threads, also after `save` has raised.
log.get_absl_logger().addFilter(lambda record: "orbax" not in pathlib.Path(record.pathname).parts)
logging.getLogger("orbax").setLevel(logging.CRITICAL)


def save(root: pathlib.Path, number: int, runs: list[str], state: Any) -> None:
    """Saves `state` of the batch `runs` (keys) after chunk `number`, and removes all but the last two.

    Raises:
      UserError: the disk is full or read-only.
    """
    beside, target = root / ".writing", root / f"{number:06d}"
    with files.explained(target):
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        try:
            with _quiet():
                ocp.save(beside.absolute() / "state", state)
            meta = {"runs": runs, "chunk": number, "form": _form(state)}
            (beside / "meta.json").write_text(json.dumps(meta | {"digest": _seal(meta, beside)}))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(beside, target)
        except Exception:
            shutil.rmtree(beside, ignore_errors=True)  # half a checkpoint would keep a full disk full
            raise
    for other in _saved(root):  # older ones, and later ones of a batch that was finished or damaged
        if not number - KEPT < int(other.name) <= number:
            shutil.rmtree(other, ignore_errors=True)


def latest(root: pathlib.Path) -> tuple[pathlib.Path, dict] | None:
    """The newest checkpoint that is whole, with its meta data; damaged ones are named in the log and passed over."""
    for path in _saved(root):
        try:
            meta = json.loads((path / "meta.json").read_text())
            if meta.pop("digest") == _seal(meta, path):
                return path, meta
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            pass
        log.warning("checkpoint %s is damaged: going back to the one before it, or to the start of its batch", path)
    return None


def load(path: pathlib.Path, meta: dict, like: Any) -> Any | None:
    """The state saved at `path`, with the shardings of `like`; None when its keys, shapes or types are others.

    Compared beforehand, not left to Orbax, whose reading threads report a misfit on their own.
    """
    if meta.get("form") != _form(like):  # none: saved before there was one
        log.warning("checkpoint %s does not fit this program: starting its batch again", path)
        return None
    with _quiet():
        return ocp.load(path.absolute() / "state", like)


def clear(root: pathlib.Path) -> None:
    """Forgets the batch: its runs are finished."""
    shutil.rmtree(root, ignore_errors=True)


def _saved(root: pathlib.Path) -> list[pathlib.Path]:
    """Newest first."""
    return sorted((p for p in root.glob("[0-9]" * 6) if p.is_dir()), reverse=True) if root.exists() else []


def _form(state: Any) -> str:
    """A digest of the keys, shapes and types of a state."""
    leaves = [
        (jax.tree_util.keystr(key), a.shape, str(a.dtype)) for key, a in jax.tree_util.tree_leaves_with_path(state)
    ]
    return hashlib.sha256(json.dumps(leaves).encode()).hexdigest()


def _seal(meta: dict, path: pathlib.Path) -> str:
    """A digest of the meta data and of the state beside it."""
    return hashlib.sha256(json.dumps([meta, files.digest(path / "state")], sort_keys=True).encode()).hexdigest()


class _quiet(warnings.catch_warnings):
    """Orbax warns of its own set-up; a run saves hundreds of times."""

    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")


def abstract(state: Any) -> Any:
    """Shapes, types and shardings of a state."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
