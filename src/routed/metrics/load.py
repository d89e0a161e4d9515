"""What a router does, measured: pure functions of probabilities, choices and clusters. Entropies are in nats.

Definitions follow the notes of each function; the three entropies split H(E) exactly (see `entropies`).
"""

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
    """Share of the assignments chosen for each expert, before drops; sums to 1. Choices below 0 are none."""
    chosen = choices.reshape(-1)
    total = jnp.zeros(num_experts).at[jnp.where(chosen < 0, num_experts, chosen)].add(1.0, mode="drop")
    return total / jnp.maximum((chosen >= 0).sum(), 1)


def asked(routing: Routing) -> Bool[Array, " A"] | None:
    """Which assignments of a list with all experts of every token were chosen; None: any other list holds chosen ones only.

    ReLU gates list what they do not choose too, with weight 0 and not kept: how many a token chooses is no shape.
    """
    return routing.kept | (routing.weight != 0) if len(routing.token) == routing.scores.size else None


def load_of(
    routing: Routing | SoftRouting, mask: Bool[Array, " T"] | None = None, groups: int = 1
) -> Float[Array, "groups E"]:
    """Share of the assignments chosen for each expert, before drops and without padding; of soft routing the mean weight.

    A row for each of `groups` contiguous groups of tokens. Counted by comparison, which stays on the device of its tokens;
    a scatter would gather all assignments.
    """
    experts = routing.scores.shape[1]
    if isinstance(routing, SoftRouting):
        total = routing.weight.reshape(groups, -1, experts).sum(1)
    else:
        chosen = jax.nn.one_hot(routing.expert, experts)
        if (counted := asked(routing)) is not None:
            chosen *= counted[:, None]
        if mask is not None:
            chosen *= mask[routing.token][:, None]
        total = chosen.reshape(groups, -1, experts).sum(1)
    return total / jnp.maximum(total.sum(1), 1e-9)[:, None]


def dropped(routing: Routing | SoftRouting, mask: Bool[Array, " T"] | None = None) -> Scalar:
    """Share of the assignments that found no place; padding counts nowhere, and soft routing drops nothing."""
    if isinstance(routing, SoftRouting):
        return jnp.float32(0)
    real = jnp.ones(len(routing.scores), bool) if mask is None else mask
    real = real[routing.token]
    if (counted := asked(routing)) is not None:
        real &= counted
    return (real & ~routing.kept).sum() / jnp.maximum(real.sum(), 1)


def rebalanced(bias: Float[Array, " E"], load: Float[Array, " E"], rate: float) -> Float[Array, " E"]:
    """The balancing bias after one step: up by `rate` for experts below a fair load, down above it (Wang et al. 2024)."""
    missing = 1 / len(load) - load
    return bias + rate * jnp.sign(jnp.where(jnp.abs(missing) < 1e-6, 0.0, missing))  # rounding is no direction


def load_summary(load: Float[Array, " E"], tokens: int | Int[Array, ""]) -> dict[str, Scalar]:
    """load_max = E max load (1 when balanced, E when collapsed); dead = share of experts below 1 % of a fair load.

    `dead` is NaN with fewer than 100 tokens per expert, where an empty expert proves nothing.
    """
    experts = len(load)
    dead = jnp.where(tokens >= DEAD_TOKENS * experts, (load < DEAD_SHARE / experts).mean(), jnp.nan)
    return {"load_max": experts * load.max(), "dead": dead}
