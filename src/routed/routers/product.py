"""Routers with weights: scores of some features of a token, with one column of `kernel` per expert.

Routers differ in their features (none, hidden layers, windows summed by a convolution, a convolutional net) and in
whether they score by product or by cosine. Scores are float32 whatever the type of the input. Columns are drawn with
keys folded from the expert, so that a router over 8 experts is a prefix of the one over 16.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from routed.contracts import UserError
from routed.kernels.matmul import matmul
from routed.routers.clusters import closeness

#: What a score may be (`router.score`).
PRODUCT, DISTANCE, DIRECTION = MEASURES = ("product", "distance", "direction")

#: Temperature of a fresh cosine router (Chi et al. 2022).
TEMPERATURE = 0.07
#: A centre of fewer tokens than this, counted with decay, takes the place of a token.
DEAD = 1e-2


class ProductRouter(nn.Module):
    """Scores f(x) W without bias (Dikkala et al. 2023, Section 2) or with one (Theorem 3); or closeness to places.

    `kernel` is [F, E], lecun-normal; `bias` is [E] and starts at 0. With the `measure` distance a column w of `kernel`
    is a place and its score f.w - |w|^2 / 2, whose softmax is that of minus half the squared distances; with direction
    its score is f.w / |w|.
    """

    num_experts: int
    features: nn.Module
    biased: bool = False
    measure: str = PRODUCT

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], **context) -> Float[Array, "T E"]:
        features = self.features(x.astype(jnp.float32))
        kernel = self.param("kernel", columns, features.shape[-1], self.num_experts)
        if self.measure == DISTANCE:
            scores = closeness(kernel.T, features)
        else:
            scores = matmul(features, unit(kernel, axis=0) if self.measure == DIRECTION else kernel)
        if self.biased:
            scores += self.param("bias", nn.initializers.zeros, (self.num_experts,))[None]
        return scores


class CosineRouter(nn.Module):
    """Cosines of f(x) with the experts' embeddings, over a learnable temperature (XMoE, Chi et al. 2022).

    f is a down-projection without bias there. Neither the norm of a token nor that of a column of `kernel` matters.
    """

    num_experts: int
    features: nn.Module

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], **context) -> Float[Array, "T E"]:
        features = self.features(x.astype(jnp.float32))
        kernel = self.param("kernel", columns, features.shape[-1], self.num_experts)
        log_scale = self.param("log_scale", nn.initializers.constant(-math.log(TEMPERATURE)), ())
        return jnp.exp(log_scale) * (unit(features, axis=1) @ unit(kernel, axis=0))


def columns(key: PRNGKeyArray, dim: int, experts: int) -> Float[Array, "F E"]:
    """Draws one lecun-normal column for each expert: N(0, 1/F)."""

    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(experts))
    return jax.vmap(lambda key: jax.random.normal(key, (dim,)) / jnp.sqrt(dim), out_axes=1)(keys)


def unit(a: Float[Array, "N M"], axis: int) -> Float[Array, "N M"]:
    """Returns `a` with vectors of length 1 along `axis`; zero vectors stay zero, with a finite gradient."""
    return a * jax.lax.rsqrt(jnp.maximum((a**2).sum(axis, keepdims=True), 1e-12))


class HyperRouter(nn.Module):
    """Scores x W + b whose W and b a frozen network makes of an embedding that learns (Do et al. 2023).

    One hidden layer of `hidden` ReLU units, uniform in +-1 / sqrt(inputs) as in the released code. The network is no
    parameter but the collection `hypernetwork`: nothing ever trains it. The embedding, N(0, 1), is as wide as a token.
    """

    num_experts: int
    hidden: int

    @nn.compact
    def __call__(self, x: Float[Array, "T D"], **context) -> Float[Array, "T E"]:
        del context
        dim = x.shape[-1]
        draw = lambda inputs, outputs: lambda: _uniform(self.make_rng("params"), inputs, outputs)  # noqa: E731
        first = self.variable("hypernetwork", "first", draw(dim, self.hidden)).value
        last = self.variable("hypernetwork", "last", draw(self.hidden, self.num_experts * (dim + 1))).value
        embedding = self.param("embedding", nn.initializers.normal(1.0), (dim,))
        weights = jax.nn.relu(embedding @ first["kernel"] + first["bias"]) @ last["kernel"] + last["bias"]
        weights = weights.reshape(self.num_experts, dim + 1)
        return matmul(x.astype(jnp.float32), weights[:, :-1].T) + weights[None, :, -1]


def _uniform(key: PRNGKeyArray, inputs: int, outputs: int) -> dict[str, Array]:
    kernel, bias = jax.random.split(key)
    draw = lambda key, shape: jax.random.uniform(key, shape, minval=-1, maxval=1) / inputs**0.5  # noqa: E731
    return {"kernel": draw(kernel, (inputs, outputs)), "bias": draw(bias, (outputs,))}


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
                f"the router 'self' scores {self.num_experts} experts by as many numbers of a token, which has"
                f" {x.shape[-1]}: widen the token (transformer.dim), or have fewer experts"
            )
        return x[:, : self.num_experts].astype(jnp.float32)
