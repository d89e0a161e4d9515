"""Checks that the task, the model, the loss and the batches of samples fit each other."""

from __future__ import annotations

import functools
from typing import Any

from absl import logging as log
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.layer.dispatch.parallel import devices_of_run
from routed.layer.rule import selection_rule
from routed.layer.selection import SELECTIONS
from routed.models.dense import SAMPLE_MODELS
from routed.routers import ROUTERS
from routed.settings.setting import refuse
from routed.tasks import TASKS
from routed.training.optimiser import refuse_factored_experts
from routed.training.phases import phases_of
from routed.training.task_losses import TASK_LOSSES


def positions_of(config: Any) -> int:
    """Returns the tokens of a sample that are routed one by one: those of the task, or of the model."""
    inner = SAMPLE_MODELS[config.model].inner
    return TASKS[config.data.name].positions(config.data) if inner is None else inner(config)


def check(config: ConfigDict) -> None:
    """Raises if parts of the config do not fit each other.

    Raises:
      UserError: names the key, its value, and a value that fits.
    """
    task, data, loss = TASKS[config.data.name], config.data, TASK_LOSSES[config.loss]
    part = SAMPLE_MODELS[config.model]
    if data.target not in task.targets:
        refuse("data.target", data.target, f"data.name={data.name!r} has the targets {', '.join(task.targets)}")
    if data.target_dim != task.outputs(data):
        refuse(
            "data.target_dim",
            data.target_dim,
            f"the target {data.target!r} of data.name={data.name!r} has another number of outputs; set"
            f" data.target_dim={task.outputs(data)}",
        )
    target = task.targets[data.target]
    if target not in loss.fits:
        fitting = [name for name, candidate in TASK_LOSSES.items() if target in candidate.fits]
        use = " or ".join(map(repr, fitting)) or f"a target of another kind than {target!r}"
        refuse("loss", config.loss, f"does not fit data.target={data.target!r} of data.name={data.name!r}; use {use}")
    if loss.labelled and task.bayes is not None:
        reason = f"predictions of a {target} are logits, and `bayes` of data.name={data.name!r} is E[y|x]"
        refuse("data.target", data.target, f"{reason}; leave bayes out of the task")
    _check_batches(config)
    _check_stop(config)
    if config.rates == "tuned" and (task.same_tests or "world" in config.shared_streams):
        warn_of_tuning(data.name)
    if data.test_samples % (clusters := task.labels(data)):
        refuse("data.test_samples", data.test_samples, f"must be a multiple of {clusters}, the number of clusters")
    if part.counts_experts:
        refuse_factored_experts(config)
    if part.routed:
        _check_routing(config)
    if devices_of_run(config) > 1:
        raise UserError(
            f"config keys mesh.data={config.mesh.data}, mesh.expert={config.mesh.expert}: the runs of"
            f" data.name={data.name!r} are small and are shared out whole; use mesh.run"
        )
    if config.checkpoint.final:
        refuse("checkpoint.final", True, f"runs of data.name={data.name!r} keep rows, no parameters; set it to false")


def _check_batches(config: ConfigDict) -> None:
    """Raises if batches cannot be all training samples (`data.full_batch`), or epochs of them (`data.epochs`)."""
    data = config.data
    if data.full_batch and (data.fresh or config.batch_size != data.samples):
        refuse(
            "data.full_batch",
            True,
            f"needs data.fresh=false and batch_size={config.batch_size} equal to data.samples={data.samples}",
        )
    if data.epochs and (data.fresh or data.full_batch or data.samples % config.batch_size):
        refuse(
            "data.epochs",
            True,
            f"needs data.fresh=false, data.full_batch=false, and data.samples={data.samples} a multiple of"
            f" batch_size={config.batch_size}",
        )


def _check_routing(config: ConfigDict) -> None:
    """Raises if groups of tokens, patches of experts, or windows of a router do not fit the samples."""
    task, data = TASKS[config.data.name], config.data
    size = selection_rule(config.selection).group_size
    if size and config.batch_size % size:
        refuse("selection.group_size", size, f"must divide batch_size={config.batch_size}")
    for key, evaluation in (("selection", False), ("selection.eval", True)):
        rule, most = selection_rule(config.selection, evaluation=evaluation), positions_of(config)
        taken = SELECTIONS[rule.name].places
        if taken is not None and taken(rule) > most:
            refuse(
                f"{key}.patches",
                taken(rule),
                f"is more than the patches of a sample of data.name={config.data.name!r}, which has {most}; lower it",
            )
    if "window" in ROUTERS[config.router.name].settings:
        positions = task.dims(data) if task.pixels is None else task.pixels(data)
        where = "positions of a sample" if task.pixels is None else "pixels of a side of an image"
        if positions % config.router.window:
            refuse("router.window", config.router.window, f"must divide the {positions} {where}")


@functools.cache
def warn_of_tuning(name: str) -> None:
    """Warns once that rates are tuned on the samples or rows that are reported, where all seeds share them."""
    log.warning("rates=tuned: data.name=%s has the same test data in every seed: rates are tuned on it", name)


def _check_stop(config: ConfigDict) -> None:
    """Raises if a run waits for samples that cannot be wrong, or trains a router that the model lacks."""
    loss, routed = TASK_LOSSES[config.loss], SAMPLE_MODELS[config.model].routed
    if config.stop.errors and "threshold" not in loss.settings:
        fits = [
            name
            for name, candidate in TASK_LOSSES.items()
            if "threshold" in candidate.settings and not candidate.of_scores
        ]
        refuse("stop.errors", True, f"counts wrong signs, and loss={config.loss!r} has none; use {' or '.join(fits)}")
    if config.stop.errors and SAMPLE_MODELS[config.model].every:
        refuse("stop.errors", True, f"counts the wrong samples of one model, model={config.model!r} has several")
    if config.stop.rise and any("loss" in phase.changes for phase in phases_of(config)):
        refuse("stop.rise", config.stop.rise, "compares all losses, and a phase has another loss; use stop.errors")
    if not routed and (loss.of_scores or any("router" in (phase.groups or ()) for phase in phases_of(config))):
        key, value = ("loss", config.loss) if loss.of_scores else ("phases", config.phases)
        refuse(key, value, f"trains a router, and model={config.model!r} has none; name arms with one in --config.arms")
    if loss.of_scores and config.experts.count < 2:
        refuse("loss", config.loss, f"sets experts apart, and experts.count={config.experts.count}; use at least 2")
