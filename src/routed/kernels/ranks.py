"""Ranks in queues: how many earlier entries name the same expert.

Twin: `plain_ranks`.
Measured: 16,384 entries on one core take .30 ms for 16 experts and .40 for 64 (blocks of 64: .51, .82); 4,096 entries
for 512 experts .27 (.89). The twin's array is [A, E], here the largest is [A / 32, E].
Delete when: a running count over a one-hot array is as fast, in as little memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

#: Entries that are compared with each other; blocks are joined by their counts.
BLOCK = 32


def ranks(expert: Int[Array, " A"], experts: int) -> Int[Array, " A"]:
    """Returns the number of earlier entries with the same expert; entries equal to `experts` count among themselves.

    Entries are compared within blocks, and a running count goes over blocks: no sort, no loop.
    """
    padding = -len(expert) % BLOCK
    blocks = jnp.pad(expert, (0, padding), constant_values=experts).reshape(-1, BLOCK)
    earlier = jnp.tril(jnp.ones((BLOCK, BLOCK), bool), -1)
    within = ((blocks[:, :, None] == blocks[:, None, :]) & earlier[None]).sum(2)
    counts = (blocks[:, :, None] == jnp.arange(experts + 1)[None, None]).sum(1)
    before = jnp.cumsum(counts, axis=0) - counts
    rank = within + jnp.take_along_axis(before, blocks, axis=1)
    return rank.reshape(-1)[: len(expert)]


def plain_ranks(expert: Int[Array, " A"], experts: int) -> Int[Array, " A"]:
    """Returns the same by a running count over all entries."""
    chosen = jax.nn.one_hot(expert, experts + 1, dtype=jnp.int32)
    return jnp.take_along_axis(jnp.cumsum(chosen, axis=0) - chosen, expert[:, None], axis=1)[:, 0]
