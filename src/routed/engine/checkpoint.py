"""The unfinished batch on disk, saved with Orbax: its runs and their whole state; and the parameters of finished runs.

A checkpoint is a directory that appears by one rename (in a bucket: by its last file), with a digest of its files. The
last checkpoints stay, so a damaged one costs the steps since the one before, and not the batch. A checkpoint stores
runs without the padding of their batch, so another number of devices can load it. Data and random keys are functions of
seed and step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging as log
from orbax.checkpoint import v1 as ocp

from routed.contracts import UserError
from routed.system import files, hosts
from routed.training.freezing import router_of

#: Digits of the step in a checkpoint's name.
DIGITS = 9

# Orbax logs every save, and a failed one with a traceback from each of its threads, also after `save` has raised.
log.get_absl_logger().addFilter(lambda record: "orbax" not in pathlib.Path(record.pathname).parts)

logging.getLogger("orbax").setLevel(logging.CRITICAL)


def without_late_threads(hook: Callable[..., None], error_of: Callable[..., Any]) -> Callable[..., None]:
    """Returns a hook for errors that drops those of threads of a failed save, whose event loop is closed."""

    def report(*given: Any) -> None:
        error = error_of(*given)
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(*given)

    return report


sys.excepthook = without_late_threads(sys.excepthook, lambda kind, error, trace: error)
sys.unraisablehook = without_late_threads(sys.unraisablehook, lambda failure: failure.exc_value)  # TensorStore 0.1.86


class Checkpoint(NamedTuple):
    """An undamaged checkpoint: its folder, and its meta data with the keys `runs` and `step`."""

    path: pathlib.Path
    meta: dict[str, Any]


def save(
    root: pathlib.Path,
    step: int,
    runs: list[str],
    states: Any,
    *,
    keep: int = 2,
    best: int | None = None,
    data: str = "",
) -> None:
    """Saves the first entries of `states` after `step` steps: the runs with these keys, on data with the digest `data`.

    Removes all but the last `keep` checkpoints and that of step `best`.

    Raises:
      UserError: the disk is full or read-only.
    """
    target, count = root / f"{step:0{DIGITS}d}", len(runs)
    if len(jax.tree.leaves(states)[0]) != count:
        states = jax.tree.map(lambda a: a[:count], hosts.fetch(states))
    meta = {"runs": runs, "step": step, "form": _form(states, count)} | ({"data": data} if data else {})
    _write(target, states, meta)
    if hosts.is_first():
        paths = {int(path.name): path for path in _saved(root)}
        recent = [s for s in paths if s <= step][:keep]  # later ones are of a batch that was finished or damaged
        for obsolete in paths.keys() - {*recent, best}:
            files.remove(paths[obsolete])


def save_model(target: pathlib.Path, params: Any, about: dict[str, Any]) -> None:
    """Saves the parameters of a finished run (by group, with the model's state as one more group) and its description.

    Raises:
      UserError: the disk is full or read-only.
    """
    _write(target, params, {"form": _form(params), **about})


def models(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict]]:
    """The undamaged models in a folder, by name, with their meta data; the log names damaged ones."""
    for path in sorted(folder.glob("*")):
        if (meta := _meta(path)) is not None:
            yield path, meta
        else:
            log.warning("model %s is damaged: it is passed over", path)


def digest_of(path: pathlib.Path) -> str:
    """The digest of a model: of its meta data and its state."""
    return json.loads((path / "meta.json").read_text("utf-8"))["digest"]


def load_model(path: pathlib.Path) -> dict[str, Any]:
    """Loads the parameters that `save_model` saved, as NumPy arrays."""
    with _quiet():
        return jax.tree.map(np.asarray, ocp.load(_state(path)))


def _write(target: pathlib.Path, state: Any, meta: dict) -> None:
    # In a bucket nothing is renamed: meta.json, the last file, makes the checkpoint whole.
    folder = target if files.remote(target) else target.parent / ".writing"

    def prepare() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.remove(folder)

    def finish() -> None:
        (folder / "meta.json").write_text(json.dumps(meta | {"digest": _digest(meta, folder)}), "utf-8")
        if folder != target:
            files.remove(target)
            os.replace(folder, target)

    with files.explained(target):
        hosts.once(prepare)
        try:
            with _quiet():
                ocp.save(_state(folder), state)  # every process its own part
            hosts.once(finish)
        except Exception:
            # Half a checkpoint would keep a full disk full. A whole one stays: in a bucket, a peer may die just after
            # meta.json.
            if hosts.is_first() and _meta(folder) is None:
                files.remove(folder)
            raise


def latest(root: pathlib.Path) -> Checkpoint | None:
    """The newest undamaged checkpoint; the log names damaged ones."""
    for path in _saved(root):
        if (meta := _meta(path)) is not None:
            return Checkpoint(path, meta)
        log.warning("checkpoint %s is damaged: going back to the one before it, or to the start of its batch", path)
    return None


def agreed(root: pathlib.Path) -> Checkpoint | None:
    """The `latest` checkpoint as process 0 sees it, for all processes."""
    checkpoint = latest(root) if hosts.is_first() else None
    text = f"{checkpoint.path.name} {json.dumps(checkpoint.meta)}" if checkpoint else ""
    name, _, meta = hosts.broadcast_from_first(text).partition(" ")
    return Checkpoint(root / name, json.loads(meta)) if name else None


def _meta(path: pathlib.Path) -> dict | None:
    """The meta data of a saved folder; None if the folder is damaged or missing."""
    try:
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        return meta if meta.pop("digest") == _digest(meta, path) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def load(path: pathlib.Path, meta: dict, states: Any, count: int) -> Any | None:
    """Returns `states` with the saved runs as its first `count`; None if their keys, shapes or types differ.

    Compares them beforehand, since Orbax's reading threads report a misfit on their own.
    """
    if meta.get("form") != _form(states, count):  # early checkpoints have none
        log.warning("checkpoint %s does not fit this program: starting its batch again", path)
        return None
    runs = len(jax.tree.leaves(states)[0])
    if runs == count:
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), states)
        return _read(path, like)
    like = jax.tree.map(lambda a: np.empty((count, *a.shape[1:]), a.dtype), states)

    def fill(new, old):
        padded = np.concatenate([new, *[new[:1]] * (runs - count)])
        return jax.make_array_from_callback(padded.shape, old.sharding, lambda part: padded[part])

    return jax.tree.map(fill, _read(path, like), states)


def load_router(path: pathlib.Path, like: Any) -> Any:
    """Loads the router of a saved model, in the form of `freezing.router_of`, with the shapes of `like`.

    Raises:
      UserError: the model is missing, damaged, or of another shape.
    """
    meta = _meta(path)
    if meta is None:
        raise UserError(
            f"{path} is missing or damaged, and a transplanted arm needs the router in it: choose another --workdir,"
            " where the learned runs train again with checkpoint.final=true"
        )
    stored = load_model(path)
    router = router_of(stored, stored.get("state", {}))
    if _form(router) != _form(like):
        raise UserError(f"{path} holds a router of another shape: choose another --workdir")
    return router


def _read(path: pathlib.Path, like: Any) -> Any:
    with _quiet():
        return ocp.load(_state(path), like)


def _state(path: pathlib.Path) -> pathlib.Path:
    """The folder in which Orbax stores the state of a checkpoint."""
    return (path if files.remote(path) else path.absolute()) / "state"


def _saved(root: pathlib.Path) -> list[pathlib.Path]:
    """The folders of checkpoints, newest first."""
    return sorted((p for p in root.glob("[0-9]" * DIGITS) if p.is_dir()), reverse=True) if root.exists() else []


def _form(state: Any, count: int | None = None) -> str:
    """A digest of the keys, shapes and types of a state, with `count` in place of its first axis."""
    leaves = [
        (jax.tree_util.keystr(key), a.shape if count is None else (count, *a.shape[1:]), str(a.dtype))
        for key, a in jax.tree_util.tree_leaves_with_path(state)
    ]
    return hashlib.sha256(json.dumps(leaves).encode()).hexdigest()


def _digest(meta: dict, path: pathlib.Path) -> str:
    """A digest of the meta data and of the state beside it."""
    return hashlib.sha256(json.dumps([meta, files.digest(_state(path))], sort_keys=True).encode()).hexdigest()


class _quiet(warnings.catch_warnings):
    """Silences Orbax, which warns of its own set-up at each of hundreds of saves."""

    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")
