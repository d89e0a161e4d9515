"""Routers that are fitted once in a run to what their sparse layers see: `router.fit`, `router.fit_at`."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import KIND
from routed.models.router_layers import layers_of
from routed.routers import ROUTERS
from routed.routers.product import DISTANCE, PRODUCT
from routed.routers.scores import sharpness_for
from routed.settings.setting import refuse
from routed.settings.tree import node_of
from routed.training.problem import Inputs

#: Tokens that a router is fitted to, at least; and what is folded into the key of a run's initial weights for it.
TOKENS, STREAM = 16_384, 2**30
NONE, BALANCED, SHARPNESS, DISTILLED = "none", "balanced", "sharpness", "distilled"
SHARP_CLUSTERS = "sharp_clusters"
#: The router.score and the router.bias that a fit needs.
NEEDS = {BALANCED: (DISTANCE, True), SHARPNESS: (PRODUCT, False), SHARP_CLUSTERS: (PRODUCT, True)}
#: Steps of Adam on all tokens, and their rate, in which a router learns the choices of another.
LESSONS, RATE = 500, 0.02


def kinds_of(config: ConfigDict) -> list[tuple[ConfigDict, np.ndarray]]:
    """Returns the config of each kind of router, and the sparse layers that have it."""
    layers = layers_of(config)
    if layers is None:
        return [(config, np.arange(config.transformer.sparse_layers))]
    return [(config, np.flatnonzero(np.array(layers.kinds) == kind)) for kind, config in enumerate(layers.configs)]


def fit_step(config: ConfigDict) -> int | None:
    """Returns the step at which routers are fitted; None if none is."""
    if all(kind.router.fit == NONE for kind, _ in kinds_of(config)):
        return None
    return round(config.router.fit_at * config.steps)


def check_fit(config: ConfigDict) -> None:
    """Refuses a fit that the router cannot have, and one between two evaluations."""
    router, fit, read = config.router, config.router.fit, ROUTERS[config.router.name].reads
    if fit == NONE:
        return
    by = "scale" if fit == SHARPNESS else "from_clusters"
    if not getattr(ROUTERS[router.name], by):
        able = ", ".join(name for name, part in ROUTERS.items() if getattr(part, by) and "hidden" in part.tokens)
        refuse("router.fit", fit, f"router.name={router.name} has no columns to fill; use one of {able}")
    if fit in NEEDS:
        score, biased = NEEDS[fit]
        if "score" not in read or router.score != score or ("bias" in read and router.bias) != biased:
            refuse("router.fit", fit, f"needs router.score={score} and router.bias={str(biased).lower()}")
    if (step := round(router.fit_at * config.steps)) % config.eval_every:
        reason = f"there is no evaluation at step {step}, where routers are fitted; use eval_every="
        refuse("router.fit_at", router.fit_at, f"{reason}{math.gcd(config.eval_every, step)}")


def fitted(problem: Any, inputs: Inputs, params: dict[str, Any], state: dict[str, Any], step: Any, teacher: Any) -> Any:
    """Returns the parameters with the columns of fitted routers, layer after layer, so that each sees what is below it.

    Features are those of the shared rows `fitted_on`, as in an evaluation; `teacher` are another model's scores there.
    """
    kinds, moment = kinds_of(problem.config), (problem, inputs, state, step, teacher)
    for stack in problem.kind.read:
        for kind, (config, numbers) in enumerate(kinds):
            if config.router.fit != NONE:
                path = (stack, "router", *([f"{KIND}{kind}"] if len(kinds) > 1 else []))
                fit = partial(_fit_layer, moment, config, path, jnp.asarray(numbers))
                params = jax.lax.fori_loop(0, len(numbers), fit, params)
    return params


def scores_on(problem: Any, params: dict[str, Any], state: dict[str, Any], rows: Any) -> dict[str, Array]:
    """Returns the scores [S, N, E] of the sparse layers of each stack on the tokens of blocks of rows."""
    rule, dispatch = problem.evaluation_rule()

    def scores(block):
        sites = problem.model.apply(params, state, block, rule, dispatch).sites
        return {stack: site.routing.scores for stack, site in sites.items()}

    blocks = jax.lax.map(scores, rows)
    return {stack: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, a.shape[3]) for stack, a in blocks.items()}


def _distilled(module: Any, params: Any, x: Float[Array, "N D"], scores: Float[Array, "N E"]) -> Any:
    """Returns parameters under which a router's probabilities are nearest to those of `scores` (cross-entropy)."""
    probs, adam = jax.nn.softmax(scores), optax.adam(RATE)

    def loss(params):
        return -(probs * jax.nn.log_softmax(module.apply({"params": params}, x))).sum(1).mean()

    def lesson(_, now):
        updates, moments = adam.update(jax.grad(loss)(now[0]), now[1])
        return optax.apply_updates(now[0], updates), moments

    return jax.lax.fori_loop(0, LESSONS, lesson, (params, adam.init(params)))[0]


def _fit_layer(
    moment: tuple[Any, ...], config: ConfigDict, path: tuple[str, ...], numbers, i, params
) -> dict[str, Any]:
    """Returns the parameters with the router of layer `numbers[i]` fitted; `path` is that of its kind of router."""
    problem, inputs, state, step, teacher = moment
    part, (rule, dispatch), layer = ROUTERS[config.router.name], problem.evaluation_rule(), numbers[i]
    module = part.make(node_of(config).router, config.experts.count)

    def features(block):
        return problem.model.apply(params, state, block, rule, dispatch, step=step).sites[path[0]].features[layer]

    blocks = jax.lax.map(features, inputs.shared["fitted_on"])
    x = blocks.reshape(-1, blocks.shape[-1])
    stacked = functools.reduce(lambda tree, name: tree[name], path, params["router"])
    key = jax.random.fold_in(inputs.keys["init"], STREAM + list(problem.kind.read).index(path[0]))
    old = jax.tree.map(lambda a: a[layer], stacked)
    if config.router.fit == SHARPNESS:
        assert part.scale is not None  # as check_fit has asked
        scores: Any = module.apply({"params": old}, x)
        new = part.scale(old, sharpness_for(scores, inputs.config.router.fit_entropy))
    elif config.router.fit == DISTILLED:
        new = _distilled(module, old, x, teacher[path[0]][layer])
    else:
        assert part.from_clusters is not None
        arguments = module, old, x, jnp.ones(len(x)), jax.random.fold_in(key, layer)
        new = part.from_clusters(*arguments, balanced=config.router.fit == BALANCED)
        if config.router.fit == SHARP_CLUSTERS:  # closeness to the centres, x.w - |w|^2 / 2, times a factor
            new |= {"bias": -0.5 * (new["kernel"] ** 2).sum(0)}
            scores = module.apply({"params": new}, x)
            factor = sharpness_for(scores, inputs.config.router.fit_entropy)
            new |= {"kernel": factor * new["kernel"], "bias": factor * new["bias"]}
    whole = jax.tree.map(lambda a, b: a.at[layer].set(b), stacked, new)
    return params | {"router": _with(params["router"], path, whole)}


def _with(tree: Any, path: tuple[str, ...], new: Any) -> Any:
    return new if not path else tree | {path[0]: _with(tree[path[0]], path[1:], new)}
