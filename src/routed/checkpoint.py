"""The unfinished batch on disk: its runs and its whole state, saved with Orbax after every chunk.

A checkpoint is a directory that appears by one rename, with a digest of its files. The last two are kept, so a damaged
one costs a chunk, not the batch.
"""

from __future__ import annotations

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


def save(root: pathlib.Path, number: int, runs: list[str], state: Any) -> None:
    """Saves `state` of the batch `runs` (keys) after chunk `number`, and removes all but the last two.

    Raises:
      UserError: the disk is full or read-only.
    """
    beside, target = root / ".writing", root / f"{number:06d}"
    with files.explained(target):
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        with _quiet():
            ocp.save(beside.absolute() / "state", state)
        (beside / "meta.json").write_text(json.dumps({"runs": runs, "chunk": number, "digest": files.digest(beside / "state")}))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(beside, target)
    for old in _saved(root)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def latest(root: pathlib.Path) -> tuple[pathlib.Path, dict] | None:
    """The newest checkpoint that is whole, with its meta data; damaged ones are named in the log and passed over."""
    for path in _saved(root):
        try:
            meta = json.loads((path / "meta.json").read_text())
            if meta["digest"] == files.digest(path / "state"):
                return path, meta
        except (OSError, ValueError, KeyError):
            pass
        log.warning("checkpoint %s is damaged: going back to the one before it", path)
    return None


def load(path: pathlib.Path, like: Any) -> Any:
    """The state saved at `path`, with the shapes and shardings of `like`."""
    with _quiet():
        return ocp.load(path.absolute() / "state", like)


def clear(root: pathlib.Path) -> None:
    """Forgets the batch: its runs are finished."""
    shutil.rmtree(root, ignore_errors=True)


def _saved(root: pathlib.Path) -> list[pathlib.Path]:
    """Newest first."""
    return sorted((p for p in root.glob("[0-9]*") if p.is_dir()), reverse=True) if root.exists() else []


class _quiet(warnings.catch_warnings):
    """Orbax reports every save in the log and warns of its own set-up; a run saves hundreds of times."""

    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")
        self.level = log.get_verbosity()
        log.set_verbosity(log.ERROR)
        logging.getLogger("orbax").setLevel(logging.ERROR)

    def __exit__(self, *error):
        log.set_verbosity(self.level)
        return super().__exit__(*error)


def abstract(state: Any) -> Any:
    """Shapes, types and shardings of a state."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
