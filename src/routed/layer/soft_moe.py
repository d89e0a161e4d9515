"""Soft MoE: every expert processes a few slots, each a weighted mean of all tokens (Puigcerver et al. 2024)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from routed.layer.moe import over_experts
from routed.routers.product import columns, unit


class SoftMoE(nn.Module):
    """A dense layer of its own: nothing is chosen or dropped, so there is no Routing.

    With scores s = cos(x, phi) scale [T, E S]: slots = softmax over tokens of s, transposed, times x; y = softmax over slots of s
    times the experts' outputs. Both softmaxes run within a group of `group_size` tokens (a sequence; 0: all tokens).
    """

    expert: nn.Module
    num_experts: int
    slots: int  # for each expert and group
    group_size: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, "T D"], *, mask: Bool[Array, " T"] | None = None
    ) -> tuple[Float[Array, "T O"], Float[Array, "T S"]]:
        """Outputs, and the weights [T, E S] with which a token reads the slots."""
        expert = self.expert.clone(parent=None)

        def initialise(key):
            one = lambda i: expert.init(jax.random.fold_in(key, i), x[:1])["params"]  # noqa: E731
            return over_experts(jax.vmap(one)(jnp.arange(self.num_experts)))

        params = self.param("experts", initialise)
        phi = self.param("router", columns, x.shape[1], self.num_experts * self.slots)
        scale = self.param("scale", nn.initializers.ones, ())
        scores = unit(x.astype(jnp.float32), axis=1) @ (scale * unit(phi, axis=0))
        size = self.group_size or len(x)
        real = jnp.ones(len(x), bool) if mask is None else mask
        grouped = [a.reshape(-1, size, *a.shape[1:]) for a in (x, scores, real)]

        def group(x, scores, real):
            dispatch = jax.nn.softmax(jnp.where(real[:, None], scores, -jnp.inf), axis=0)
            combine = jnp.where(real[:, None], jax.nn.softmax(scores, axis=1), 0.0)
            slots = jnp.where(real.any(), dispatch, 0.0).T.astype(x.dtype) @ x
            outputs = jax.vmap(lambda p, s: expert.apply({"params": p}, s))(
                params, slots.reshape(self.num_experts, self.slots, -1)
            )
            return combine.astype(x.dtype) @ outputs.reshape(self.num_experts * self.slots, -1), combine

        y, combine = jax.vmap(group)(*grouped)
        return y.reshape(len(x), -1), combine.reshape(len(x), -1)
