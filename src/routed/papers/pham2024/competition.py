"""Competition (Pham et al. 2024): on some steps all experts run, the largest outputs win, and the router learns who.

The selection `compete` routes as `top_k` does, and brings a forward of its own. In training a layer also draws a coin:
where it competes, all experts compute every token, and the winners are the K with the largest norms of their outputs.
At evaluation (`selection.eval.name=compete`) a layer competes always. With share 0 only the selection is left: the same
program, for any value.

Where weights are renormalised and nothing is dropped, gradients reach the winners and the router alone. So
`compete_sparse` computes all experts forward only, for the winners' names, and then the winners as any sparse layer
does; `compete_dense` computes all of them at once, and is its oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Scalar

from routed.contracts import Routing, SoftRouting
from routed.contracts.ties import is_highest
from routed.kernels.ragged import sorted_outputs
from routed.layer.dispatch.direct import combined
from routed.layer.moe import Experts, MoE, Tokens, dispatch_of
from routed.layer.rule import QUEUES, Selection, SelectionRule
from routed.layer.selection import top_k
from routed.papers.pham2024.competition_settings import EPOCH, SETTINGS, check
from routed.papers.pham2024.every_expert import one_by_one, parallel_combined, parallel_outputs
from routed.settings.tree import from_flat


class Competition(NamedTuple):
    """The state of a layer that may compete, before its experts run.

    `detached_scores`: the router's, of inputs that get no gradient; `teacher_scores`: those that the winners teach.
    """

    active: Bool[Array, ""]
    detached_scores: Float[Array, "T E"]
    teacher_scores: Float[Array, "T E"]
    key: PRNGKeyArray | None


class Lesson(NamedTuple):
    """The lesson of a layer's winners for its router, where the layer was `active` (`Routing.extra`).

    `scores`: the router's; `norms`: those of the experts' outputs; `mask`: False for padding, which teaches nothing.
    """

    active: Bool[Array, ""]
    scores: Float[Array, "T E"]
    norms: Float[Array, "T E"]
    mask: Bool[Array, " T"] | None = None


def forward(layer: MoE, tokens: Tokens) -> tuple[Float[Array, "T O"], Routing]:
    """Computes a layer whose experts may compete."""
    rule, competition = layer.rule, _begin(layer, tokens)
    reweigh = None
    if not rule.settings.output_of_winners:
        reweigh = partial(weighed, rule, competition.active, detached=competition.detached_scores)
    experts, routing = layer.experts_for(tokens, layer.route(tokens, reweigh))
    select = partial(layer.select, mask=tokens.mask)
    if layer.mesh is None and winners_suffice(rule) and dispatch_of(layer, experts) == "ragged":
        outputs, routing, norms = compete_sparse(rule, select, experts, routing, competition, tokens.mask)
        y = outputs.combined(routing.weight, len(experts.x))
    else:

        def compete():
            outputs, combine = _all_outputs(layer, experts)
            return compete_dense(rule, select, combine, outputs, routing, competition.key, tokens.mask)

        def route():
            return layer.run(experts, routing), routing, jnp.zeros_like(competition.teacher_scores)

        y, routing, norms = jax.lax.cond(competition.active, jax.checkpoint(compete), route)
    return y, routing._replace(extra=Lesson(competition.active, competition.teacher_scores, norms, tokens.mask))


def _begin(layer: MoE, tokens: Tokens) -> Competition:
    """Draws whether a layer competes; without random numbers, as at an evaluation, it does."""
    key = layer.make_rng("noise") if layer.has_rng("noise") else None
    coin, draws = jax.random.split(key) if key is not None else (None, None)
    active = jnp.array(True) if coin is None else is_active(layer.rule, coin, tokens.context.get("step", 0))
    score = partial(layer.scores, context=tokens.context, moves=False)
    detached = score(jax.lax.stop_gradient(tokens.scored))
    teacher = score(tokens.scored) if layer.rule.settings.distillation_trunk else detached
    return Competition(active, detached, teacher, draws)


def _all_outputs(layer: MoE, experts: Experts) -> tuple[Float[Array, "E N O"], Callable[..., Array]]:
    """Returns the outputs of all experts on all tokens, and the function that adds them up by a routing."""
    if layer.mesh is None:
        return jax.vmap(experts.run, in_axes=(0, None))(experts.params, experts.x), combined
    outputs = parallel_outputs(experts.run, layer.mesh, experts.params, experts.x)
    return outputs, partial(parallel_combined, layer.mesh)


def is_active(rule: SelectionRule, key: PRNGKeyArray, step: Any) -> Bool[Array, ""]:
    """True if a layer competes at this step. The key, of this step and layer alone, is consumed."""
    share = jnp.asarray(rule.settings.competition_rate, jnp.float32)
    if rule.settings.schedule == "root":
        share *= 2 / (2 + jnp.sqrt(step // EPOCH + 1.0))
    return jax.random.uniform(key) < share


def winners_suffice(rule: SelectionRule) -> bool:
    """True if `compete_sparse` computes the rule: only norms of experts that compute the output have a gradient.

    Without `renormalise` the winners' weights are shares of all norms, and a winner that is dropped still has a norm.
    """
    settings = rule.settings
    if settings.winners != "norms":
        return settings.winners == "random"
    if settings.output_of_winners:
        return rule.renormalise and not rule.capacity_factor
    return settings.distillation_detached


def compete_sparse(
    rule: SelectionRule,
    select: Callable[..., Any],
    experts: Experts,
    routing: Routing,
    competition: Competition,
    mask: Bool[Array, " T"] | None = None,
) -> tuple[Any, Routing, Float[Array, "T E"]]:
    """Runs all experts forward only where a layer competes, and then those of the routing with a gradient.

    Returns the outputs sorted by expert (`sorted_outputs`), their routing, and the norms that the router is to learn.
    The key is consumed.
    """
    active, settings = competition.active, rule.settings

    def norms_of_all():
        return one_by_one(experts.run, *jax.lax.stop_gradient((experts.params, experts.x)), norms_of)

    absent = lambda: jnp.zeros_like(routing.scores)  # noqa: E731
    norms = jax.lax.stop_gradient(jax.lax.cond(active, norms_of_all, absent))
    deal, order = jax.random.split(competition.key) if competition.key is not None else (None, None)
    if settings.winners == "random" and deal is not None:
        norms = jax.random.permutation(deal, norms, axis=1, independent=True)
    winners, learned, weight = select(norms), norms, routing.weight
    chosen = routing
    if settings.output_of_winners:
        chosen = jax.tree.map(partial(jnp.where, active), winners, routing)
    outputs = sorted_outputs(experts.run, experts.params, experts.x, chosen)
    if settings.output_of_winners and settings.winners == "norms":
        computed = jnp.where(chosen.kept, chosen.token, len(norms))  # padding is not
        learned = norms.at[computed, chosen.expert].set(outputs.measured(norms_of), mode="drop")
        learned = jnp.where(active, learned, norms)
        winners = select(learned, preference=norms)
    if settings.output_of_winners:
        weight = jnp.where(active, winners.weight, weight)
    if settings.distillation_target == "shuffled" and order is not None:
        learned = _shuffled(order, learned, mask)
    return outputs, chosen._replace(scores=routing.scores, weight=weight), learned


def _shuffled(key: PRNGKeyArray, norms: Float[Array, "T E"], mask: Bool[Array, " T"] | None) -> Float[Array, "T E"]:
    """Returns the rows in another order; padding stays where it is."""
    if mask is None:
        return jax.random.permutation(key, norms)
    drawn = jax.random.uniform(key, mask.shape)
    before, after = (jnp.argsort(jnp.where(mask, rank, jnp.inf)) for rank in (jnp.zeros_like(drawn), drawn))
    return norms.at[before].set(norms[after])


def norms_of(outputs: Float[Array, "*N O"]) -> Float[Array, "*N"]:
    """Returns |f|, float32."""
    return jnp.sqrt((outputs.astype(jnp.float32) ** 2).sum(-1) + 1e-24)  # the derivative of a root at 0 is infinite


def compete_dense(
    rule: SelectionRule,
    select: Callable[[Float[Array, "T E"]], Routing],
    combine: Callable[[Routing | SoftRouting, Float[Array, "E N O"]], Float[Array, "T O"]],
    outputs: Float[Array, "E N O"],
    routing: Routing,
    key: PRNGKeyArray | None,
    mask: Bool[Array, " T"] | None = None,
) -> tuple[Float[Array, "T O"], Routing, Float[Array, "T E"]]:
    """Returns the output of a layer that competes, the routing behind it, and the norms that the router is to learn.

    `outputs` are those of all experts (N: one row for all tokens, or T), which `combine` weighs; `routing` is the
    router's choice, and `select` routes by other scores. Norms dealt anew (winners random) are numbers: no expert is to
    learn from another's. The key is consumed.
    """
    norms = jnp.broadcast_to(norms_of(outputs).T, routing.scores.shape)
    deal, order = jax.random.split(key) if key is not None else (None, None)
    if rule.settings.winners == "random" and deal is not None:
        norms = jax.lax.stop_gradient(jax.random.permutation(deal, norms, axis=1, independent=True))
    learned = norms
    if rule.settings.distillation_target == "shuffled" and order is not None:
        learned = _shuffled(order, norms, mask)
    if rule.settings.winners == "all":
        return combine(SoftRouting(routing.scores, jax.nn.softmax(routing.scores)), outputs), routing, learned
    if rule.settings.output_of_winners:
        routing = select(norms)._replace(scores=routing.scores)
    return combine(routing, outputs), routing, learned


def weighed(
    rule: SelectionRule, active: Bool[Array, ""], scores: Float[Array, "T E"], detached: Float[Array, "T E"]
) -> Float[Array, "T E"]:
    """Returns scores whose gradient reaches the router `alpha` times where a layer competes, and the trunk once.

    `detached` are the same scores, of inputs that get no gradient.
    """
    return scores + jnp.where(active, rule.settings.alpha - 1.0, 0.0) * (detached - jax.lax.stop_gradient(detached))


def distillation(rule: SelectionRule, routing: Routing) -> Scalar:
    """Returns the router's loss of a layer (eq. 3): the squared error of its softmax against that of the norms.

    Both are over the K largest. 0 where the layer did not compete, or nobody won.
    """
    settings, lesson = rule.settings, routing.extra
    if lesson is None or settings.winners == "all":
        return jnp.float32(0)
    target = _softmax_of_largest(lesson.norms, rule.k)
    target = jax.lax.stop_gradient(target) if settings.distillation_detached else target
    chosen_alone = settings.distillation_softmax == "chosen"
    learner = _softmax_of_largest(lesson.scores, rule.k) if chosen_alone else jax.nn.softmax(lesson.scores)
    error, mask = ((learner - target) ** 2).sum(1), lesson.mask
    error = error.mean() if mask is None else jnp.where(mask, error, 0).sum() / jnp.maximum(mask.sum(), 1)
    error /= learner.shape[1] if settings.distillation_mean == "entries" else 1
    return settings.distillation_coefficient * jnp.where(lesson.active, error, 0.0)


def _softmax_of_largest(values: Float[Array, "T E"], k: int) -> Float[Array, "T E"]:
    """Returns softmax(TopK(values)): 0 for all but the k largest values of a row."""
    return jax.nn.softmax(jnp.where(is_highest(values, k), values, -jnp.inf))


def experts_per_token(rule: SelectionRule, tokens: int, experts: int) -> Any:
    """Returns the mean number of experts that compute a training token: all of them where the layer competes."""
    return rule.k + rule.settings.competition_rate * (experts - rule.k)


def work(rule: SelectionRule, tokens: int, experts: int) -> Any:
    """Returns the cost of a training token in experts that learn; one that computes forward only costs a third.

    Where not only winners have a gradient, all experts learn.
    """
    return rule.k + rule.settings.competition_rate * (experts - rule.k) / (3 if winners_suffice(rule) else 1)


def averaged(rule: SelectionRule, steps: int) -> SelectionRule:
    """Returns the rule whose share is the mean of its schedule over so many steps."""
    if rule.settings is None or "schedule" not in rule.settings or rule.settings.schedule != "root":
        return rule
    factor = float((2 / (2 + np.sqrt(np.arange(steps) // EPOCH + 1.0))).mean())
    settings = {name: rule.settings[name] for name in SETTINGS if name in rule.settings}
    return rule._replace(settings=from_flat(settings | {"competition_rate": factor * rule.settings.competition_rate}))


COMPETE = Selection(
    top_k,
    biased=True,
    forward=forward,
    loss=distillation,
    experts_per_token=experts_per_token,
    work=work,
    mean_rule=averaged,
    settings=SETTINGS,
    reads=("k", "renormalise", *QUEUES),
    check=check,
)
