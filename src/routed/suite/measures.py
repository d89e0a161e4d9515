"""Measures of a router without training: the signal in its first gradient, and its cost beside a linear router."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.plan.config import canonical, problem_of, traced
from routed.routers import ROUTERS
from routed.settings.tree import node_of, override
from routed.suite import torch_router
from routed.suite.subject import scores_of
from routed.training.objective import training_loss
from routed.training.problem import Inputs
from routed.training.program import streams

#: The number of batches whose gradients are compared.
BATCHES = 64
#: Tokens, dimensions and experts of the cost, and the number of timings.
SIZE, TIMED = (1024, 512, 64), 30


def gradient_signal(config: ConfigDict, seeds: Sequence[int]) -> np.ndarray:
    """The fraction of the router's gradient at step 0 that batches have in common, one a seed; 0 without a gradient.

    For gradients g_1 .. g_n: (|sum g|^2 - sum |g|^2) / (n - 1) / sum |g|^2, cut at 0 and 1. The numerator over n - 1 is
    an unbiased estimate of n |E g|^2.
    """
    config = canonical(config)
    problem = problem_of(config).build(config, config.data.samples, None)
    values = {key: jnp.asarray(value) for key, value in traced(config).items()}

    def of_seed(seed) -> Float[Array, ""]:
        keys, run = streams(seed, config), node_of(config, values)
        inputs = Inputs(keys, run, problem.draw_world(keys, run), ())
        params, state = problem.init(inputs)

        def gradient(step):
            batch = problem.batch(inputs, (), step)
            loss = partial(training_loss, problem, run, batch, jax.random.fold_in(keys["noise"], step), 0)
            grads = jax.grad(lambda router: loss(params | {"router": router}, state, {})[0])(params["router"])
            return jnp.concatenate([jnp.zeros(1), *(leaf.ravel() for leaf in jax.tree.leaves(grads))])

        return common_fraction(jax.lax.map(gradient, jnp.arange(BATCHES)))

    return np.asarray(jax.jit(partial(jax.lax.map, of_seed))(jnp.asarray(seeds, jnp.uint32)))


def common_fraction(gradients: Float[Array, "n P"]) -> Float[Array, ""]:
    """Estimates |E g|^2 / E |g|^2 with an unbiased numerator, cut at 0 and 1; 0 if all gradients are 0."""
    squares, square_of_sum = (gradients**2).sum(), (gradients.sum(0) ** 2).sum()
    fraction = (square_of_sum - squares) / (len(gradients) - 1) / jnp.where(squares > 0, squares, 1.0)
    return jnp.clip(fraction, 0.0, 1.0)


def cost(config: ConfigDict) -> dict[str, float]:
    """Measures FLOPs and median seconds of the config's router and of a linear router, in turns, on the same tokens."""
    tokens, dim, experts = SIZE
    x, runs, flops = jax.random.normal(jax.random.key(0), (tokens, dim)), list[Any](), list[float]()
    for router_config in (config, override(config, {"router.name": "linear"})):
        init, apply = scores_of(router_config, experts)
        variables = jax.jit(init)(jax.random.key(1), x)
        compiled = jax.jit(apply).lower(variables, x).compile()
        module = ROUTERS[router_config.router.name].make(node_of(canonical(router_config)).router, experts)
        if isinstance(module, torch_router.TorchRouter):  # XLA sees nothing of a callback
            flops.append(torch_router.flops(module.kind, (dim, experts), tokens))
        else:
            flops.append(float((compiled.cost_analysis() or {}).get("flops", 0.0)))
        runs.append(partial(compiled, variables, x))
    seconds = np.array([[_seconds(run) for run in runs] for _ in range(TIMED)])
    medians = np.median(seconds, axis=0).tolist()
    return dict(zip(("flops", "flops_linear", "seconds", "seconds_linear"), (*flops, *medians), strict=True))


def _seconds(run: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
