"""Selections: pure functions from scores to which experts a token uses, and with which weights.

`select` applies one to every group of tokens. Everything is float32, and ties go to the lower index.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from routed.contracts import Routing, SoftRouting, UserError
from routed.contracts.ties import highest
from routed.kernels.argmax import argmax
from routed.kernels.comparisons import along
from routed.kernels.ranks import ranks
from routed.layer.rule import QUEUES, Selection, SelectionRule


def select(
    rule: SelectionRule,
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
      UserError: the groups do not divide the tokens; a user's selection returns other scores.
    """
    tokens, experts = scores.shape
    size = rule.group_size or tokens
    if tokens % size:
        raise UserError(f"group_size={size} does not divide {tokens} tokens")
    scores = scores.astype(jnp.float32)
    preference = scores if preference is None else preference.astype(jnp.float32)
    bias = jnp.zeros(experts) if bias is None else bias
    mask = jnp.ones(tokens, bool) if mask is None else mask
    if size == tokens:  # not as a batch of one group: XLA fuses the softmax of two axes, not of three (BUILD_NOTES.md)
        return _checked(rule, scores, SELECTIONS[rule.name].route(rule, scores, preference, bias, mask))
    grouped = [a.reshape(tokens // size, size, *a.shape[1:]) for a in (scores, preference, mask)]
    routing: Any = jax.vmap(lambda s, p, m: SELECTIONS[rule.name].route(rule, s, p, bias, m))(*grouped)
    if isinstance(routing, Routing):
        first = jnp.arange(tokens // size)[:, None] * size
        routing = routing._replace(token=routing.token + first)
    return _checked(rule, scores, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), routing))


def _checked(rule: SelectionRule, scores: Array, routing: Any) -> Any:
    if routing.scores.shape != scores.shape:
        raise UserError(f"selection {rule.name!r} returns scores of another shape; it must be {[*scores.shape]}")
    return routing


def capacity(rule: SelectionRule, tokens: int, experts: int) -> int:
    """Returns the places of an expert's queue in a group of `tokens`; capacity factor 0 drops nothing.

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


def in_samples(rule: SelectionRule, positions: int) -> SelectionRule:
    """Returns the rule for samples of so many tokens, which are the groups of a selection `within_samples`."""
    return rule._replace(group_size=positions) if SELECTIONS[rule.name].within_samples else rule


def group_of(size: int, tokens: int) -> int:
    """Returns the largest group of at most `size` tokens that divides `tokens`; 0: all of them are one group."""
    return max(n for n in divisors(tokens) if n <= size) if size else tokens


def divisors(number: int) -> set[int]:
    """Returns all divisors of a positive number."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return {*low, *(number // n for n in low)}


def groupless(rule: SelectionRule) -> bool:
    """True if groups are neither set nor of consequence: a token has the same experts whatever the other tokens are."""
    chosen = SELECTIONS[rule.name]
    return chosen.sparse and not (chosen.sees_others or rule.capacity_factor or rule.group_size)


def soft(rule: SelectionRule, scores, preference, bias, mask) -> SoftRouting:
    """Returns all experts, weighted by the softmax of scores: sum_e p_e(x) f_e(x) (Dikkala et al. 2023, Section 2)."""
    return SoftRouting(scores=scores, weight=jnp.where(mask[:, None], jax.nn.softmax(scores), 0.0))


def top_k(rule: SelectionRule, scores, preference, bias, mask) -> Routing:
    """Returns the k most preferred experts of each token.

    Weights are probabilities of the softmax over all experts, or over the k chosen ones when `renormalise` (k = 1: the
    weight is exactly 1 and the router gets no gradient, which is Dikkala's rule of evaluation).
    """
    expert = chosen_of(preference + bias[None], rule.k)
    probability = along(jax.nn.softmax(scores), expert)
    weight = jax.nn.softmax(along(scores, expert)) if rule.renormalise else probability
    return queued(rule, scores, expert, weight, mask, probability)


def chosen_of(preference: Float[Array, "T E"], k: int) -> Int[Array, "T k"]:
    """Returns the k most preferred experts of each token, as `highest` does."""
    return argmax(preference)[:, None].astype(jnp.int32) if k == 1 else highest(preference, k)


def sigmoid(rule: SelectionRule, scores, preference, bias, mask) -> Routing:
    """Returns the k highest of sigmoid(score) + bias, weighted by sigmoid(score), or over its sum (DeepSeek-V3)."""
    expert = chosen_of(sigmoid_order(preference, bias), rule.k)
    affinity = jnp.take_along_axis(jax.nn.sigmoid(scores), expert, axis=1)
    weight = affinity
    if rule.renormalise:  # affinity over its sum, where the affinities of all chosen experts are 0 in float32 too
        weight = jax.nn.softmax(jax.nn.log_sigmoid(jnp.take_along_axis(scores, expert, axis=1)))
    return queued(rule, scores, expert, weight, mask, affinity)


def sigmoid_order(preference: Float[Array, "T E"], bias: Float[Array, " E"]) -> Float[Array, "T E"]:
    """Returns sigmoid(preference) + bias, to choose by; without bias, saturated ones keep the order of preferences."""
    gate = jax.nn.sigmoid(preference)
    told_apart = ((gate > 0) & (gate < 1)) | bias.any()
    return jnp.where(told_apart, gate + bias[None], preference)  # of a 1 it is above all other gates, of a 0 below


#: Rounds of Sinkhorn's normalisation; rows come last, so a token's plan sums to 1.
SINKHORN_ROUNDS = 8


def sinkhorn(rule: SelectionRule, scores, preference, bias, mask) -> Routing:
    """Returns the k largest entries of a token's row in the scores' balanced transport plan (Clark et al. 2022).

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


def expert_choice(rule: SelectionRule, scores, preference, bias, mask) -> Routing:
    """Gives each expert the C tokens that prefer it most, weighted by their probability (Zhou et al. 2022).

    Affinity is the softmax over experts of a token's preference; C = `capacity`, with factor k = 1 by default. A token
    may have several experts, or none. The bias has no part: the load is balanced by construction.
    """
    size = capacity(rule, *scores.shape)
    affinity = jnp.where(mask[:, None], jax.nn.softmax(preference), -1.0)
    token = highest(affinity.T, size)
    return taken(scores, token, jnp.take_along_axis(jax.nn.softmax(scores).T, token, axis=1), mask)


def gate_rows(rule: SelectionRule, scores: Float[Array, "T E"], positions: int) -> Float[Array, "N M"]:
    """Returns scores in rows whose softmax is a gate: a token's over experts, or an expert's over its patches."""
    if not SELECTIONS[rule.name].within_samples:
        return scores
    return scores.reshape(-1, positions, scores.shape[1]).swapaxes(1, 2).reshape(-1, positions)


def taken(scores, token: Int[Array, "E C"], weight: Float[Array, "E C"], mask) -> Routing:
    """Returns the assignments of one group whose experts took these tokens, the most preferred first."""
    expert, rank = jnp.indices(token.shape)
    parts = (token, expert, weight, mask[token], rank)
    token, expert, weight, kept, rank = (part.reshape(-1) for part in parts)
    return Routing(scores, token, expert, weight, kept, rank)


def mean_experts(rule: SelectionRule, tokens: int, experts: int) -> float:
    """Returns the mean number of experts of a token when each expert takes as many tokens as its queue holds."""
    size = rule.group_size or tokens
    return experts * capacity(rule, size, experts) / size


#: name -> selection.
SELECTIONS: dict[str, Selection] = {
    "soft": Selection(soft, sparse=False, experts_per_token=lambda rule, tokens, experts: float(experts)),
    "top_k": Selection(top_k, biased=True, reads=("k", "renormalise", *QUEUES)),
    "sigmoid": Selection(sigmoid, biased=True, reads=("k", "renormalise", *QUEUES)),
    "sinkhorn": Selection(sinkhorn, sees_others=True, reads=("k", "renormalise", *QUEUES)),
    "expert_choice": Selection(
        expert_choice, sees_others=True, bounded=True, experts_per_token=mean_experts, reads=("k", *QUEUES[:-1])
    ),
}


def mean_rule(rule: SelectionRule, steps: int) -> SelectionRule:
    """Returns the rule of an average step among so many."""
    return SELECTIONS[rule.name].mean_rule(rule, steps)


def work(rule: SelectionRule, tokens: int, experts: int) -> Any:
    """Returns the cost of a training token, forward and backward, in FLOPs of one expert that learns."""
    chosen = SELECTIONS[rule.name]
    return (chosen.work or chosen.experts_per_token)(rule, tokens, experts)


def queued(
    rule: SelectionRule,
    scores,
    expert: Int[Array, "T k"],
    weight: Float[Array, "T k"],
    mask,
    affinity: Float[Array, "T k"],
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
