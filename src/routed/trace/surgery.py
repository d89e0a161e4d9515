"""Surgery on a Hugging Face model: its loss with replaced routers, in one layer and in all, before and after a repair.

A job is one such model on all rows. Its losses, one per row, are kept in OUT/jobs, so that a killed surgery continues.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging as log

from routed.contracts import UserError
from routed.system import files
from routed.trace.checks import as_array
from routed.trace.features import read_npz, write_npz
from routed.trace.hooks import RouterModule, routers_of
from routed.trace.hooks_replace import Repair, check_rules, has_constant_weights, losses_of, repair, replacing
from routed.trace.kinds import EVERY, TRAINED
from routed.trace.model_inputs import bind_folder, check_ids, check_version, digest_of_model, digest_of_rows
from routed.trace.regret import RegretSettings, regret_of
from routed.trace.replacements import NOT_LINEAR, Router, Site
from routed.trace.sites import companions_of, linear_weights, sites_of
from routed.trace.surgery_jobs import ALL, Job, SurgeryResult, jobs_of, repair_steps_of, replacements_of

#: Why a replaced router has no loss although the model ran: a loss of 0 would say that routers are worth nothing.
NO_EFFECT = "every row has the loss of the model as it is, so no choice of the model has changed"
#: Cost of a step of a repair, in batches of an evaluation.
STEP_COST = 3


class _Operation(NamedTuple):
    """Everything that jobs share; `rows` are measured, routers are repaired on `other`."""

    model: Any
    modules: Mapping[str, RouterModule]
    sites: Mapping[str, Site]
    rows: Sequence[np.ndarray]
    other: Sequence[np.ndarray]
    repair: Repair
    folder: pathlib.Path


def surgery(
    model: Any,
    rows: Sequence[np.ndarray],
    other: Sequence[np.ndarray],
    out: str | os.PathLike,
    *,
    replace: Sequence[str] = (),
    repair_steps: int | Sequence[int | str] = (50, 200),
    repair_rate: float = 0.02,
    draws: int = 3,
    regret_tokens: int = 0,
    seed: int = 0,
    batch_size: int = 8,
    routers: str = "",
    k: int = 0,
    checkpoint: Any = None,
    name: str = "",
    source: str = "",
) -> SurgeryResult:
    """Measures `model` (a causal one of transformers) on `rows` of token ids of one length, with other routers.

    `replace` names the replacements (default: all; `checkpoint` only if another checkpoint of the model is given).
    Tables are filled from the rows `other`. A repair trains the parameters of the replaced routers on them, with
    everything else frozen: Adam with the loss of the text alone, with steps of `repair_rate` times the standard
    deviation of each parameter at the start, falling linearly to 0. `repair_steps` are the lengths of the repairs.
    Random replacements are drawn `draws` times. `regret_tokens` tokens of each layer try other experts.

    Raises:
      UserError: the model is an encoder-decoder, the architecture, a router's rule or a replacement is unknown, there
        are too few rows, or `out` holds another surgery.
    """
    check_version()
    folder, replace = files.folder(out), replacements_of(replace, checkpoint is not None)
    _check_inputs(model, rows, other)
    modules = routers_of(model, routers, k)
    weights = {} if checkpoint is None else linear_weights(routers_of(checkpoint, routers, k))
    settings = {"routers": list(modules), "k": k, "batch_size": batch_size, "repair_rate": repair_rate, "seed": seed}
    settings |= {"name": name, "other": digest_of_rows(other)}
    settings["router_from"] = "" if checkpoint is None else digest_of_model(checkpoint)
    bind_folder(folder / "surgery.json", model, rows, settings)
    steps = repair_steps_of([repair_steps] if isinstance(repair_steps, int) else repair_steps)
    jobs, longest = jobs_of(list(modules), replace, draws, steps), max(steps, default=0)
    with _frozen(model):
        check_rules(model, modules, other[0])
        begun = time.monotonic()
        sites = sites_of(model, modules, other, batch_size, weights)
        seconds_per_row = (time.monotonic() - begun) / len(other)
        if checkpoint is not None:
            given = companions_of(model, modules, checkpoint, other, batch_size=batch_size, routers=routers, k=k)
            sites = {layer: site._replace(companion=given.get(layer)) for layer, site in sites.items()}
        how = Repair(longest, repair_rate, batch_size, seed)
        operation = _Operation(model, modules, sites, rows, other, how, folder)
        outcomes = _run(operation, jobs, seconds_per_row)
        regret = _regret(operation, regret_tokens) if regret_tokens else {}
    site, ids = next(iter(sites.values())), np.concatenate(rows)
    losses, reasons = _sorted(outcomes, folder)
    unseen = float((site.row_of[ids] == len(site.counts) - 1).mean())
    return SurgeryResult(
        tuple(modules), site.experts, losses, reasons, unseen, len(ids), longest, draws, name, source, regret
    )


def _sorted(
    outcomes: Mapping[Job, tuple[np.ndarray, str]], folder: pathlib.Path
) -> tuple[dict[Job, np.ndarray], dict[Job, str]]:
    """Returns the losses of the jobs that have some, and the reasons of the others."""
    if reason := outcomes[Job(ALL, "")][1]:
        advice = f"remove {folder} and look at model and text"
        raise UserError(f"the model as it is has no loss to compare with: {reason}; {advice}")
    losses = {job: losses for job, (losses, reason) in outcomes.items() if not reason}
    return losses, {job: reason for job, (_, reason) in outcomes.items() if reason}


def _check_inputs(model: Any, rows: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    if model.config.is_encoder_decoder:
        raise UserError(
            f"{type(model).__name__} is an encoder-decoder, whose loss on plain text says nothing: surgery takes models"
            " that predict the next token"
        )
    if not rows or not other or len(rows[0]) < 2:
        raise UserError("surgery takes at least a row of text to measure on, a row of other text, and two tokens a row")
    check_ids(model, [*rows, *other])


@contextlib.contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Sets the model to evaluation without parameters that train, and restores it at the end."""
    trained, training = [p for p in model.parameters() if p.requires_grad], model.training
    model.eval()
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.train(training)
        for parameter in trained:
            parameter.requires_grad_(True)


def _run(operation: _Operation, jobs: Sequence[Job], seconds_per_row: float) -> dict[Job, tuple[np.ndarray, str]]:
    """Returns losses and reason of every job, measured or read; the first time left comes from `seconds_per_row`."""

    def cost(job: Job) -> int:
        return len(operation.rows) + STEP_COST * job.repair_steps * operation.repair.batch_size

    folder = operation.folder
    with files.explained(folder):
        (folder / "jobs").mkdir(exist_ok=True)
    left = sum(cost(job) for job in jobs if not job.file(folder).exists())
    outcomes, seconds, done = dict[Job, tuple[np.ndarray, str]](), 0.0, 0
    for number, job in enumerate(jobs, 1):
        if (path := job.file(folder)).exists():
            arrays = _read(path, "losses", "reason")
            outcomes[job] = arrays["losses"], str(arrays["reason"])
            continue
        rest = datetime.timedelta(seconds=int(left * (seconds / done if done else seconds_per_row)))
        label = EVERY[job.replacement].label if job.replacement else "the model as it is"
        repaired = ", repaired" if job.repair_steps else ""
        log.info("job %d of %d, about %s left; %s: %s%s", number, len(jobs), rest, job.layer, label, repaired)
        begun = time.monotonic()
        losses, reason, params = _measure(operation, job)
        if job.replacement and not reason and np.array_equal(losses, outcomes[Job(ALL, "")][0]):
            losses, reason = np.zeros(0), NO_EFFECT
        outcomes[job] = losses, reason
        write_npz(path, {"losses": losses, "reason": np.array(reason), **params})
        left -= cost(job)
        if not reason:
            seconds, done = seconds + time.monotonic() - begun, done + cost(job)
    return outcomes


def _read(path: pathlib.Path, *names: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a job's file, which has at least these names."""
    try:
        arrays = read_npz(path)
        if missing := [name for name in names if name not in arrays]:
            raise KeyError(missing[0])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error}): remove it and run the same command") from error
    return arrays


def _measure(operation: _Operation, job: Job) -> tuple[np.ndarray, str, dict[str, np.ndarray]]:
    """Returns the losses of a job, or no losses and the reason; and the parameters of one repaired trained router."""
    model, modules, sites, rows, other, how, _ = operation
    how = how._replace(steps=job.repair_steps, seed=how.seed + job.draw)
    none, routers, params = np.zeros(0), dict[str, Router](), dict[str, np.ndarray]()
    for index, name in enumerate(modules):
        if job.replacement and job.layer in (ALL, name):
            random = np.random.default_rng([how.seed, job.draw, index, [*EVERY].index(job.replacement)])
            router = EVERY[job.replacement].make(sites[name], random)
            if isinstance(router, str):
                return none, router, {}
            routers[name] = router
    if job.repair_steps and not all(router.start for router in routers.values()):
        return none, NOT_LINEAR, {}
    try:
        if job.repair_steps and has_constant_weights(model, modules, routers, other[0]):
            return none, "its weights are the same whatever its scores, so there is no gradient to repair it by", {}
        with replacing(model, modules, routers) as (parameters, current):
            if job.repair_steps:
                repair(model, parameters, current, other, how)
            if job.replacement == TRAINED and job.layer != ALL:
                names = routers[job.layer].start
                params = {name: as_array(value) for name, value in zip(names, parameters, strict=True)}
            losses = losses_of(model, rows, current, how.batch_size)
    except UserError as error:  # a router whose k cannot be set
        return none, str(error), {}
    return (losses, "", params) if np.isfinite(losses).all() else (none, "its loss is not finite", {})


def _regret(operation: _Operation, tokens: int) -> dict[str, Mapping[str, np.ndarray] | str]:
    """Returns the losses of sampled tokens by layer, measured or read; or the reason why a layer has none."""
    steps, regrets = operation.repair.steps, dict[str, Mapping[str, np.ndarray] | str]()
    for number, (layer, site) in enumerate(operation.sites.items(), 1):
        path = operation.folder / "jobs" / f"{layer}-regret-{tokens}-{steps}.npz"
        if path.exists():
            regrets[layer] = _read(path, "as_is", "best")
        else:
            log.info("regret of router %d of %d: %s", number, len(operation.sites), layer)
            repaired = Job(layer, TRAINED, 0, steps).file(operation.folder)
            params = _read(repaired, "losses") if steps and repaired.exists() else {}
            settings = RegretSettings(tokens, operation.repair.batch_size, operation.repair.seed)
            try:
                losses = regret_of(operation.model, operation.modules, layer, site, operation.rows, params, settings)
            except UserError as error:
                regrets[layer] = str(error)
                continue
            write_npz(path, losses)
            regrets[layer] = losses
    return regrets
