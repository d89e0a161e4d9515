"""The objective of a step: the loss of the task, auxiliary losses, and losses of a selection or a router."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from routed.layer.auxiliary import AUXILIARY, POOLED, auxiliary, coefficients_of, steered, users_losses
from routed.layer.model_losses import balance_pooled
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import SELECTIONS, group_of
from routed.metrics.load import load_of
from routed.models.model import ModelPart, Site
from routed.models.router_layers import Layers
from routed.training.freezing import still_layers, unused_layers
from routed.training.problem import Problem

#: The Flax collection in which a router may leave a further loss for each layer.
OBJECTIVE = "objective"


def training_loss(problem: Problem, config: Any, batch, key: PRNGKeyArray, step, params, state, moving, *, still=None):
    """Returns (the minimised loss, (the reported loss, wrong samples, the state and the coefficients after the step,
    the values of users' own auxiliary losses)).

    The sum of the task's loss and auxiliary losses, some with a coefficient of `moving`. Where the router stays
    `still` (None: where it is frozen) its losses are 0: they would train the features that it reads.
    """
    layers = problem.model.layers
    still = still_layers(layers, is_frozen(problem.part, config, step)) if still is None else still
    still = quiet(layers, jnp.asarray(still))
    rule, dispatch = rule_and_dispatch(problem.part, config)
    outputs = problem.model.apply(params, state, batch, rule, dispatch, key, step)
    total, reported = problem.task_loss(config, outputs, batch)
    own_values: dict[str, Array] = {}
    if outputs.sites and problem.router_learns and any(coefficients_of(config.losses).values()):
        weighted, own_values = _auxiliary(problem, config, outputs.sites, params, step, moving, still)
        total += weighted
    of_selection = selection_loss(rule, outputs.sites, by_layer=bool(still.ndim))
    total += jnp.where(still, 0.0, of_selection).sum() if still.ndim else jnp.where(still, 0.0, of_selection)
    for path, loss in jax.tree_util.tree_leaves_with_path(outputs.state.get(OBJECTIVE, {})):
        rests = still if layers is None else still | unused_layers(layers, path)
        total += jnp.where(rests, 0.0, loss).sum() if still.ndim else jnp.where(still, 0.0, loss.sum())
    moved = _moved(config, outputs.sites, moving, still)
    return total, (reported, problem.wrong(config, outputs, batch), outputs.state, moved, own_values)


def selection_loss(rule: SelectionRule, sites: dict[str, Site], by_layer: bool = False) -> Float[Array, "*S"]:
    """Returns the loss that a selection adds, summed over layers, or `by_layer` over sites; 0 if it has none."""
    if (loss := SELECTIONS[rule.name].loss) is None:
        return jnp.float32(0)
    total = jnp.float32(0)
    for site in sites.values():
        routing: Any = site.routing
        values = loss(rule, routing) if routing.scores.ndim == 2 else jax.vmap(partial(loss, rule))(routing)
        total += values if by_layer or not values.ndim else values.sum()
    return total


def _moved(config: Any, sites: dict[str, Site], moving: dict[str, Array], still) -> dict[str, Array]:
    """Returns the coefficients after a step; without the router's training, or without their loss, they stay."""
    scores, moved = [site.routing.scores for site in sites.values()], dict(moving)
    for name in steered(config.losses) if moving else ():
        adapted = AUXILIARY[name].adapted
        assert adapted is not None  # as it is steered
        moved[name] = jnp.where(
            still.all() if still.ndim else still, moving[name], adapted(config.losses, moving[name], scores)
        )
    return moved


def rule_and_dispatch(part: ModelPart, config: Any) -> tuple[SelectionRule, str]:
    """Returns the rule and the dispatch of training; defaults for a model without routers, which reads neither."""
    return (selection_rule(config.selection), config.dispatch) if part.routed else (SelectionRule(), "dense")


def _auxiliary(problem: Problem, config: Any, sites: dict[str, Site], params, step, moving, still):
    """Returns the weighted auxiliary losses, and users' own ones without weight, means over all layers of all sites."""
    coefficients = {name: value for name, value in coefficients_of(config.losses).items() if value}
    coefficients |= {name: moving[name] for name in steered(config.losses) if moving}
    if config.losses.balance_scope == POOLED:
        coefficients.pop("balance", None)  # below

    def of_layer(routing, features, responses, still=still) -> tuple[Array, dict[str, Array]]:
        tokens = len(routing.scores)
        size = group_of(selection_rule(config.selection).group_size, tokens)
        groups = tokens // size if config.losses.balance_scope == "group" else 1
        total, each = auxiliary(
            routing, coefficients, learned=jnp.logical_not(still), groups=groups, losses=config.losses,
            features=features, responses=responses, step=step, steps=config.steps,
        )  # fmt: skip
        return total, {name: each[name] for name in users_losses(config.losses)}

    values = []
    for name, (routing, features) in sites.items():
        if routing.scores.ndim == 2:
            respond = lambda name=name, x=features: _all_responses(problem, params, name, x[None])[0]  # noqa: E731
            values.append(jax.tree.map(lambda value: value[None], of_layer(routing, features, respond)))
            continue

        def of_stack_layer(routing, features, layer, name=name, all_features=features):
            respond = lambda: _all_responses(problem, params, name, all_features)[layer]  # noqa: E731
            return of_layer(routing, features, respond, still[layer] if still.ndim else still)

        values.append(jax.vmap(of_stack_layer)(routing, features, jnp.arange(len(routing.scores))))
    total, each = jax.tree.map(lambda *parts: jnp.concatenate(parts).mean(), *values)
    return total + _pooled(config, sites, still), each


def _pooled(config: Any, sites: dict[str, Site], still) -> Array:
    """Returns the weighted balance loss of all layers of all sites together, if it is configured."""
    if not (config.losses.balance and config.losses.balance_scope == POOLED):
        return jnp.float32(0)
    stacks = [
        site.routing if site.routing.scores.ndim == 3 else jax.tree.map(lambda a: a[None], site.routing)
        for site in sites.values()
    ]
    gate = jax.nn.softmax if config.losses.balance_of == "probabilities" else lambda scores: scores
    probs = jnp.concatenate(
        [gate(stack.scores).mean(1) for stack in stacks]
    )  # [L, E], as stacks have other numbers of tokens
    loads = jnp.concatenate([jax.vmap(lambda routing: load_of(routing)[0])(stack) for stack in stacks])
    if still.ndim:  # layers that stay count, but learn nothing
        probs = jnp.where(jnp.tile(still, len(stacks))[:, None], jax.lax.stop_gradient(probs), probs)
    value = balance_pooled(probs[:, None], loads)
    return jnp.where(still.all() if still.ndim else still, 0.0, config.losses.balance * value)


def _all_responses(problem: Problem, params, site: str, features) -> Array:
    """Returns all experts' outputs on the tokens of each layer of a site."""
    assert problem.model.responses is not None  # as the model has gates
    return problem.model.responses(params, site, features)


def quiet(layers: Layers | None, still: Bool[Array, "*S"]) -> Bool[Array, "*S"]:
    """Returns True also for layers whose router does not learn."""
    return still if layers is None else still | ~np.array(layers.learns)[np.array(layers.kinds)]


def is_frozen(part: ModelPart, config: Any, step: Any = 0):
    """Returns True where the router is frozen at a step (`router.frozen`, `freeze_at`), or the model has none."""
    if "router.freeze_at" in part.reads and config.router.freeze_at < 1:
        return config.router.frozen | (step >= round(config.router.freeze_at * config.steps))
    return config.router.frozen if part.freezable else jnp.array(True)
