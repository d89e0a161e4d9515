"""The cost of a training step on samples: experts per token, FLOPs, parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.layer.selection import SELECTIONS, in_samples, mean_rule, work
from routed.models import SAMPLE_MODELS
from routed.settings.tree import node_of
from routed.tasks import worlds
from routed.training.objective import rule_and_dispatch
from routed.training.phases import mean_so_far_of
from routed.training.problem import Cost
from routed.training.sample_checks import positions_of
from routed.training.sample_problem import SampleProblem, build

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
    served = sizes["router"] + sizes["experts"] * share * _passes(problem, test)
    expert_flops = flops_of_expert(problem, test)
    if expert_flops is not None:
        flops = tokens * (6.0 * sizes["router"] + 3.0 * expert_flops * learning)
    elif problem.part.flops is not None:
        flops = 3.0 * tokens * problem.part.flops(config)
    else:
        flops = 6.0 * tokens * served
    total = sum(size for name, size in sizes.items() if name != "fixed")
    return Cost(tokens, flops, UPDATE * total, lambda: total)


def _passes(problem: SampleProblem, batch: Batch) -> int:
    """Returns how often a token passes an expert's weights: once a patch for non-linear filters, else once."""
    filters = problem.experts is not None and "patches" in problem.experts.tokens
    return batch.x.shape[1] if filters and problem.config.experts.activation != "linear" else 1


def flops_of_expert(problem: SampleProblem, batch: Batch) -> float | None:
    """Returns the FLOPs of an expert on an image of the batch, forward; None for experts whose parameters tell them."""
    if problem.experts is None or problem.experts.flops is None:
        return None
    _, _, side, channels = batch.x.shape
    config = problem.config
    return problem.experts.flops(config.experts.width, side, channels, problem.task.outputs(config.data))


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
