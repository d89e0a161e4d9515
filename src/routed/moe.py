"""The Mixture-of-Experts layer: router, selection, dispatch and experts joined in one Flax module."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.words import Routing, SoftRouting


class MoE(nn.Module):
    """y = sum_e w_e(x) f_e(x); returns y and the routing that produced it.

    Parameters are `router` and `experts`; every leaf of `experts` has a leading expert axis, and expert e is initialised
    with a key folded from e, so 8 experts are a prefix of 16. Keyword context is passed on to the router.
    """

    router: nn.Module
    expert: nn.Module
    num_experts: int
    select: Callable[[Float[Array, "T E"]], Routing | SoftRouting]
    dispatch: Callable

    @nn.compact
    def __call__(self, x: Float[Array, "T D"], **context) -> tuple[Float[Array, "T O"], Routing | SoftRouting]:
        expert = self.expert.clone(parent=None)  # unbound: its parameters are stacked and held here

        def initialise(key):
            def one(index):
                return expert.init(jax.random.fold_in(key, index), x[:1])["params"]

            return jax.vmap(one)(jnp.arange(self.num_experts))

        experts = self.param("experts", initialise)
        routing = self.select(self.router(x, **context))
        return self.dispatch(lambda p, tokens: expert.apply({"params": p}, tokens), experts, x, routing), routing
