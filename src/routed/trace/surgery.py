"""Surgery on a Hugging Face model: its validation loss with routers replaced, one layer at a time and all, before and after a repair.

A job is one such model on all rows; its losses, a number a row, stay in OUT/jobs, so a killed surgery goes on at the job where it was.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import pathlib
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging as log

from routed.contracts import UserError
from routed.system import files
from routed.trace.arrays import as_array
from routed.trace.capture import check_ids, digest_of, digest_of_model, same_command
from routed.trace.hooks import CHOOSES, listening, routers_of, weights_of
from routed.trace.replacements import EVERY, NOT_LINEAR, REPLACEMENTS, TRAINED, Linear, Router, Site
from routed.trace.stand_ins import is_constant, losses_of, operated, repair

#: Tokens of other text whose scores and features are kept.
KEPT = 4096
#: The place of a job that replaces every router.
ALL = "all"
#: What a step of a repair costs, in batches of an evaluation.
STEP = 3


class Job(NamedTuple):
    """One model to measure: which router (`ALL`: every one) is replaced by what (an empty name: the model as it is).

    `repaired` counts the steps of its repair.
    """

    place: str
    name: str
    draw: int = 0
    repaired: int = 0

    def file(self, out: pathlib.Path) -> pathlib.Path:
        """Where its losses are."""
        return out / "jobs" / f"{self.place}-{self.name or 'model'}-{self.draw}-{self.repaired}.npz"


class Found(NamedTuple):
    """What a surgery found: mean losses [R] by job in nats a token, or in words why a job has none; `unseen`: share of tokens whose id the other text lacks."""

    layers: tuple[str, ...]
    experts: int
    losses: Mapping[Job, np.ndarray]
    reasons: Mapping[Job, str]
    unseen: float
    tokens: int
    repair_steps: int
    draws: int
    model: str
    source: str


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
    foreign: Any = None,
    name: str = "",
    source: str = "",
) -> Found:
    """Measures `model` (a causal one of transformers, on its device) on `rows` of token ids of one length, with other routers.

    `replace` names what stands in for them (`REPLACEMENTS`; default: all, `checkpoint` if there is a `foreign` one).

    Tables are filled from the rows `other`, and a repair trains the parameters of the routers that were replaced on them, everything
    else frozen: `repair_steps` of Adam with the loss of the text alone, steps of `repair_rate` times the standard deviation of each
    parameter at the start, falling linearly to 0. What is drawn is drawn `draws` times. `foreign` is another checkpoint of the model.

    Raises:
      UserError: an encoder-decoder; an unknown architecture or replacement; too few rows; `out` holds another surgery.
    """
    folder, replace = files.folder(out), _replacements(replace, foreign is not None)
    if model.config.is_encoder_decoder:
        raise UserError(
            f"{type(model).__name__} is an encoder-decoder, whose loss on plain text says nothing: surgery takes models that predict the next token"
        )
    if not rows or not other or len(rows[0]) < 2:
        raise UserError("surgery takes at least a row of text to measure on, a row of other text, and two tokens a row")
    check_ids(model, [*rows, *other])
    known = routers_of(model, routers, k)
    layers, weights = tuple(known), _linear_of(known)
    others = {} if foreign is None else _linear_of(routers_of(foreign, routers, k))
    settings = {
        "routers": list(layers), "k": k, "batch_size": batch_size, "repair_rate": repair_rate, "seed": seed, "name": name,
        "other": digest_of(other), "weights": digest_of_model(model), "router_from": "" if foreign is None else digest_of_model(foreign),
    }  # fmt: skip
    same_command(folder, model, rows, settings, "surgery.json")
    with files.explained(folder):
        (folder / "jobs").mkdir(exist_ok=True)
    jobs = _jobs(layers, replace, draws, repair_steps)
    with _frozen(model):
        begun = time.monotonic()
        sites = _sites(model, known, weights, others, other, batch_size)
        pace = (time.monotonic() - begun) / len(other)
        measure = functools.partial(_job, model, known, sites, rows, other, repair_rate, batch_size, seed)
        found = _run(jobs, measure, lambda job: len(rows) + STEP * job.repaired * batch_size, folder, pace)
    if why := found[Job(ALL, "")][1]:
        raise UserError(
            f"the model as it is has no loss to compare with: {why}; remove {folder} and look at model and text"
        )
    losses = {job: one for job, (one, why) in found.items() if not why}
    reasons = {job: why for job, (_, why) in found.items() if why}
    first = next(iter(sites.values()))
    ids = np.concatenate(rows)
    unseen = float((first.row_of[ids] == len(first.counts) - 1).mean())
    return Found(layers, first.experts, losses, reasons, unseen, len(ids), repair_steps, draws, name, source)


def _replacements(asked: Sequence[str], has_foreign: bool) -> Sequence[str]:
    """What is asked for, or everything that can be.

    Raises:
      UserError: a replacement that is unknown, or another checkpoint that is not there or not asked for.
    """
    if unknown := [one for one in asked if one not in REPLACEMENTS]:
        raise UserError(f"--replace={unknown[0]}: no such replacement; known: {', '.join(REPLACEMENTS)}")
    of_foreign = [name for name, one in REPLACEMENTS.items() if one.foreign]
    if asked and has_foreign != any(name in asked for name in of_foreign):
        raise UserError(
            f"--replace={of_foreign[0]} needs --router_from, and --router_from needs it: give both or neither"
        )
    return asked or [name for name in REPLACEMENTS if has_foreign or name not in of_foreign]


def halves(rows: Sequence[np.ndarray], names: Sequence[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The first and the second half of the rows of every file; names say which file each row is of.

    Raises:
      UserError: a file has one row.
    """
    first, second = list[np.ndarray](), list[np.ndarray]()
    for name in dict.fromkeys(names):
        some = [row for row, of in zip(rows, names, strict=True) if of == name]
        if len(some) < 2:
            raise UserError(
                f"--text: {name} has one row, which cannot be halved: choose a smaller --length, or give --other_text"
            )
        first += some[: len(some) // 2]
        second += some[len(some) // 2 :]
    return first, second


def _kernels(weights: Mapping[str, Linear | None]) -> list[np.ndarray]:
    return [one.kernel for one in weights.values() if one is not None]


def _jobs(layers: Sequence[str], replace: Sequence[str], draws: int, repair_steps: int) -> list[Job]:
    """All of them: the model as it is, then all routers, then each; what is most asked comes first."""
    jobs = [Job(ALL, "")]
    for place in (ALL, *layers):
        for name in (TRAINED, *replace):
            for draw in range(draws if EVERY[name].drawn else 1):
                jobs += [Job(place, name, draw)] * (name != TRAINED)
                jobs += [Job(place, name, draw, repair_steps)] * (repair_steps > 0 and EVERY[name].learns)
    return jobs


@contextlib.contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """The model as it is evaluated, with no parameter that trains; as it was afterwards."""
    trained, training = [p for p in model.parameters() if p.requires_grad], model.training
    model.eval()
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.train(training)
        for parameter in trained:
            parameter.requires_grad_(True)


def _linear_of(known: Mapping[str, tuple[Any, Any]]) -> dict[str, Linear | None]:
    found: dict[str, Linear | None] = {}
    for name, (module, _) in known.items():
        held, bias = weights_of(module), getattr(module, CHOOSES, None)
        has_offset = getattr(getattr(module, "classifier", module), "bias", None) is not None
        found[name] = held and Linear(
            held[0], held[1] if has_offset else None, None if bias is None else as_array(bias)
        )
    return found


def _sites(model, known, own, foreign, other: Sequence[np.ndarray], batch_size: int) -> dict[str, Site]:
    """What the other text says of every router: one pass over it."""
    import torch

    log.info("reading %d rows of other text", len(other))
    ids = np.concatenate(other)
    codes = np.unique(ids)
    row_of = np.full(len(model.get_input_embeddings().weight), len(codes), np.int64)
    row_of[codes] = np.arange(len(codes))
    picked = np.sort(np.random.default_rng(0).permutation(len(ids))[:KEPT])
    counts: dict[str, np.ndarray] = {}
    scores, features = ({name: list[np.ndarray]() for name in known} for _ in range(2))
    with torch.no_grad(), listening(known) as seen:
        for begin in range(0, len(other), batch_size):
            some = np.stack(other[begin : begin + batch_size])
            model(input_ids=torch.as_tensor(some).to(model.device), use_cache=False)
            first = begin * some.shape[1]
            here = picked[(picked >= first) & (picked < first + some.size)] - first
            for name, one in seen.items():
                experts = one.scores.shape[-1]
                table = counts.setdefault(name, np.zeros((len(codes) + 1, experts), np.int32))
                chosen = as_array(one.experts).reshape(some.size, -1)
                np.add.at(table, (row_of[some.reshape(-1)][:, None], chosen), 1)
                scores[name].append(as_array(one.scores.reshape(-1, experts)[here]).astype(np.float32))
                features[name].append(as_array(one.features.reshape(some.size, -1)[here]).astype(np.float32))
    names, sites = list(known), {}
    for i, name in enumerate(names):
        counts[name][-1] = counts[name].sum(0)
        after = names[(i + 1) % len(names)]
        sites[name] = Site(
            counts[name].shape[1], seen[name].experts.shape[-1], ids[picked], np.concatenate(scores[name]), np.concatenate(features[name]), counts[name], row_of,
            own[name], own[after] if after != name else None, foreign.get(name),
        )  # fmt: skip
    return sites


def _run(
    jobs: Sequence[Job],
    measure: Callable[[Job], tuple[np.ndarray, str]],
    work_of: Callable[[Job], int],
    folder: pathlib.Path,
    pace: float,
) -> dict[Job, tuple[np.ndarray, str]]:
    """Losses and reason of every job, measured or read; `pace`: seconds of a row, until jobs say it."""
    left = sum(work_of(job) for job in jobs if not job.file(folder).exists())
    found, spent, done = dict[Job, tuple[np.ndarray, str]](), 0.0, 0
    for number, job in enumerate(jobs):
        if job.file(folder).exists():
            found[job] = _read(job.file(folder))
            continue
        rest = datetime.timedelta(seconds=int(left * (spent / done if done else pace)))
        what = f"{job.place}: {EVERY[job.name].words if job.name else 'the model as it is'}{', repaired' if job.repaired else ''}"
        log.info("job %d of %d, about %s left; %s", number + 1, len(jobs), rest, what)
        begun = time.monotonic()
        found[job] = losses, why = measure(job)
        files.write(job.file(folder), functools.partial(_save, losses, why))
        left -= work_of(job)
        if not why:
            spent, done = spent + time.monotonic() - begun, done + work_of(job)
    return found


def _save(losses: np.ndarray, reason: str, path: pathlib.Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, losses=losses, reason=np.array(reason))


def _read(path: pathlib.Path) -> tuple[np.ndarray, str]:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
            return held["losses"], str(held["reason"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error}): remove it and run the same command") from error


def _job(model, known, sites, rows, other, rate: float, batch_size: int, seed: int, job: Job) -> tuple[np.ndarray, str]:
    """The losses of a job, or none and the reason."""
    names, none = ([*known] if job.place == ALL else [job.place]) if job.name else [], np.zeros(0)
    made: dict[str, Router] = {}
    for name in names:
        random = np.random.default_rng([seed, job.draw, [*known].index(name), [*EVERY].index(job.name)])
        router = EVERY[job.name].make(sites[name], random)
        if isinstance(router, str):
            return none, router
        made[name] = router
    if job.repaired and not all(router.start for router in made.values()):
        return none, NOT_LINEAR
    try:
        if job.repaired and all(
            is_constant(known[name][0], known[name][1], sites[name], router) for name, router in made.items()
        ):
            return none, "its weights are the same whatever its scores, so there is no gradient to repair it by"
        with operated(model, known, made) as (params, now):
            if job.repaired:
                repair(model, params, now, other, job.repaired, rate, batch_size, seed)
            losses = losses_of(model, rows, now, batch_size)
    except UserError as error:  # a rule that the router cannot have
        return none, str(error)
    return (losses, "") if np.isfinite(losses).all() else (none, "its loss is not finite")
