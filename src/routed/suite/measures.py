"""What a card measures without training: the signal of a router's first gradient, and what the router costs beside a linear one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.plan.config import canonical, problem_of, traced
from routed.settings.tree import node_of, override
from routed.suite.subject import scores_of
from routed.training.objective import training_loss
from routed.training.problem import Inputs
from routed.training.program import streams

#: Batches whose gradients are compared.
BATCHES = 64
#: Tokens, dimensions and experts of the cost, and how often it is timed.
SIZE, TIMED = (1024, 512, 64), 30


def gradient_signal(config: ConfigDict, seeds: Sequence[int]) -> np.ndarray:
    """Share of the router's gradient at step 0 that batches have in common, one a seed; 0 where it has no gradient.

    Of gradients g_1 .. g_n it is (|sum g|^2 - sum |g|^2) / (n - 1) / sum |g|^2, cut at 0 and 1: the first is unbiased for n |E g|^2.
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

        return common_share(jax.lax.map(gradient, jnp.arange(BATCHES)))

    return np.asarray(jax.jit(partial(jax.lax.map, of_seed))(jnp.asarray(seeds, jnp.uint32)))


def common_share(gradients: Float[Array, "n P"]) -> Float[Array, ""]:
    """|E g|^2 / E |g|^2, unbiased above, between 0 and 1; 0 of zeros."""
    squares, together = (gradients**2).sum(), (gradients.sum(0) ** 2).sum()
    share = (together - squares) / (len(gradients) - 1) / jnp.where(squares > 0, squares, 1.0)
    return jnp.clip(share, 0.0, 1.0)


class Cost(NamedTuple):
    """FLOPs and seconds (the median) of a router on tokens, and of the linear router on the same."""

    flops: float
    flops_linear: float
    seconds: float
    seconds_linear: float

    @property
    def score(self) -> float:
        """1 where it needs no more FLOPs than the linear one."""
        return min(1.0, self.flops_linear / max(self.flops, 1.0))


def cost(config: ConfigDict) -> Cost:
    """What the config's router costs forward, in turns with a linear one, so that both see the machine as it is at that time."""
    tokens, dim, experts = SIZE
    x, runs, flops = jax.random.normal(jax.random.key(0), (tokens, dim)), list[Any](), list[float]()
    for one in (config, override(config, {"router.name": "linear"})):
        init, apply = scores_of(one, experts)
        variables = jax.jit(init)(jax.random.key(1), x)
        made = jax.jit(apply).lower(variables, x).compile()
        flops.append(float((made.cost_analysis() or {}).get("flops", 0.0)))
        runs.append(partial(made, variables, x))
    seconds = np.array([[_seconds(run) for run in runs] for _ in range(TIMED)])
    return Cost(flops[0], flops[1], *np.median(seconds, axis=0).tolist())


def _seconds(run: Any) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begun
