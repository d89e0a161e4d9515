"""The scores of a layer, for any router and any model, and the sharpness of a gate.

A change of all scores (a temperature that falls with the step, say) is made here: the context has the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from routed.contracts import UserError


def layer_scores(
    router: Callable[..., Array], x: Float[Array, "T ..."], context: dict[str, Any], sharpness: Any = None
) -> Float[Array, "T E"]:
    """Returns a layer's scores [T, E] without noise: the router's scores times the `sharpness`, if any.

    `router` is a bound module, or the `apply` of a module with its variables.
    """
    scores = router(x, **context)
    return scores if sharpness is None else scores * sharpness


def check_scores(scores: Any, tokens: Sequence[int], experts: int, router: str) -> None:
    """Refuses scores of `tokens` (a shape) that are no floats [tokens, experts]; `router` is its name for the error.

    Raises:
      UserError: says what the router returns, and what it must return.
    """
    shape, expected = getattr(scores, "shape", None), (tokens[0], experts)
    if shape == expected and jnp.issubdtype(scores.dtype, jnp.floating):
        return
    given = f"{scores.dtype}{list(shape)}" if shape is not None else type(scores).__name__
    raise UserError(
        f"{router}: of tokens {list(tokens)} the router with {experts} experts makes {given}; it must return scores"
        f" [tokens, experts], floats {list(expected)}"
    )


def sharpness_of(scores: Float[Array, "T E"], entropy: Scalar) -> Scalar:
    """Returns the factor on the scores by `router.initial_entropy`: 1 where that is 0, else as `sharpness_for`."""
    # The negation keeps a NaN target (its source run diverged) NaN instead of silently unscaled.
    return jnp.where(~(entropy <= 0), sharpness_for(scores, entropy), 1.0)


def sharpness_for(scores: Float[Array, "T E"], entropy: Scalar) -> Scalar:
    """Returns the factor t for which the mean entropy of softmax(t scores) is `entropy` nats (bisection on log t).

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
