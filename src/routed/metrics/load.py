"""The load of experts: shares of assignments, dropped assignments, and the balancing bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Scalar

from routed.contracts import Routing, SoftRouting

#: A dead expert gets less than this share of its fair load.
DEAD_SHARE = 0.01

#: `dead` is undefined (NaN) with fewer tokens per expert.
DEAD_TOKENS = 100


def load(choices: Int[Array, "T k"], num_experts: int) -> Float[Array, " E"]:
    """Returns the share of the assignments of each expert, before drops; sums to 1. Choices below 0 do not count."""
    chosen = choices.reshape(-1)
    total = jnp.zeros(num_experts).at[jnp.where(chosen < 0, num_experts, chosen)].add(1.0, mode="drop")
    return total / jnp.maximum((chosen >= 0).sum(), 1)


def load_of(
    routing: Routing | SoftRouting, mask: Bool[Array, " T"] | None = None, groups: int = 1
) -> Float[Array, "groups E"]:
    """Returns the share of the assignments of each expert, before drops and padding; of soft routing the mean weight.

    One row for each of `groups` contiguous groups of tokens. Counted by comparison, which stays on the device of its
    tokens; a scatter would gather all assignments.
    """
    experts = routing.scores.shape[1]
    if isinstance(routing, SoftRouting):
        total = routing.weight.reshape(groups, -1, experts).sum(1)
    else:
        chosen = jax.nn.one_hot(routing.expert, experts)
        if routing.chosen is not None:
            chosen *= routing.chosen[:, None]
        if mask is not None:
            chosen *= mask[routing.token][:, None]
        total = chosen.reshape(groups, -1, experts).sum(1)
    return total / jnp.maximum(total.sum(1), 1e-9)[:, None]


def dropped(routing: Routing | SoftRouting, mask: Bool[Array, " T"] | None = None) -> Scalar:
    """Returns the share of the assignments that were dropped, without padding; soft routing drops nothing."""
    if isinstance(routing, SoftRouting):
        return jnp.float32(0)
    real = jnp.ones(len(routing.scores), bool) if mask is None else mask
    real = real[routing.token]
    if routing.chosen is not None:
        real &= routing.chosen
    return (real & ~routing.kept).sum() / jnp.maximum(real.sum(), 1)


def rebalanced(bias: Float[Array, " E"], load: Float[Array, " E"], rate: float | Scalar) -> Float[Array, " E"]:
    """Returns the balancing bias after one step: `rate` up below a fair load, down above (Wang et al. 2024)."""
    missing = 1 / len(load) - load
    return bias + rate * jnp.sign(jnp.where(jnp.abs(missing) < 1e-6, 0.0, missing))  # rounding is no direction


def load_summary(load: Float[Array, " E"], tokens: int | Int[Array, ""]) -> dict[str, Scalar]:
    """Returns load_max = E max load (1 when balanced, E when collapsed), and dead, the share of dead experts.

    A dead expert has less than 1 % of a fair load; NaN with fewer than 100 tokens per expert, where an empty expert
    proves nothing.
    """
    experts = len(load)
    dead = jnp.where(tokens >= DEAD_TOKENS * experts, (load < DEAD_SHARE / experts).mean(), jnp.nan)
    return {"load_max": experts * load.max(), "dead": dead}
