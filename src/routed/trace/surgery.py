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
from routed.trace.features import read_npz, write_npz
from routed.trace.hooks import RouterModule, routers_of
from routed.trace.hooks_replace import Repair, check_rules, has_constant_weights, losses_of, repair, replacing
from routed.trace.model_inputs import bind_folder, check_ids, check_version, digest_of_model, digest_of_rows
from routed.trace.replacements import EVERY, NOT_LINEAR, REPLACEMENTS, TRAINED, Router, Site
from routed.trace.sites import linear_weights, sites_of

#: The layer of a job that replaces every router.
ALL = "all"
#: Cost of a step of a repair, in batches of an evaluation.
STEP_COST = 3


class Job(NamedTuple):
    """One model to measure: a replacement in `layer` (`ALL`: every layer), repaired for `repair_steps` steps.

    An empty replacement is the model as it is.
    """

    layer: str
    replacement: str
    draw: int = 0
    repair_steps: int = 0

    def file(self, out: pathlib.Path) -> pathlib.Path:
        """Returns the file of the job's losses."""
        return out / "jobs" / f"{self.layer}-{self.replacement or 'model'}-{self.draw}-{self.repair_steps}.npz"


class SurgeryResult(NamedTuple):
    """Losses of a surgery: means [R] by job in nats a token, or the reason why a job has none.

    `unseen` is the share of tokens whose id the other text lacks.
    """

    layers: tuple[str, ...]
    experts: int
    losses: Mapping[Job, np.ndarray]
    reasons: Mapping[Job, str]
    unseen: float
    tokens: int
    repair_steps: int
    draws: int = 1
    model: str = ""
    source: str = ""


class _Operation(NamedTuple):
    """Everything that jobs share; `rows` are measured, routers are repaired on `other`."""

    model: Any
    modules: Mapping[str, RouterModule]
    sites: Mapping[str, Site]
    rows: Sequence[np.ndarray]
    other: Sequence[np.ndarray]
    repair: Repair


def surgery(
    model: Any,
    rows: Sequence[np.ndarray],
    other: Sequence[np.ndarray],
    out: str | os.PathLike,
    *,
    replace: Sequence[str] = (),
    repair_steps: int = 200,
    repair_rate: float = 0.02,
    draws: int = 1,
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
    everything else frozen: `repair_steps` of Adam with the loss of the text alone, with steps of `repair_rate` times
    the standard deviation of each parameter at the start, falling linearly to 0. Random replacements are drawn
    `draws` times.

    Raises:
      UserError: the model is an encoder-decoder, the architecture, a router's rule or a replacement is unknown, there
        are too few rows, or `out` holds another surgery.
    """
    check_version()
    folder, replace = files.folder(out), _replacements(replace, checkpoint is not None)
    _check_inputs(model, rows, other)
    modules = routers_of(model, routers, k)
    weights = {} if checkpoint is None else linear_weights(routers_of(checkpoint, routers, k))
    settings = {"routers": list(modules), "k": k, "batch_size": batch_size, "repair_rate": repair_rate, "seed": seed}
    digests = {"other": digest_of_rows(other), "router_from": "" if checkpoint is None else digest_of_model(checkpoint)}
    settings |= {"name": name} | digests
    bind_folder(folder / "surgery.json", model, rows, settings)
    with files.explained(folder):
        (folder / "jobs").mkdir(exist_ok=True)
    jobs = _jobs(list(modules), replace, draws, repair_steps)
    with _frozen(model):
        check_rules(model, modules, other[0])
        begun = time.monotonic()
        sites = sites_of(model, modules, other, batch_size, weights)
        seconds_per_row = (time.monotonic() - begun) / len(other)
        how = Repair(repair_steps, repair_rate, batch_size, seed)
        outcomes = _run(_Operation(model, modules, sites, rows, other, how), jobs, folder, seconds_per_row)
    if reason := outcomes[Job(ALL, "")][1]:
        advice = f"remove {folder} and look at model and text"
        raise UserError(f"the model as it is has no loss to compare with: {reason}; {advice}")
    site, ids = next(iter(sites.values())), np.concatenate(rows)
    losses = {job: losses for job, (losses, reason) in outcomes.items() if not reason}
    reasons = {job: reason for job, (_, reason) in outcomes.items() if reason}
    unseen = float((site.row_of[ids] == len(site.counts) - 1).mean())
    return SurgeryResult(
        tuple(modules), site.experts, losses, reasons, unseen, len(ids), repair_steps, draws, name, source
    )


def _check_inputs(model: Any, rows: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    if model.config.is_encoder_decoder:
        raise UserError(
            f"{type(model).__name__} is an encoder-decoder, whose loss on plain text says nothing: surgery takes models"
            " that predict the next token"
        )
    if not rows or not other or len(rows[0]) < 2:
        raise UserError("surgery takes at least a row of text to measure on, a row of other text, and two tokens a row")
    check_ids(model, [*rows, *other])


def _replacements(requested: Sequence[str], has_checkpoint: bool) -> Sequence[str]:
    """Returns the requested replacements, or all available ones.

    Raises:
      UserError: a replacement is unknown, or `checkpoint` and another checkpoint are not given together.
    """
    if unknown := [name for name in requested if name not in REPLACEMENTS]:
        raise UserError(f"--replace={unknown[0]}: no such replacement; known: {', '.join(REPLACEMENTS)}")
    of_checkpoint = [name for name, replacement in REPLACEMENTS.items() if replacement.needs_checkpoint]
    if requested and has_checkpoint != any(name in requested for name in of_checkpoint):
        needs = f"--replace={of_checkpoint[0]} needs --router_from, and --router_from needs it"
        raise UserError(f"{needs}: give both or neither")
    return requested or [name for name in REPLACEMENTS if has_checkpoint or name not in of_checkpoint]


def _jobs(layers: Sequence[str], replace: Sequence[str], draws: int, repair_steps: int) -> list[Job]:
    """Returns all jobs: the model as it is, then all routers replaced, then each alone."""
    jobs = [Job(ALL, "")]
    for layer in (ALL, *layers):
        for name in (TRAINED, *replace):
            for draw in range(draws if EVERY[name].drawn else 1):
                jobs += [Job(layer, name, draw)] * (name != TRAINED)
                jobs += [Job(layer, name, draw, repair_steps)] * (repair_steps > 0 and EVERY[name].learns)
    return jobs


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


def _run(
    operation: _Operation, jobs: Sequence[Job], folder: pathlib.Path, seconds_per_row: float
) -> dict[Job, tuple[np.ndarray, str]]:
    """Returns losses and reason of every job, measured or read; the first time left comes from `seconds_per_row`."""

    def cost(job: Job) -> int:
        return len(operation.rows) + STEP_COST * job.repair_steps * operation.repair.batch_size

    left = sum(cost(job) for job in jobs if not job.file(folder).exists())
    outcomes, seconds, done = dict[Job, tuple[np.ndarray, str]](), 0.0, 0
    for number, job in enumerate(jobs, 1):
        if (path := job.file(folder)).exists():
            try:
                arrays = read_npz(path)
                outcomes[job] = arrays["losses"], str(arrays["reason"])
            except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
                raise UserError(f"{path} is damaged ({error}): remove it and run the same command") from error
            continue
        rest = datetime.timedelta(seconds=int(left * (seconds / done if done else seconds_per_row)))
        label = EVERY[job.replacement].label if job.replacement else "the model as it is"
        repaired = ", repaired" if job.repair_steps else ""
        log.info("job %d of %d, about %s left; %s: %s%s", number, len(jobs), rest, job.layer, label, repaired)
        begun = time.monotonic()
        outcomes[job] = losses, reason = _measure(operation, job)
        write_npz(path, {"losses": losses, "reason": np.array(reason)})
        left -= cost(job)
        if not reason:
            seconds, done = seconds + time.monotonic() - begun, done + cost(job)
    return outcomes


def _measure(operation: _Operation, job: Job) -> tuple[np.ndarray, str]:
    """Returns the losses of a job, or no losses and the reason."""
    model, modules, sites, rows, other, how = operation
    none, routers = np.zeros(0), dict[str, Router]()
    for index, name in enumerate(modules):
        if job.replacement and job.layer in (ALL, name):
            random = np.random.default_rng([how.seed, job.draw, index, [*EVERY].index(job.replacement)])
            router = EVERY[job.replacement].make(sites[name], random)
            if isinstance(router, str):
                return none, router
            routers[name] = router
    if job.repair_steps and not all(router.start for router in routers.values()):
        return none, NOT_LINEAR
    try:
        if job.repair_steps and has_constant_weights(model, modules, routers, other[0]):
            return none, "its weights are the same whatever its scores, so there is no gradient to repair it by"
        with replacing(model, modules, routers) as (parameters, current):
            if job.repair_steps:
                repair(model, parameters, current, other, how)
            losses = losses_of(model, rows, current, how.batch_size)
    except UserError as error:  # a router whose k cannot be set
        return none, str(error)
    return (losses, "") if np.isfinite(losses).all() else (none, "its loss is not finite")
