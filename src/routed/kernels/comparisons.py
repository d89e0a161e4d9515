"""Reads and sums of few numbers on TPUs by comparing indices: XLA:TPU computes those of a gather in loops of their own.

Twin: `jnp.take_along_axis`, and `at[].add`.
Measured: XLA's estimate for a v5e counts 1,825 cycles for a loop however small. A step of the headline's `learned_top1`
(64 experts, 32 tokens, top-1): 161.8 k cycles with gathered weights, 93.3 with all experts on all tokens, 70.1 with
indices compared too (`--dry_run --topology=v5e:2x4`); never run on a TPU.
Delete when: XLA:TPU computes the indices of a gather in the loop that reads.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed.system.platform import platform

#: Rows of a matrix unit of a TPU: an expert on no more tokens costs what reading its weights costs.
FEW = 128


def is_few(tokens: int) -> bool:
    """True on a TPU, for so few tokens."""
    return platform() == "tpu" and tokens <= FEW


def along(values: Float[Array, "T E"], index: Int[Array, "T k"]) -> Float[Array, "T k"]:
    """Returns values[t, index[t]]."""
    if not is_few(len(values)):
        return jnp.take_along_axis(values, index, axis=1)
    chosen = index[:, :, None] == jnp.arange(values.shape[1])[None, None]
    return jnp.where(chosen, values[:, None], 0.0).sum(2)


def table(
    weight: Float[Array, " A"], token: Int[Array, " A"], expert: Int[Array, " A"], like: Float[Array, "T E"]
) -> Float[Array, "T E"]:
    """Returns the sum of the weights of each token and expert, of the shape and type of `like`."""
    if not is_few(len(like)):
        return jnp.zeros_like(like).at[token, expert].add(weight)
    of_token = (token[:, None] == jnp.arange(like.shape[0])[None]).astype(like.dtype)
    of_expert = jnp.where(expert[:, None] == jnp.arange(like.shape[1])[None], weight[:, None], 0.0).astype(like.dtype)
    return jnp.matmul(of_token.T, of_expert, precision="highest")
