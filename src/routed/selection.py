"""Selections: pure functions from scores to which experts a token uses, and with which weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.words import Routing, SoftRouting


def soft(scores: Float[Array, "T E"]) -> SoftRouting:
    """Every expert, weighted by the softmax of its score: f(x) = sum_e p_e(x) f_e(x) (Dikkala et al. 2023, Section 2)."""
    return SoftRouting(scores=scores, weight=jax.nn.softmax(scores))


def top_k(scores: Float[Array, "T E"], *, k: int, renormalise: bool) -> Routing:
    """The k highest scores of each token; ties go to the expert with the lower index.

    Weights are probabilities of the softmax over all experts, or over the k chosen ones when `renormalise` (k = 1: the
    weight is exactly 1 and the router gets no gradient, which is Dikkala's rule of evaluation).
    """
    chosen, expert = jax.lax.top_k(scores, k)
    full = jnp.take_along_axis(jax.nn.softmax(scores), expert, axis=-1)
    weight = jax.nn.softmax(chosen) if renormalise else full
    tokens = len(scores)
    return Routing(
        scores=scores,
        token=jnp.repeat(jnp.arange(tokens), k),
        expert=expert.reshape(-1),
        weight=weight.reshape(-1),
        kept=jnp.ones(tokens * k, bool),
    )


def combine_weights(routing: Routing | SoftRouting) -> Float[Array, "T E"]:
    """The weight of every expert in every token's output; 0 where it was not chosen or was dropped."""
    if isinstance(routing, SoftRouting):
        return routing.weight
    weight = jnp.where(routing.kept, routing.weight, 0.0)
    return jnp.zeros_like(routing.scores).at[routing.token, routing.expert].add(weight)


SELECTIONS = {
    "soft": lambda rule: soft,
    "top_k": lambda rule: lambda scores: top_k(scores, k=rule.k, renormalise=rule.renormalise),
}


def build(rule):
    """The selection that a config node (`selection` or `selection.eval`) describes."""
    return SELECTIONS[rule.name](rule)
