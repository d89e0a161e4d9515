"""What a run begins with beside what it draws: the router of another arm, or the model of a finished run in another workdir."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging as log
from jax.tree_util import keystr, tree_leaves_with_path

from routed.contracts import UserError
from routed.engine import checkpoint
from routed.engine.compilation import Compiled
from routed.plan.config import problem_of
from routed.plan.runs import Run
from routed.settings.setting import refuse
from routed.settings.tree import flatten
from routed.system import files, hosts
from routed.training.freezing import router_of, with_router

#: Where the models of finished runs are, in a workdir.
MODELS = "models"

#: Beside them the SentencePiece models of their texts, which a run that begins with one names as data.tokens.
PIECES = "pieces"

#: Which of them each run of a workdir began with.
BEGAN = "initial.json"

#: Settings of a model that have to be alike; and those that say which experts it has learned to mix and how, which may differ on purpose.
ALIKE = ("data.tokens", "data.pieces", "data.vocabulary", "router.name", "experts.", "transformer.")
RULE = ("selection.", "router.measure")
#: Those among them that say how it is trained, and not what its parameters mean.
FREE = (
    *("experts.learning_rate", *(f"transformer.{name}" for name in ("learning_rate", "dtype", "init_scale", "remat", "tied"))),
    *(f"selection.{name}" for name in ("share", "schedule", "distil", "no_gradient", "balance_rate")),
)  # fmt: skip


def keep(workdir: pathlib.Path, run: Run, model: dict[str, Any]) -> None:
    """Saves the model of a finished run, with whose it is; and, once, the pieces of words that it reads, which a cache may lose.

    Raises:
      UserError: the disk is full or read-only.
    """
    settings = _settings(run)
    if "data.pieces" in settings:
        hosts.once(lambda: _write(workdir / settings["data.pieces"], _pieces(run)))
    checkpoint.save_model(workdir / MODELS / run.key, model, {"arm": run.arm, "seed": run.seed, "settings": settings})


def _write(path: pathlib.Path, content: bytes) -> None:
    if not path.exists():
        with files.explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content)


def _pieces(run: Run) -> bytes:
    return problem_of(run.config).pieces(run.config)


def check(runs: list[Run]) -> None:
    """Refuses runs that begin with a model that is not there, or is of another kind; says where none of those that may begins with one, and what routes otherwise.

    Raises:
      UserError: names the workdir and what differs.
    """
    for words in dict.fromkeys(_other_rule(run) for run in runs if _begins(run)):
        if words:
            log.warning("config key initial.workdir: %s: they go on under another rule than they learned", words)
    may = [run for run in runs if "initial" in run.config]
    if may and not any(map(_begins, may)):
        log.warning("config key initial.workdir is empty: every run begins untrained, so nothing is fine-tuned")


def claim(workdir: pathlib.Path, runs: list[Run]) -> None:
    """Notes which model each run of a workdir begins with, by name and content; refuses a workdir whose runs began with others.

    Finished runs may have lost theirs. For process 0.

    Raises:
      UserError: names the two workdirs.
    """
    file = workdir / BEGAN
    try:
        known = dict[str, str](json.loads(file.read_text("utf-8"))) if file.exists() else {}
    except (OSError, ValueError, TypeError):
        raise UserError(
            f"{file} is damaged, so nobody knows which models its runs began with: choose another --workdir"
        ) from None
    now = {run.key: name for run in runs if _begins(run) and (name := _name(run))}
    for run in runs:
        if run.key in now and known.get(run.key, now[run.key]) != now[run.key]:
            why = f"holds other models than those that runs in {workdir} began with; choose another --workdir"
            refuse("initial.workdir", run.config.initial.workdir, why)
    if not now.items() <= known.items():
        files.write(file, json.dumps(known | now, indent=1) + "\n")


def _name(run: Run) -> str:
    """The name and digest of the model that a run begins with; empty if it is gone."""
    try:
        return f"{(path := _model(run)).name} {checkpoint.digest_of(path)}"
    except UserError:
        return ""


def begun(compiled: Compiled, states: Any, batch: list[Run], workdir: pathlib.Path) -> Any:
    """The states of a batch at step 0: those of arms that are transplanted or begin with a model have what they take."""
    for i, run in enumerate(batch):
        if run.transplant is not None:
            like = jax.tree.map(lambda a, i=i: a[i], states["router0"])
            path = workdir / MODELS / run.transplant
            router, own = checkpoint.load_router(path, like)
            params = states["params"] | {"router": _put(i, states["params"]["router"], router)}
            old = router_of(states["params"], states["state"])[1]
            states |= {"params": params, "state": with_router(states["state"], _put(i, old, own))}
        elif _begins(run):
            model = checkpoint.load_model(path := _model(run))
            params, state = states["params"], model.pop("state", {})
            fitting = {
                name: {key: model[name][key] for key in params[name]} if name == "trunk" else model[name]
                for name in params.keys() & model.keys()
            }
            _refuse_misfit(path, fitting | {"state": state}, {k: params[k] for k in fitting} | {"state": states["state"]})  # fmt: skip
            put = {name: _put(i, params[name], own) for name, own in fitting.items()}
            states |= {"params": params | put, "state": _put(i, states["state"], state)}
        else:
            continue
        router0 = router_of(states["params"], states["state"])
        memory = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding),
            compiled.remember(states["params"], states["state"]),
            states["memory"],
        )
        # Copies, as each buffer is donated to the next step.
        states |= jax.tree.map(jnp.copy, {"router0": router0, "memory": memory})
    return states


def _put(i: int, held: Any, new: Any) -> Any:
    """`held` with `new` at place i of every leaf's first axis."""
    return jax.tree.map(lambda old, one: jax.device_put(old.at[i].set(one), old.sharding), held, new)


def _begins(run: Run) -> bool:
    return bool("initial" in run.config and run.config.initial.workdir)


def _settings(run: Run) -> dict[str, Any]:
    kept = {
        key: value
        for key, value in flatten(run.config).items()
        if key.startswith((*ALIKE, *RULE)) and not key.startswith(FREE)
    }
    if pieces := _pieces(run):
        kept["data.pieces"] = f"{PIECES}/{hashlib.sha256(pieces).hexdigest()[:16]}.model"
    return json.loads(json.dumps(kept, default=list))


def _unlike(own: dict[str, Any], other: dict[str, Any], among: tuple[str, ...]) -> list[str]:
    """The settings that two runs both have, with other values; pieces of words are known by their content, whatever file has them."""
    both = own.keys() & other.keys()
    both -= {"data.tokens"} if "data.pieces" in both else set()
    return sorted(key for key in both if key.startswith(among) and own[key] != other[key])


def _beside(own: dict[str, Any], other: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key}={other[key]!r} (here {own[key]!r})" for key in keys)


def _other_rule(run: Run) -> str:
    """By which settings the model that a run begins with was trained to route otherwise, in words; empty where by none."""
    path, own = _model(run), _settings(run)
    meta = _known(path.parent)[path]
    keys = _unlike(own, meta["settings"], RULE)
    return f"models of the arm {meta['arm']} have {_beside(own, meta['settings'], keys)}" if keys else ""


def _model(run: Run) -> pathlib.Path:
    """The folder of the model that a run begins with: of its arm, its seed, and alike in every setting that both have."""
    given, arm = run.config.initial.workdir, run.config.initial.arm or run.arm
    workdir = files.folder(given).expanduser()
    if not workdir.is_dir():
        refuse(
            "initial.workdir", given, "no such folder; name the workdir of a run with --config.checkpoint.final=true"
        )
    if not (known := _known(workdir / MODELS)):
        again = "run its command again with --config.checkpoint.final=true and a fresh --workdir"
        refuse("initial.workdir", given, f"no models in it; {again}, as finished runs are not trained again")
    fitting = {path: meta for path, meta in known.items() if (meta["arm"], meta["seed"]) == (arm, run.seed)}
    if not fitting:
        there = ", ".join(sorted({f"{meta['arm']} of seed {meta['seed']}" for meta in known.values()}))
        refuse("initial.workdir", given, f"no model of the arm {arm} with seed {run.seed} in it; there are: {there}")
    own, others = _settings(run), {path: meta["settings"] for path, meta in fitting.items()}
    unlike = {path: _unlike(own, one, ALIKE) for path, one in others.items()}
    alike = [path for path, keys in unlike.items() if not keys]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise UserError(
            f"config key initial.workdir={given}: {len(alike)} models of the arm {arm} with seed {run.seed} fit; name a workdir of one point"
        )
    path, keys = min(unlike.items(), key=lambda item: len(item[1]))
    words, mend, other = _beside(own, others[path], keys), "set them alike", others[path]
    if {"data.tokens", "data.pieces"} & {*keys} and "data.pieces" in other:
        mend += f", data.tokens={workdir / other['data.pieces']}"
    elif "data.tokens" in keys and other["data.tokens"] == "train":
        mend = "its pieces of words were not kept: train it again, in a fresh --workdir"
    raise UserError(f"config key initial.workdir={given}: its model of the arm {arm} has {words}; {mend}")


@functools.lru_cache(maxsize=4)
def _known(folder: pathlib.Path) -> dict[pathlib.Path, dict[str, Any]]:
    """The whole models of a finished workdir, read once in a process: every file of each is hashed."""
    return {path: meta for path, meta in checkpoint.models(folder) if "settings" in meta}


def _refuse_misfit(path: pathlib.Path, stored: Any, held: Any) -> None:
    """Refuses a model whose leaves are not those of a run; of `held` every leaf has a first axis of runs."""
    there = {keystr(key): leaf.shape for key, leaf in tree_leaves_with_path(stored)}
    wanted = {keystr(key): leaf.shape[1:] for key, leaf in tree_leaves_with_path(held)}
    if there != wanted:
        key = sorted(k for k in there.keys() | wanted.keys() if there.get(k) != wanted.get(k))[0]
        raise UserError(
            f"{path}: {key} is {there.get(key, 'missing')}, and {wanted.get(key, 'nothing')} here: not a model of this kind"
        )
