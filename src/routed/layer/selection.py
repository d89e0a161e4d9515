"""Selections: pure functions from scores to which experts a token uses, and with which weights.

`select` applies one to every group of tokens. Everything is float32, and ties go to the lower index.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from routed.contracts import Routing, SoftRouting
from routed.contracts.ties import highest
from routed.kernels.ranks import ranks
from routed.layer.rule import QUEUES, Rule, Selection
from routed.settings.setting import Setting, at_least, one_of, refuse


def select(
    rule: Rule,
    scores: Float[Array, "T E"],
    *,
    preference: Float[Array, "T E"] | None = None,
    bias: Float[Array, " E"] | None = None,
    mask: Bool[Array, " T"] | None = None,
) -> Routing | SoftRouting:
    """Routes tokens by `rule`, each group of `rule.group_size` tokens on its own.

    Experts are chosen by `preference` (scores with noise; default: the scores) plus `bias` (which balances the load;
    only the choice depends on it, so it has no gradient); weights come from `scores`. Tokens where `mask` is False are
    padding: they take no place in a queue.

    Raises:
      ValueError: the groups do not divide the tokens.
    """
    tokens, experts = scores.shape
    size = rule.group_size or tokens
    if tokens % size:
        raise ValueError(f"selection.group_size={size} does not divide {tokens} tokens")
    scores = scores.astype(jnp.float32)
    preference = scores if preference is None else preference.astype(jnp.float32)
    bias = jnp.zeros(experts) if bias is None else bias
    mask = jnp.ones(tokens, bool) if mask is None else mask
    if size == tokens:  # not as a batch of one group: XLA fuses the softmax of two axes, not of three (BUILD_NOTES.md)
        return SELECTIONS[rule.name].route(rule, scores, preference, bias, mask)
    grouped = [a.reshape(tokens // size, size, *a.shape[1:]) for a in (scores, preference, mask)]
    routing: Any = jax.vmap(lambda s, p, m: SELECTIONS[rule.name].route(rule, s, p, bias, m))(*grouped)
    if isinstance(routing, Routing):
        first = jnp.arange(tokens // size)[:, None] * size
        routing = routing._replace(token=routing.token + first)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), routing)


def capacity(rule: Rule, tokens: int, experts: int) -> int:
    """Returns the places in the queue of one expert in a group of `tokens`; with capacity factor 0 nothing is ever
    dropped.

    per_assignment: ceil(factor k T / E) (GShard, V-MoE). per_token: round(factor T / E), whatever k (flaxformer, hence
    the T5 papers). Rounded up to `capacity_multiple`, at least `min_capacity`, at most T, since a token chooses an
    expert once.
    """
    chosen = SELECTIONS[rule.name]
    if chosen.places is not None:
        return min(chosen.places(rule), tokens)
    if chosen.open or not (rule.capacity_factor or chosen.bounded):  # open: any number of tokens may choose an expert
        return tokens
    share = (rule.capacity_factor or 1.0) * tokens / experts
    # Rounded first: 1.1 * 1 * 100 / 10 is 11.000000000000002.
    size = round(share) if rule.capacity_rule == "per_token" else math.ceil(round(share * rule.k, 6))
    size += -size % rule.capacity_multiple
    return min(max(size, rule.min_capacity, 1), tokens)


def in_samples(rule: Rule, positions: int) -> Rule:
    """Returns the rule for samples of so many tokens, which are the groups of a selection `within_samples`."""
    return rule._replace(group_size=positions) if SELECTIONS[rule.name].within_samples else rule


def group_of(size: int, tokens: int) -> int:
    """Returns the largest group of at most `size` tokens that divides `tokens`; 0: all of them are one group."""
    return max(n for n in divisors(tokens) if n <= size) if size else tokens


def divisors(number: int) -> set[int]:
    """Returns all divisors of a positive number."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return {*low, *(number // n for n in low)}


def groupless(rule: Rule) -> bool:
    """True if groups are neither set nor of consequence: a token has the same experts whatever the other tokens are."""
    chosen = SELECTIONS[rule.name]
    return chosen.sparse and not (chosen.sees_others or rule.capacity_factor or rule.group_size)


def soft(rule: Rule, scores, preference, bias, mask) -> SoftRouting:
    """Returns every expert, weighted by the softmax of its score: f(x) = sum_e p_e(x) f_e(x) (Dikkala et al. 2023,
    Section 2).
    """
    del rule, preference, bias
    return SoftRouting(scores=scores, weight=jnp.where(mask[:, None], jax.nn.softmax(scores), 0.0))


def top_k(rule: Rule, scores, preference, bias, mask) -> Routing:
    """Returns the k most preferred experts of each token.

    Weights are probabilities of the softmax over all experts, or over the k chosen ones when `renormalise` (k = 1: the
    weight is exactly 1 and the router gets no gradient, which is Dikkala's rule of evaluation).
    """
    expert = highest(preference + bias[None], rule.k)
    probability = jnp.take_along_axis(jax.nn.softmax(scores), expert, axis=1)
    weight = jax.nn.softmax(jnp.take_along_axis(scores, expert, axis=1)) if rule.renormalise else probability
    return _queued(rule, scores, expert, weight, mask, probability)


def raw(rule: Rule, scores, preference, bias, mask) -> Routing:
    """Returns the k most preferred experts, weighted by their scores as they are (the released code of Chen et al.
    2022).
    """
    expert = highest(preference + bias[None], rule.k)
    weight = jnp.take_along_axis(scores, expert, axis=1)
    return _queued(rule, scores, expert, weight, mask, weight)


def sigmoid(rule: Rule, scores, preference, bias, mask) -> Routing:
    """Returns the k highest of sigmoid(score) + bias, weighted by sigmoid(score); over its sum when `renormalise`
    (DeepSeek-V3).
    """
    expert = highest(sigmoid_order(preference, bias), rule.k)
    affinity = jnp.take_along_axis(jax.nn.sigmoid(scores), expert, axis=1)
    weight = affinity
    if rule.renormalise:  # affinity over its sum, where the affinities of all chosen experts are 0 in float32 too
        weight = jax.nn.softmax(jax.nn.log_sigmoid(jnp.take_along_axis(scores, expert, axis=1)))
    return _queued(rule, scores, expert, weight, mask, affinity)


def sigmoid_order(preference: Float[Array, "T E"], bias: Float[Array, " E"]) -> Float[Array, "T E"]:
    """Returns sigmoid(preference) + bias, to choose by; without any bias, saturated sigmoids keep the order of their
    preferences.
    """
    gate = jax.nn.sigmoid(preference)
    told_apart = ((gate > 0) & (gate < 1)) | bias.any()
    return jnp.where(told_apart, gate + bias[None], preference)  # of a 1 it is above all other gates, of a 0 below


#: Rounds of Sinkhorn's normalisation; rows come last, so a token's plan sums to 1.
SINKHORN_ROUNDS = 8


def sinkhorn(rule: Rule, scores, preference, bias, mask) -> Routing:
    """Returns the k largest entries of each token's row in the balanced transport plan of the scores (Clark et al.
    2022).

    The plan exp(score + u_t + v_e) gives every expert T/E tokens; it only chooses. Weights are those of `top_k`. The
    bias has no part: v_e would take it out.
    """
    plan = jax.lax.stop_gradient(preference)
    padding = jnp.where(mask, 0.0, -jnp.inf)[:, None]
    share = jnp.log(jnp.maximum(mask.sum(), 1) / scores.shape[1])

    def balance(_, plan):
        columns = jax.nn.logsumexp(plan + padding, axis=0, keepdims=True)
        plan += share - jnp.where(jnp.isfinite(columns), columns, 0.0)  # no column has mass when all is padding
        return plan - jax.nn.logsumexp(plan, axis=1, keepdims=True)

    plan = jax.lax.fori_loop(0, SINKHORN_ROUNDS, balance, plan)
    return top_k(rule, scores, plan, jnp.zeros_like(bias), mask)


def expert_choice(rule: Rule, scores, preference, bias, mask) -> Routing:
    """Gives each expert the C tokens that prefer it most, weighted by their probability (Zhou et al. 2022).

    Affinity is the softmax over experts of a token's preference; C = `capacity`, with factor k = 1 by default. A token
    may have several experts, or none. The bias has no part: the load is balanced by construction.
    """
    del bias
    size = capacity(rule, *scores.shape)
    affinity = jnp.where(mask[:, None], jax.nn.softmax(preference), -1.0)
    token = highest(affinity.T, size)
    return _taken(scores, token, jnp.take_along_axis(jax.nn.softmax(scores).T, token, axis=1), mask)


def patch_choice(rule: Rule, scores, preference, bias, mask) -> Routing:
    """Gives each expert the l = `rule.patches` tokens of a sample that it prefers most (Chowdhury et al. 2023, Section
    3).

    Expert choice whose group is the sample, with two differences: an expert compares patches by their scores as they
    are, not by what the softmax over experts leaves of them, and gates are shares of patches. `rule.patch_weights`: one
    (1 each; their separate training), even (1 / l each: what `chosen` is for equal scores), chosen (softmax over the l
    chosen patches; joint training), all (softmax over all patches of the sample, of which the l largest are kept; the
    released wide ResNets). The bias has no part.
    """
    del bias
    padding = jnp.finfo(scores.dtype).min  # below any score, and no weight; -inf would make a group of nothing else NaN
    token = highest(jnp.where(mask[:, None], preference, padding).T, capacity(rule, *scores.shape))
    by_expert = jnp.where(mask[:, None], scores, padding).T
    weight = jnp.take_along_axis(jax.nn.softmax(by_expert) if rule.patch_weights == "all" else by_expert, token, axis=1)
    if rule.patch_weights == "chosen":
        weight = jax.nn.softmax(weight)
    if rule.patch_weights in CONSTANT_GATES:
        weight = jnp.full_like(weight, 1.0 if rule.patch_weights == "one" else 1 / weight.shape[1])
    return _taken(scores, token, weight, mask)


def gate_rows(rule: Rule, scores: Float[Array, "T E"], positions: int) -> Float[Array, "N M"]:
    """Returns scores in rows whose softmax is a gate each: a token's over experts; within samples, an expert's over
    patches.
    """
    if not SELECTIONS[rule.name].within_samples:
        return scores
    return scores.reshape(-1, positions, scores.shape[1]).swapaxes(1, 2).reshape(-1, positions)


def _taken(scores, token: Int[Array, "E C"], weight: Float[Array, "E C"], mask) -> Routing:
    """Returns the assignments of one group whose experts took these tokens, the most preferred first."""
    expert, rank = jnp.indices(token.shape)
    parts = (token, expert, weight, mask[token], rank)
    token, expert, weight, kept, rank = (part.reshape(-1) for part in parts)
    return Routing(scores, token, expert, weight, kept, rank)


def _mean_experts(rule: Rule, tokens: int, experts: int) -> float:
    """Returns the mean number of experts of a token when each expert takes as many tokens as its queue holds."""
    size = rule.group_size or tokens
    return experts * capacity(rule, size, experts) / size


#: Gates that no score changes: they have no gradient, and no sharpness.
CONSTANT_GATES = ("one", "even")

#: What an expert takes of a sample.
PATCHES = {
    "patches": Setting(1, "l: patches of a sample that each expert takes, those with its highest scores", at_least(1)),
    "patch_weights": Setting(
        "chosen",
        "weights of the patches that an expert takes: 1 (one), 1 / l (even), softmax over the chosen ones, or over"
        " all patches of the sample",
        one_of((*CONSTANT_GATES, "chosen", "all")),
    ),
}


def _check_patches(config: ConfigDict) -> None:
    """Refuses a router that would be frozen by accident, or made sharp where its scores only choose."""
    rule, router = config.selection, config.router
    if (
        SELECTIONS[rule.name].within_samples
        and rule.patch_weights in CONSTANT_GATES
        and not (router.frozen or rule.no_gradient or config.phases)
    ):
        refuse(
            "selection.patch_weights",
            rule.patch_weights,
            "gives the router no gradient; set router.frozen=true (if it is meant: selection.no_gradient=true)",
        )
    if "initial_entropy" in router and router.initial_entropy > 0 and rule.patch_weights in CONSTANT_GATES:
        refuse(
            "router.initial_entropy",
            router.initial_entropy,
            f"selection.patch_weights={rule.patch_weights!r} is as sharp for any scores; set it to 0",
        )


#: name -> selection.
SELECTIONS: dict[str, Selection] = {
    "soft": Selection(soft, sparse=False, experts_per_token=lambda rule, tokens, experts: float(experts)),
    "top_k": Selection(top_k, biased=True, reads=("k", "renormalise", *QUEUES)),
    "raw": Selection(raw, biased=True, reads=("k", *QUEUES)),
    "sigmoid": Selection(sigmoid, biased=True, reads=("k", "renormalise", *QUEUES)),
    "sinkhorn": Selection(sinkhorn, sees_others=True, reads=("k", "renormalise", *QUEUES)),
    "expert_choice": Selection(
        expert_choice, sees_others=True, bounded=True, experts_per_token=_mean_experts, reads=("k", *QUEUES[:-1])
    ),
    "patch_choice": Selection(
        patch_choice,
        sees_others=True,
        bounded=True,
        within_samples=True,
        places=lambda rule: rule.patches,
        experts_per_token=_mean_experts,
        settings=PATCHES,
        check=_check_patches,
    ),
}


def mean_rule(rule: Rule, steps: int) -> Rule:
    """Returns the rule of an average step among so many."""
    return SELECTIONS[rule.name].mean_rule(rule, steps)


def work(rule: Rule, tokens: int, experts: int) -> Any:
    """Returns the cost of a training token, forward and backward: the FLOPs of a selection in units of one expert that
    learns.
    """
    chosen = SELECTIONS[rule.name]
    return (chosen.work or chosen.experts_per_token)(rule, tokens, experts)


def combine_weights(routing: Routing | SoftRouting) -> Float[Array, "T E"]:
    """Returns the weight of every expert in every token's output; 0 where the expert was not chosen or the assignment
    dropped.
    """
    if isinstance(routing, SoftRouting):
        return routing.weight
    weight = jnp.where(routing.kept, routing.weight, 0.0)
    return jnp.zeros_like(routing.scores).at[routing.token, routing.expert].add(weight)


def _queued(
    rule: Rule, scores, expert: Int[Array, "T k"], weight: Float[Array, "T k"], mask, affinity: Float[Array, "T k"]
) -> Routing:
    """Returns the assignments of one group, with their ranks in the queues of the experts.

    First choices of all tokens come before second ones (GShard); within a choice tokens come by position, or by the
    highest `affinity` to their experts (`priority` score: batch-prioritised routing, Riquelme et al. 2021), which is
    that before weights are made to sum to 1. With `priority` causal all choices of a token come before the next
    token's: in a decoder, any other queue tells a token of later ones.
    """
    tokens, experts = scores.shape
    queue = jnp.where(mask[:, None], expert, experts)  # padding behind everybody
    if rule.priority == "causal":
        rank = ranks(queue.reshape(-1), experts).reshape(tokens, rule.k)
    else:
        order = jnp.argsort(-affinity.max(1), stable=True) if rule.priority == "score" else jnp.arange(tokens)
        rank = ranks(queue[order].T.reshape(-1), experts).reshape(rule.k, tokens)
        rank = jnp.zeros_like(rank).at[:, order].set(rank).T
    size = capacity(rule, tokens, experts)
    # Places for all: who comes when need not be computed, unless a dispatch asks for the rank.
    kept = jnp.broadcast_to(mask[:, None], rank.shape) & (size >= tokens or rank < size)
    token = jnp.repeat(jnp.arange(tokens), rule.k)
    expert, weight, kept, rank = (part.reshape(-1) for part in (expert, weight, kept, rank))
    return Routing(scores, token, expert, weight, kept, rank)
