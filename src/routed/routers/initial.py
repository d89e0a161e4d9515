"""What a comparison does to a router's initial weights: scale them, fill them with examples, make them sharp."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from routed.routers.scored import Flat


def initialise(
    router: nn.Module, params: Any, examples: Float[Array, "E ..."], x: Float[Array, "T ..."], settings
) -> Any:
    """The initial parameters that the settings ask for; routers without a `kernel` [F, E] stay as they are.

    `router.from_data`: column e is the features of example e (Dikkala et al. 2023, Theorem 2). `router.init_scale` times
    the fresh columns otherwise; 0 makes all scores 0. `router.entropy` > 0 scales the scores so that the mean per-token
    entropy on `x` is that many nats.
    """
    if "kernel" not in params:
        return params
    features = getattr(router, "features", Flat()).clone(parent=None)
    informed: Any = features.apply({"params": params.get("features", {})}, examples.astype(jnp.float32))
    kernel = jnp.where(settings["router.from_data"], informed.T, params["kernel"] * settings["router.init_scale"])
    params = params | {"kernel": kernel}
    target = settings["router.entropy"]
    # The negation keeps a NaN target (its source run diverged) NaN instead of silently unscaled.
    scores: Any = router.apply({"params": params}, x)
    sharper = jnp.where(~(target <= 0), temperature_for(scores, target), 1.0)
    if "log_scale" in params:
        return params | {"log_scale": params["log_scale"] + jnp.log(sharper)}
    return params | {"kernel": kernel * sharper}


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
