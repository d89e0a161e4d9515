"""The linear router, and what a comparison does to its initial weights."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar


class LinearRouter(nn.Module):
    """Scores x W, without bias (Dikkala et al. 2023, Section 2). `kernel` is [D, E]: a column per expert.

    Columns are drawn with keys folded from the expert, so that the router over 8 experts is a prefix of the one over 16.
    """

    num_experts: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"], **context) -> Float[Array, "T E"]:
        del context
        return x @ self.param("kernel", self._columns, x.shape[-1])

    def _columns(self, key, dim: int) -> Float[Array, "D E"]:
        def column(expert):
            return jax.random.normal(jax.random.fold_in(key, expert), (dim,)) / jnp.sqrt(dim)

        return jax.vmap(column, out_axes=1)(jnp.arange(self.num_experts))


def initialise(
    kernel: Float[Array, "D E"], examples: Float[Array, "E D"], x: Float[Array, "T D"], settings
) -> Float[Array, "D E"]:
    """The initial kernel that the settings ask for: scaled, made of training examples, or of a given sharpness.

    `router.entropy` > 0 scales the kernel so that the mean per-token entropy on `x` is that many nats.
    """
    kernel = jnp.where(settings["router.from_data"], examples.T, kernel * settings["router.init_scale"])
    target = settings["router.entropy"]
    # The negation keeps a NaN target (its source run diverged) NaN instead of silently unscaled.
    return jnp.where(~(target <= 0), kernel * temperature_for(x @ kernel, target), kernel)


def temperature_for(scores: Float[Array, "T E"], entropy: Scalar) -> Scalar:
    """The factor t for which the mean entropy of softmax(t scores) is `entropy` nats (bisection on log t).

    Entropy falls monotonically in t, from log E at t = 0. Targets out of reach return the end of [e^-12, e^12]; a NaN
    target returns NaN.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        probs = jax.nn.softmax(jnp.exp(middle) * scores)
        softer = -jax.scipy.special.xlogy(probs, probs).sum(-1).mean() > entropy
        return jnp.where(softer, middle, low), jnp.where(softer, high, middle)

    low, high = jax.lax.fori_loop(0, 40, halve, (jnp.float32(-12.0), jnp.float32(12.0)))
    return jnp.where(jnp.isnan(entropy), jnp.nan, jnp.exp((low + high) / 2))
