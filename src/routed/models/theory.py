"""Models of the theory of Dikkala et al. (2023): k-means as a mixture of experts, and two opposite experts.

Each watches what its theorem says of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar
from ml_collections import ConfigDict

from routed.data import TASKS, two_gaussians
from routed.models.shallow import Model
from routed.words import Batch

#: Norm of a fresh router and of fresh experts in the theorem of two Gaussians, where it tends to 0.
SMALL = 1e-2
#: |w| at which the claims are tried. The margin of Claim 3, for w = alpha z, vanishes as alpha^2: below this float32 cannot see it.
ALPHAS = (0.3, 1.0, 3.0, 10.0, 30.0)
#: cos(w, z) at which Claims 1 and 2 are tried.
COSINES = (0.01, 0.1, 0.5, 0.9, 1.0)
#: Random distributions on which Lemma 2 is tried, and points that carry each.
DISTRIBUTIONS, ATOMS = 256, 8


def _kmeans(config: ConfigDict) -> Model:
    """f(x) = u_j, j the centre nearest to x: experts that are their own router (Section E); centres start at samples."""

    def init(key, batch):
        centres = jax.random.choice(key, batch.tokens, (config.experts.count,), replace=False)
        return {"router": {}, "experts": {"centres": centres}}, {}

    def apply(params, state, batch, rule, dispatch, key=None):
        del rule, dispatch, key
        centres = params["experts"]["centres"]
        return centres[nearest(centres, batch.tokens)], None, state

    def watch(params, world, test, key):
        """How far steps on the model's squared loss end from steps of k-means, over the largest coordinate of a centre."""
        del world, key
        centres = params["experts"]["centres"]

        def loss(centres):
            return (
                ((apply({"experts": {"centres": centres}}, {}, test, None, None)[0] - test.tokens) ** 2).sum(-1).mean()
            )

        gradient, count = jax.grad(loss)(centres), members(centres, test.tokens).sum(0)[:, None]
        own = len(test.tokens) / (2 * jnp.maximum(count, 1))
        return {
            "theory/gradient_step": _apart(centres - gradient, inertia_step(centres, test.tokens, 1.0)),
            "theory/lloyd_step": _apart(centres - own * gradient, lloyd_step(centres, test.tokens)),
        }

    return Model(init, apply, scores=None, watch=watch)


def nearest(centres: Float[Array, "E D"], x: Float[Array, "T D"]) -> Int[Array, " T"]:
    """The nearest centre of each sample."""
    return ((x[:, None] - centres[None]) ** 2).sum(-1).argmin(1)


def members(centres: Float[Array, "E D"], x: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """1 where a sample belongs to a centre."""
    return jax.nn.one_hot(nearest(centres, x), len(centres))


def inertia_step(centres: Float[Array, "E D"], x: Float[Array, "T D"], rate: float) -> Float[Array, "E D"]:
    """A descent step on the mean squared distance to the nearest centre: u_j - rate (2 / n) sum over its n_j samples of (u_j - x)."""
    own = members(centres, x)
    return centres - rate * 2 / len(x) * (own.sum(0)[:, None] * centres - own.T @ x)


def lloyd_step(centres: Float[Array, "E D"], x: Float[Array, "T D"]) -> Float[Array, "E D"]:
    """One iteration of k-means: each centre becomes the mean of its samples; one without samples stays."""
    own = members(centres, x)
    count = own.sum(0)[:, None]
    return jnp.where(count > 0, own.T @ x / jnp.maximum(count, 1), centres)


def _apart(a: Float[Array, "E D"], b: Float[Array, "E D"]) -> Scalar:
    return jnp.abs(a - b).max() / jnp.abs(b).max()


def _two_experts(config: ConfigDict) -> Model:
    """f(x) = p u + (1 - p)(-u) = q(x) u, q = 2 sigmoid(w^T x) - 1 = tanh(w^T x / 2): a router w over experts u and -u (Section F)."""
    data = config.data
    outputs = TASKS[data.name].outputs(data)

    def small(key, size):
        draw = jax.random.normal(key, (size,))
        return SMALL * draw / jnp.linalg.norm(draw)

    def init(key, batch):
        router, experts = jax.random.split(key)
        return {"router": {"w": small(router, batch.tokens.shape[1])}, "experts": {"u": small(experts, outputs)}}, {}

    def apply(params, state, batch, rule, dispatch, key=None):
        del rule, dispatch, key
        return jnp.tanh(batch.tokens @ params["router"]["w"] / 2)[:, None] * params["experts"]["u"][None], None, state

    def watch(params, world, test: Batch, key: PRNGKeyArray):
        """Where w and u stand, and the margins of the claims and the lemma of the proof: each is above 0 where it holds."""
        del test
        (z, v), w, u = world.fixed, params["router"]["w"], params["experts"]["u"]
        sign = jnp.where(w @ z < 0, -1.0, 1.0)  # the proof takes w^T z > 0
        along, norm = jnp.abs(w @ z), jnp.linalg.norm(w)
        across = jnp.linalg.norm(w - (w @ z) * z)
        noise, weights = (jnp.asarray(part, jnp.float32) for part in two_gaussians.plane(data))
        x1 = 1 + noise[:, 0]
        at = [(alpha * cos, alpha * (1 - cos**2) ** 0.5) for alpha in ALPHAS for cos in COSINES]
        along, across = (
            jnp.append(jnp.array(grid), own) for grid, own in zip(zip(*at, strict=True), (along, across), strict=True)
        )
        scores = along[:, None] * x1[None] + across[:, None] * noise[None, :, 1]
        first, second = (values.min() for values in jax.vmap(claims_1_and_2, (0, None))(scores, weights))
        return {
            "theory/cosine": jnp.abs(w @ z) / norm,
            "theory/norm": norm,
            "theory/target_error": jnp.linalg.norm(u - sign * v) / jnp.linalg.norm(v),
            "theory/claim1": first,
            "theory/claim2": second,
            "theory/claim3": jnp.stack([claim_3(alpha, x1, weights) for alpha in ALPHAS]).min(),
            **{f"theory/lemma2_{name}": value for name, value in lemma_2(key).items()},
        }

    return Model(init, apply, scores=None, watch=watch)


def margin(
    weights: Float[Array, " Q"], y: Float[Array, " Q"], rest: Float[Array, " Q"], f: Float[Array, " Q"]
) -> Scalar:
    """(E[y^2] E[f] - E[y] E[y f]) / (Var[y] E[f]) = 1 - E[y] Cov[y, f] / (Var[y] E[f]) over points with these weights.

    `rest` is 1 - y. Deviations from the mean are taken of whichever of the two is smaller, so that float32 keeps their digits.
    """
    mean, left = weights @ y, weights @ rest
    apart = jnp.where(mean < 0.5, y - mean, left - rest)
    scale = jnp.abs(apart).max()  # squares of tiny numbers would vanish
    apart /= scale
    return 1 - mean * (weights @ (apart * f)) / (scale * (weights @ apart**2) * (weights @ f))


def claims_1_and_2(t: Float[Array, " Q"], weights: Float[Array, " Q"]) -> tuple[Scalar, Scalar]:
    """E[q] / E|q| (Claim 1), and the margin of E[q' q] E[q] < E[q^2] E[q'], from w^T x under the first Gaussian."""
    q = jnp.tanh(t / 2)
    return weights @ q / (weights @ jnp.abs(q)), margin(weights, q, 2 * jax.nn.sigmoid(-t), slope(t))


def claim_3(alpha: float, x1: Float[Array, " Q"], weights: Float[Array, " Q"]) -> Scalar:
    """The margin of E[x1 q' q] E[q] < E[q^2] E[x1 q'] for w = alpha z."""
    t = alpha * x1
    return margin(weights, jnp.tanh(t / 2), 2 * jax.nn.sigmoid(-t), x1 * slope(t))


def slope(t: Float[Array, " Q"]) -> Float[Array, " Q"]:
    """dq/dt = (1 - q^2) / 2, without subtracting numbers near 1."""
    return 2 * jax.nn.sigmoid(t) * jax.nn.sigmoid(-t)


def lemma_2(key: PRNGKeyArray) -> dict[str, Scalar]:
    """The smallest margin of E[y^2] E[f] > E[y] E[y f] over random distributions on (0, 1), for both functions of the proof.

    f(y) = (1 - y^2) / 2, and ln((1 + y) / (1 - y)) (1 - y^2) / (2 alpha), whose alpha cancels. The key is consumed.
    """
    where, how = jax.random.split(key)
    y = jax.random.uniform(where, (DISTRIBUTIONS, ATOMS), minval=0.01, maxval=0.99)
    weights = jax.random.dirichlet(how, jnp.ones(ATOMS), (DISTRIBUTIONS,))
    functions = {"parabola": (1 - y**2) / 2, "logarithm": jnp.arctanh(y) * (1 - y**2)}
    return {name: jax.vmap(margin)(weights, y, 1 - y, f).min() for name, f in functions.items()}


#: name -> model of a config.
MODELS = {"kmeans": _kmeans, "two_experts": _two_experts}
