"""Online k-means as a router: centres without a gradient, which follow the tokens that are nearest to them."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed.contracts import UserError
from routed.routers.clusters import closeness
from routed.routers.product import DISTANCE, TEMPERATURE, unit

#: A centre of fewer tokens than this, counted with decay, takes the place of a token.
DEAD = 1e-2


class OnlineKMeansRouter(nn.Module):
    """Scores closeness to centres: c.x - |c|^2 / 2, or cosines over a temperature (`measure` direction).

    Each call in which the collection `centres` is mutable (training) scores by the centres as they were, then moves
    them: a centre is the mean of its tokens so far, the counts and sums of earlier steps times `decay` (1: all tokens
    count alike). A centre without tokens, so in the first step each of them, first takes the place of a token; these
    are spaced equally over the batch. Centres are [E, F], counts [E].
    """

    num_experts: int
    decay: float = 0.99
    measure: str = DISTANCE

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], **context) -> Float[Array, "T E"]:
        x, count = x.reshape(len(x), -1).astype(jnp.float32), self.num_experts
        x = x if self.measure == DISTANCE else unit(x, axis=1)
        draw = lambda: jax.random.normal(self.make_rng("params"), (count, x.shape[1]))  # noqa: E731
        centres = self.variable("centres", "centres", draw)
        counts = self.variable("centres", "counts", jnp.zeros, count)
        scores = self._scores(centres.value, x)
        if self.is_mutable_collection("centres") and not self.is_initializing():
            tokens = jax.lax.stop_gradient(x)
            spaced = tokens[jnp.arange(count) * len(x) // count]
            start = jnp.where(counts.value[:, None] < DEAD, spaced, centres.value)
            nearest = jax.nn.one_hot(self._scores(start, tokens).argmax(1), count)
            before = self.decay * jnp.where(counts.value < DEAD, 0.0, counts.value)
            counts.value = before + nearest.sum(0)
            moved = (before[:, None] * start + nearest.T @ tokens) / jnp.maximum(counts.value, 1e-9)[:, None]
            centres.value = jnp.where(counts.value[:, None] > 0, moved, start)
        return scores

    def _scores(self, centres: Float[Array, "E F"], x: Float[Array, "T F"]) -> Float[Array, "T E"]:
        if self.measure == DISTANCE:
            return closeness(centres, x)
        return x @ unit(centres, axis=1).T / TEMPERATURE


class SelfRouter(nn.Module):
    """Scores that are the first E numbers of the token: the layers below learn to route (Self-Routing, 2604.00421)."""

    num_experts: int

    def __call__(self, x: Float[Array, "T D"], **context) -> Float[Array, "T E"]:
        if x.shape[-1] < self.num_experts:
            raise UserError(
                f"config key router.name='self': a token has {x.shape[-1]} numbers, of which experts.count="
                f"{self.num_experts} are the scores; widen transformer.dim"
            )
        return x[:, : self.num_experts].astype(jnp.float32)
