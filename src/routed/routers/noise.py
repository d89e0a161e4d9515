"""Noise of routing, drawn from the random stream `noise`; without the stream (evaluation) there is none."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

#: What may be added to the scores, or done to the router's input.
KINDS = ("none", "uniform", "gaussian", "learned", "jitter")


class Noise(nn.Module):
    """Noise on scores: uniform on [0, 1] (Chen et al. 2022) or N(0, 1), times `scale`; or N(0, softplus(x W)^2).

    The last, `learned`, is noisy top-k of Shazeer et al. (2017); W starts at zero. Jitter adds nothing here: see `jitter`.
    """

    kind: str
    scale: float
    num_experts: int

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T E"]:
        shape = (len(x), self.num_experts)
        spread = jnp.full(shape, self.scale)
        if self.kind == "learned":
            flat = x.reshape(len(x), -1).astype(jnp.float32)
            weight = self.param("kernel", nn.initializers.zeros, (flat.shape[-1], self.num_experts))
            spread = jax.nn.softplus(flat @ weight)
        if not self.has_rng("noise") or self.kind in ("none", "jitter"):
            return jnp.zeros(shape)
        draw = jax.random.uniform if self.kind == "uniform" else jax.random.normal
        return spread * draw(self.make_rng("noise"), shape)


def jitter(key, x: Float[Array, "T ..."], scale: float) -> Float[Array, "T ..."]:
    """x times uniform factors on [1 - scale, 1 + scale] (Fedus et al. 2022), for the router only."""
    return x * jax.random.uniform(key, x.shape, x.dtype, 1 - scale, 1 + scale)
