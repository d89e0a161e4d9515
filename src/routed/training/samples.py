"""The problem of samples as a part: its columns, its settings, the cost of a step, and the tokens of a trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from scipy.special import entr

from routed.contracts import AT_LEAST_0, Batch, Column
from routed.layer.selection import SELECTIONS, in_samples, mean_rule, work
from routed.metrics.router import PROBE
from routed.models.dense import SAMPLE_MODELS
from routed.settings.setting import Setting, at_least
from routed.settings.tree import node_of
from routed.tasks import TASKS, worlds
from routed.training import probes
from routed.training.objective import rule_and_dispatch
from routed.training.phases import mean_so_far_of
from routed.training.problem import Cost, ProblemPart
from routed.training.program import streams
from routed.training.sample_checks import check, positions_of
from routed.training.sample_problem import SampleProblem, build
from routed.training.sample_values import check_values
from routed.training.task_losses import TASK_LOSSES

#: The losses of samples with classes, which have no trivial scale.
IN_NATS = {
    "train/loss": Column(
        "training loss (nats per sample)",
        "Mean cross-entropy of the training batches since the last evaluation, by the rule that trains.",
        AT_LEAST_0,
        log=True,
    ),
    "test/loss": Column(
        "test loss (nats per sample)", "Mean cross-entropy on test samples, as evaluated.", AT_LEAST_0, log=True
    ),
}


def columns_of(config: ConfigDict) -> dict[str, Column]:
    """Returns the columns of a config: those of all probes, of its task and of its model, with their best constants."""
    columns = probes.columns_of(SampleProblem) | (IN_NATS if TASK_LOSSES[config.loss].labelled else {})
    columns |= dict(TASKS[config.data.name].columns) | dict(SAMPLE_MODELS[config.model].columns)
    return columns | {
        name: columns[name]._replace(constant=value) for name, value in _constants(config).items() if name in columns
    }


def _constants(config: ConfigDict) -> dict[str, float]:
    """Returns the values of metrics for the best predictor that ignores its input; none where it is unknown."""
    task, loss = TASKS[config.data.name], TASK_LOSSES[config.loss]
    if not task.has_constant or loss.constant is None:
        return {}
    classes = max(task.outputs(config.data), 2)
    value, largest = loss.constant(classes), 1 / classes
    if (shares := task.shares(config.data)) is not None:
        value, largest = float(entr(shares).sum()), float(shares.max())
    beside = {"test/accuracy": largest} if loss.labelled else {"test/loss_soft": value}
    return {"test/loss": value, **beside}


def offline(config: ConfigDict, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the columns of a run that need its whole history, or the host."""
    return probes.finish(build(config, config.data.samples), history)


def traced(config: ConfigDict) -> dict[str, dict[str, Any]]:
    """Returns the clusters of the test tokens of the base seed, drawn again (`ProblemPart.traced`)."""
    task, data = TASKS[config.data.name], node_of(config).data
    world = worlds.draw_world(task, streams(config.seed, config)["world"], data, config.data.samples)
    world = world._replace(shared=task.shared(config.data))
    label = np.asarray(worlds.test_batch(task, world, data).label)[:PROBE]
    return {"choices": {"labels": {"cluster": label}, "sequence": np.arange(len(label)), "layers": ["0"]}}


#: FLOPs that take as long as the update of a parameter: of the headline's soft and hard arms, which differ in FLOPs
#: 57-fold and in time 3-fold (2.35 and .72 ms a step on 2 CPU cores).
UPDATE = 80.0


def experts_per_token(config: Any) -> Any:
    """Returns the number of experts that compute for one training token, in a phase with this config."""
    return _of_token(config, lambda rule, *sizes: SELECTIONS[rule.name].experts_per_token(rule, *sizes))


def _of_token(config: Any, count: Callable[..., Any]) -> Any:
    """Returns `count(rule, tokens, experts)` of a routed model; else all experts of an ensemble, or 1."""
    part = SAMPLE_MODELS[config.model]
    if not part.routed:
        return float(config.experts.count) if part.every else 1.0
    rule = mean_rule(rule_and_dispatch(part, config)[0], config.steps)
    return count(in_samples(rule, positions_of(config)), config.batch_size, config.experts.count)


def cost(config: ConfigDict) -> Cost:
    """Returns the cost of a step, the mean over the steps where phases select in different ways.

    FLOPs are 6 for each token and parameter that serves the token, or 3 times the FLOPs that experts on images declare;
    updates are UPDATE for each parameter.
    """
    problem = build(config, config.data.samples)
    test, sizes = _sizes(problem)
    learning = float(mean_so_far_of(lambda phase: _of_token(phase, work), config, config, config.steps))
    share = learning / config.experts.count if problem.model.scores is not None else 1.0
    tokens = config.batch_size * math.prod(test.cluster.shape[1:])
    expert = problem.experts
    if expert is not None and expert.flops is not None:
        _, _, side, channels = test.x.shape
        forward = expert.flops(config.experts.width, side, channels, problem.task.outputs(config.data))
        flops = tokens * (6.0 * sizes["router"] + 3.0 * forward * learning)
    elif problem.part.flops is not None:
        flops = 3.0 * tokens * problem.part.flops(config)
    else:
        # A token passes an expert's weights once, or once a patch where filters are not linear.
        filters = expert is not None and "patches" in expert.tokens and config.experts.activation != "linear"
        passes = test.x.shape[1] if filters else 1
        flops = 6.0 * tokens * (sizes["router"] + sizes["experts"] * share * passes)
    total = sum(size for name, size in sizes.items() if name != "fixed")
    return Cost(tokens, flops, UPDATE * total, lambda: total)


def _sizes(problem: SampleProblem) -> tuple[Batch, dict[str, int]]:
    """Returns the shapes of the test batch, and the number of parameters of each group."""
    key, task = jax.random.key(0), problem.task

    def init():
        config, keys = node_of(problem.config), dict.fromkeys(("world", "init", "noise", "order"), key)
        world = problem.draw_world(keys, config)._replace(shared=task.shared(problem.config.data))
        test = worlds.test_batch(task, world, config.data)
        return test, problem.model.init(key, test)[0]

    test, params = jax.eval_shape(init)
    return test, {name: sum(a.size for a in jax.tree.leaves(tree)) for name, tree in params.items()}


SAMPLES = ProblemPart(
    build=build,
    data=TASKS,
    models=SAMPLE_MODELS,
    loss="test/loss",
    columns=columns_of,
    shared_arrays=lambda config: TASKS[config.data.name].shared(config.data),
    feed=lambda config, seed, rows=slice(None): lambda first, steps: (),
    feed_shape=lambda config, steps: (),
    offline=offline,
    traced=traced,
    positions=positions_of,
    digest=lambda config: TASKS[config.data.name].digest(config.data),
    about=lambda config: TASKS[config.data.name].about(config.data),
    cost=cost,
    fuse="LIBRARY_FUSION_TYPE_REDUCE",
    settings={"shuffles": Setting(32, "draws of the shuffled-router baseline at an evaluation; 0: none", at_least(0))},
    uses=("model", "loss", "optimizer.normalise"),
    reads=(
        "data.samples",
        "data.fresh",
        "data.full_batch",
        "data.epochs",
        "data.test_samples",
        "data.target",
        "data.target_dim",
    ),
    check=check,
    check_values=check_values,
)

EXPERTS = probes.experts_probe(
    SampleProblem,
    experts_per_token,
    "Experts that are computed for a training token: all of a soft mixture, k of a sparse one. What a step costs.",
    applies=lambda problem: True,
)
