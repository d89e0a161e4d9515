"""The unfinished batch on disk: its runs and their whole state, saved with Orbax; and the parameters of finished runs.

A checkpoint is a directory that appears by one rename (in a bucket: by its last file), with a digest of its files. The last
ones are kept, so a damaged one costs the steps since the one before it, not the batch. It holds runs, not places in a batch, so
another number of devices may go on with it. Data and random keys are functions of seed and step: the step is their whole state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging as log
from orbax.checkpoint import v1 as ocp

from routed.contracts import UserError
from routed.system import files, hosts
from routed.training.freezing import router_of

#: Of the step in a checkpoint's name.
DIGITS = 9

# Orbax reports every save, and a failed one with a traceback from each of its threads, also after `save` has raised.
log.get_absl_logger().addFilter(lambda record: "orbax" not in pathlib.Path(record.pathname).parts)

logging.getLogger("orbax").setLevel(logging.CRITICAL)


def _hook(kind, error, trace, before=sys.excepthook) -> None:
    """What threads of a failed save report too late, to a loop of events that is gone, is left out."""
    if not (kind is RuntimeError and str(error) == "Event loop is closed"):
        before(kind, error, trace)


sys.excepthook = _hook


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
    """Saves the first places of `states` after `step` steps: the runs with these keys, on data with the digest `data`.

    Removes all but the last `keep` checkpoints and the one of step `best`.

    Raises:
      UserError: the disk is full or read-only.
    """
    target, count = root / f"{step:0{DIGITS}d}", len(runs)
    if len(jax.tree.leaves(states)[0]) != count:
        states = jax.tree.map(lambda a: a[:count], hosts.fetch(states))
    meta = {"runs": runs, "step": step, "form": _form(states, count)} | ({"data": data} if data else {})
    _write(target, states, meta)
    # Older ones, and later ones of a batch that was finished or damaged.
    if hosts.is_first():
        steps = {int(path.name): path for path in _saved(root)}
        kept = {*[s for s in steps if s <= step][:keep], best}
        for other in steps.keys() - kept:
            files.remove(steps[other])


def save_model(target: pathlib.Path, params: Any, about: dict[str, Any]) -> None:
    """Saves the parameters (by group, with the model's state as one more) of a finished run, and what to know of it.

    Raises:
      UserError: the disk is full or read-only.
    """
    _write(target, params, {"form": _form(params), **about})


def models(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict]]:
    """The models in a folder, by name, with what is known of each; damaged ones are named in the log and passed over."""
    for path in sorted(folder.glob("*")):
        if (meta := _meta(path)) is not None:
            yield path, meta
        else:
            log.warning("model %s is damaged: it is passed over", path)


def digest_of(path: pathlib.Path) -> str:
    """What a model is known by: a digest of what is beside its state, and of that."""
    return json.loads((path / "meta.json").read_text("utf-8"))["digest"]


def load_model(path: pathlib.Path) -> dict[str, Any]:
    """What `save_model` left, as NumPy arrays."""
    with _quiet():
        return jax.tree.map(np.asarray, ocp.load(_state(path)))


def _write(target: pathlib.Path, state: Any, meta: dict) -> None:
    # In a bucket nothing is renamed: meta.json, the last file, makes the checkpoint whole.
    beside = target if files.remote(target) else target.parent / ".writing"

    def empty() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.remove(beside)

    def finish() -> None:
        (beside / "meta.json").write_text(json.dumps(meta | {"digest": _seal(meta, beside)}), "utf-8")
        if beside != target:
            files.remove(target)
            os.replace(beside, target)

    with files.explained(target):
        hosts.once(empty)
        try:
            with _quiet():
                ocp.save(_state(beside), state)  # every process its own part
            hosts.once(finish)
        except Exception:
            # Half a checkpoint would keep a full disk full. A whole one stays: in a bucket, a peer may die just after meta.json.
            if hosts.is_first() and _meta(beside) is None:
                files.remove(beside)
            raise


def latest(root: pathlib.Path) -> tuple[pathlib.Path, dict] | None:
    """The newest checkpoint that is whole, with its meta data; damaged ones are named in the log and passed over."""
    for path in _saved(root):
        if (meta := _meta(path)) is not None:
            return path, meta
        log.warning("checkpoint %s is damaged: going back to the one before it, or to the start of its batch", path)
    return None


def agreed(root: pathlib.Path) -> tuple[pathlib.Path, dict] | None:
    """What is `latest` to process 0, for all processes."""
    found = latest(root) if hosts.is_first() else None
    name, _, meta = hosts.broadcast_from_first(f"{found[0].name} {json.dumps(found[1])}" if found else "").partition(
        " "
    )
    return (root / name, json.loads(meta)) if name else None


def _meta(path: pathlib.Path) -> dict | None:
    """The meta data of what was saved at `path`, None if it is damaged or missing."""
    try:
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        return meta if meta.pop("digest") == _seal(meta, path) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def load(path: pathlib.Path, meta: dict, states: Any, count: int) -> Any | None:
    """`states` with the runs saved at `path` in its first `count` places; None when their keys, shapes or types are others.

    Compared beforehand, not left to Orbax, whose reading threads report a misfit on their own.
    """
    if meta.get("form") != _form(states, count):  # none: saved before there was one
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
    """The router, as `freezing.router_of` returns it, of the model that `save_model` left, with the shapes of `like`.

    Raises:
      UserError: missing, damaged, or of another model.
    """
    meta = _meta(path)
    if meta is None:
        raise UserError(
            f"{path} is missing or damaged, and a transplanted arm needs the router in it: choose another --workdir, where the"
            " learned runs train again with checkpoint.final=true"
        )
    stored = load_model(path)
    router = router_of(stored, stored.get("state", {}))
    if _form(router) != _form(like):
        raise UserError(f"{path} holds a router of another shape: choose another --workdir")
    return router


def _read(path: pathlib.Path, like: Any) -> Any:
    with _quiet():
        return ocp.load(_state(path), like)


def clear(root: pathlib.Path) -> None:
    """Forgets the batch: its runs are finished."""
    files.remove(root)


def _state(path: pathlib.Path) -> pathlib.Path:
    """Where Orbax keeps the state of a checkpoint."""
    return (path if files.remote(path) else path.absolute()) / "state"


def _saved(root: pathlib.Path) -> list[pathlib.Path]:
    """Newest first."""
    return sorted((p for p in root.glob("[0-9]" * DIGITS) if p.is_dir()), reverse=True) if root.exists() else []


def _form(state: Any, count: int | None = None) -> str:
    """A digest of the keys, shapes and types of a state, with `count` in place of its first axis."""
    leaves = [
        (jax.tree_util.keystr(key), a.shape if count is None else (count, *a.shape[1:]), str(a.dtype))
        for key, a in jax.tree_util.tree_leaves_with_path(state)
    ]
    return hashlib.sha256(json.dumps(leaves).encode()).hexdigest()


def _seal(meta: dict, path: pathlib.Path) -> str:
    """A digest of the meta data and of the state beside it."""
    return hashlib.sha256(json.dumps([meta, files.digest(_state(path))], sort_keys=True).encode()).hexdigest()


class _quiet(warnings.catch_warnings):
    """Orbax warns of its own set-up; a run saves hundreds of times."""

    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")
