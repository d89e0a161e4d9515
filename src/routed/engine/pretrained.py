"""Pretrained parameters: a router from another arm of the plan, or a model from a finished run in another workdir."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging as log
from jax.tree_util import keystr, tree_leaves_with_path

from routed.contracts import UserError
from routed.engine import checkpoint
from routed.plan.config import problem_of
from routed.plan.run import Run
from routed.settings.renamed import with_new_names
from routed.settings.setting import refuse
from routed.settings.tree import flatten
from routed.system import files, hosts, stored
from routed.training import fitting
from routed.training.freezing import router_of, with_router

#: The folder of a workdir with the models of finished runs.
MODELS = "models"

#: The folder beside it with the SentencePiece models of their texts, which a fine-tuned run names as data.tokens.
PIECES = "pieces"

#: The file of a workdir that names the model each of its runs started from.
INITIAL_MODELS_FILE = "initial.json"

#: Prefixes of settings that must be equal in a pretrained model and in the run that starts from it.
MUST_MATCH = ("data.tokens", "data.pieces", "data.vocabulary", "router.name", "experts.", "transformer.")
#: Prefixes of settings that decide the routing, which may differ on purpose; a difference is reported.
ROUTING_KEYS = ("selection.", "router.score", "router.layers")
#: Prefixes of settings, among those above, that affect training only and not the meaning of the parameters.
MAY_DIFFER = (
    "experts.learning_rate",
    "transformer.learning_rate",
    "transformer.dtype",
    "transformer.init_scale",
    "transformer.remat",
    "transformer.tied",
    "selection.competition_rate",
    "selection.schedule",
    "selection.distillation",
    "selection.no_gradient",
    "selection.balance_rate",
)


def save_final_model(workdir: pathlib.Path, run: Run, model: dict[str, Any]) -> None:
    """Saves the model of a finished run with its settings; and, once, its SentencePiece model, which a cache may lose.

    Raises:
      UserError: the disk is full or read-only.
    """
    settings = _settings(run)
    if "data.pieces" in settings:
        pieces = problem_of(run.config).pieces(run.config)
        hosts.once(lambda: _write_once(workdir / settings["data.pieces"], pieces))
    checkpoint.save_model(workdir / MODELS / run.key, model, {"arm": run.arm, "seed": run.seed, "settings": settings})


def check_kept(finished: list[Run], workdir: pathlib.Path) -> None:
    """Refuses checkpoint.final=true if finished runs kept no model: they are not trained again."""
    if any(run.config.checkpoint.final and not (workdir / MODELS / run.key).exists() for run in finished):
        reason = f"finished runs of {workdir} kept no model; name a fresh --workdir, or set it to false"
        refuse("checkpoint.final", True, reason)


def _write_once(path: pathlib.Path, content: bytes) -> None:
    if not path.exists():
        with files.explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content)


def check(runs: list[Run]) -> None:
    """Refuses a pretrained model that is missing or does not match; warns if no run has one, or its routing differs.

    Raises:
      UserError: names the workdir and the setting that differs.
    """
    for difference in dict.fromkeys(_routing_difference(run) for run in runs if _has_initial_model(run)):
        if difference:
            log.warning("config key initial.workdir: %s: they go on under another rule than they learned", difference)
    if any(map(_can_start_from_a_model, runs)) and not any(map(_has_initial_model, runs)):
        log.warning("config key initial.workdir is empty: every run begins untrained, so nothing is fine-tuned")


def record_models(workdir: pathlib.Path, runs: list[Run]) -> None:
    """Writes down the name and digest of each run's pretrained model; refuses a workdir whose runs had other models.

    Models of finished runs may be gone. For process 0.

    Raises:
      UserError: names the two workdirs.
    """
    file = workdir / INITIAL_MODELS_FILE
    mend = "nobody knows which models its runs began with: choose another --workdir"
    recorded = stored.read(file, {str: str}, mend) if file.exists() else {}
    models = {run.key: name for run in runs if _has_initial_model(run) and (name := _name_and_digest(run))}
    for run in runs:
        if run.key in models and recorded.get(run.key, models[run.key]) != models[run.key]:
            reason = f"holds other models than those that runs in {workdir} began with; choose another --workdir"
            refuse("initial.workdir", run.config.initial.workdir, reason)
    if not models.items() <= recorded.items():
        files.write(file, json.dumps(recorded | models, indent=1) + "\n")


def _name_and_digest(run: Run) -> str:
    """The name and digest of the model that a run starts from; empty if the model is gone."""
    try:
        return f"{(path := _model_path(run)).name} {checkpoint.digest_of(path)}"
    except UserError:
        return ""


def start_from(remember: Callable[[Any, Any], Any], states: Any, runs: list[Run], workdir: pathlib.Path) -> Any:
    """Returns the states of a batch at step 0, with the parameters of transplanted routers and pretrained models.

    `remember(params, state)` extracts the memory that the first evaluation compares with.
    """
    for i, run in enumerate(runs):
        if run.transplant is not None and "teacher" in states:
            states |= {"teacher": _set_run(i, states["teacher"], _scores_of(workdir / MODELS / run.transplant, run))}
        elif "teacher" in states:
            refuse("router.fit", fitting.DISTILLED, f"no run teaches the arm {run.arm}; use arms=distilled")
        elif run.transplant is not None:
            states |= _with_router_of(workdir / MODELS / run.transplant, states, i)
        elif _has_initial_model(run):
            states |= _with_model_of(_model_path(run), states, i)
        else:
            continue
        router0 = router_of(states["params"], states["state"])
        memory = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding),
            remember(states["params"], states["state"]),
            states["memory"],
        )
        # Copies, as each buffer is donated to the next step.
        states |= jax.tree.map(jnp.copy, {"router0": router0, "memory": memory})
    return states


def _with_router_of(path: pathlib.Path, states: Any, i: int) -> dict[str, Any]:
    """The parameters and model state of a batch with the router of a saved model as that of run `i`."""
    like = jax.tree.map(lambda a: a[i], states["router0"])
    params, router_state = checkpoint.load_router(path, like)
    old_state = router_of(states["params"], states["state"])[1]
    return {
        "params": states["params"] | {"router": _set_run(i, states["params"]["router"], params)},
        "state": with_router(states["state"], _set_run(i, old_state, router_state)),
    }


def _scores_of(path: pathlib.Path, run: Run) -> Any:
    """The scores of a saved model's routers on the tokens to which the router of `run` is fitted."""
    part, model = problem_of(run.config), checkpoint.load_model(path)
    scores = jax.jit(partial(fitting.scores_on, part.build(run.config, 0, None)))
    return scores(model, model.pop("state", {}), part.shared_arrays(run.config)["fitted_on"])


def _with_model_of(path: pathlib.Path, states: Any, i: int) -> dict[str, Any]:
    """The parameters and model state of a batch with those of a saved model as those of run `i`.

    Raises:
      UserError: the model has other leaves than the run.
    """
    model = checkpoint.load_model(path)
    params, state = states["params"], model.pop("state", {})
    groups = {name: model[name] for name in params.keys() & model.keys()}
    if "trunk" in groups:  # a fine-tuned trunk lacks the output layer of the pretrained one
        groups["trunk"] = {key: groups["trunk"][key] for key in params["trunk"]}
    current = {name: params[name] for name in groups}
    _refuse_misfit(path, groups | {"state": state}, current | {"state": states["state"]})
    return {
        "params": params | {name: _set_run(i, params[name], group) for name, group in groups.items()},
        "state": _set_run(i, states["state"], state),
    }


def _set_run(i: int, leaves: Any, new: Any) -> Any:
    """Sets entry `i` of the first axis of every leaf."""
    return jax.tree.map(lambda old, leaf: jax.device_put(old.at[i].set(leaf), old.sharding), leaves, new)


def _can_start_from_a_model(run: Run) -> bool:
    return "initial.workdir" in problem_of(run.config).settings


def _has_initial_model(run: Run) -> bool:
    return _can_start_from_a_model(run) and bool(run.config.initial.workdir)


def _settings(run: Run) -> dict[str, Any]:
    """The settings of a run that are compared with those of a pretrained model."""
    settings = {
        key: value
        for key, value in flatten(run.config).items()
        if key.startswith((*MUST_MATCH, *ROUTING_KEYS)) and not key.startswith(MAY_DIFFER)
    }
    if pieces := problem_of(run.config).pieces(run.config):
        settings["data.pieces"] = f"{PIECES}/{hashlib.sha256(pieces).hexdigest()[:16]}.model"
    return json.loads(json.dumps(settings, default=list))


def _different_keys(settings: dict[str, Any], stored: dict[str, Any], prefixes: tuple[str, ...]) -> list[str]:
    """The settings with other values in two runs, of those that both have; SentencePiece models count by content."""
    common = settings.keys() & stored.keys()
    common -= {"data.tokens"} if "data.pieces" in common else set()
    return sorted(key for key in common if key.startswith(prefixes) and settings[key] != stored[key])


def _difference_text(settings: dict[str, Any], stored: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key}={stored[key]!r} (here {settings[key]!r})" for key in keys)


def _routing_difference(run: Run) -> str:
    """The routing settings in which a run differs from its pretrained model, as a text; empty if there are none."""
    path, settings = _model_path(run), _settings(run)
    meta = _models_in(path.parent)[path]
    keys = _different_keys(settings, meta["settings"], ROUTING_KEYS)
    return f"models of the arm {meta['arm']} have {_difference_text(settings, meta['settings'], keys)}" if keys else ""


def _model_path(run: Run) -> pathlib.Path:
    """The folder of a run's pretrained model: of its arm and seed, and equal in every setting of MUST_MATCH.

    Raises:
      UserError: no such model, or several; names the setting to change.
    """
    folder, arm = run.config.initial.workdir, run.config.initial.arm or run.arm
    workdir = files.folder(folder)
    if not workdir.is_dir():
        refuse(
            "initial.workdir", folder, "no such folder; name the workdir of a run with --config.checkpoint.final=true"
        )
    if not (models := _models_in(workdir / MODELS)):
        again = "run its command again with --config.checkpoint.final=true and a fresh --workdir"
        refuse("initial.workdir", folder, f"no models in it; {again}, as finished runs are not trained again")
    stored = {path: meta["settings"] for path, meta in models.items() if (meta["arm"], meta["seed"]) == (arm, run.seed)}
    if not stored:
        names = ", ".join(sorted({f"{meta['arm']} of seed {meta['seed']}" for meta in models.values()}))
        refuse("initial.workdir", folder, f"no model of the arm {arm} with seed {run.seed} in it; there are: {names}")
    settings = _settings(run)
    differences = {path: _different_keys(settings, model, MUST_MATCH) for path, model in stored.items()}
    fitting = [path for path, keys in differences.items() if not keys]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(
            f"config key initial.workdir={folder}: {len(fitting)} models of the arm {arm} with seed {run.seed} fit;"
            " name a workdir of one point"
        )
    path, keys = min(differences.items(), key=lambda item: len(item[1]))
    text = _difference_text(settings, stored[path], keys)
    remedy = _remedy(workdir, stored[path], keys)
    raise UserError(f"config key initial.workdir={folder}: its model of the arm {arm} has {text}; {remedy}")


def _remedy(workdir: pathlib.Path, stored: dict[str, Any], keys: list[str]) -> str:
    """The change that makes a run match a pretrained model that differs from it in `keys`."""
    if {"data.tokens", "data.pieces"} & {*keys} and "data.pieces" in stored:
        return f"set them alike, data.tokens={workdir / stored['data.pieces']}"
    if "data.tokens" in keys and stored["data.tokens"] == "train":
        return "its pieces of words were not kept: train it again, in a fresh --workdir"
    return "set them alike"


@functools.lru_cache(maxsize=4)
def _models_in(folder: pathlib.Path) -> dict[pathlib.Path, dict[str, Any]]:
    """The undamaged models of a finished workdir; read once in a process, as every file of each is hashed."""
    return {
        path: {**meta, "settings": with_new_names(meta["settings"])}
        for path, meta in checkpoint.models(folder)
        if "settings" in meta
    }


def _refuse_misfit(path: pathlib.Path, stored: Any, current: Any) -> None:
    """Refuses a model whose leaves are not those of a run; every leaf of `current` has a first axis of runs."""
    stored_shapes = {keystr(key): leaf.shape for key, leaf in tree_leaves_with_path(stored)}
    shapes = {keystr(key): leaf.shape[1:] for key, leaf in tree_leaves_with_path(current)}
    if stored_shapes != shapes:
        different = [k for k in stored_shapes.keys() | shapes.keys() if stored_shapes.get(k) != shapes.get(k)]
        key = min(different)
        raise UserError(
            f"{path}: {key} is {stored_shapes.get(key, 'missing')}, and {shapes.get(key, 'nothing')} here: not a model"
            " of this kind"
        )
