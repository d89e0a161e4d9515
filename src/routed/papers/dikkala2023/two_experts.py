"""A router over two opposite experts (Dikkala et al. 2023, Section F), with tests of Theorem 4 and its proof."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray, Scalar
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, SHARE, Batch, Column
from routed.models.model import Model, ModelPart, Outputs
from routed.papers.dikkala2023 import two_gaussians
from routed.tasks import TASKS

#: Norm of the initial router and of initial experts; the norm tends to 0 in the theorem.
SMALL = 1e-2

#: |w| at which the claims are tested. The margin of Claim 3, for w = alpha z, vanishes as alpha^2; for smaller alpha it
#: is below the precision of float32.
ALPHAS = (0.3, 1.0, 3.0, 10.0, 30.0)

#: cos(w, z) at which Claims 1 and 2 are tested.
COSINES = (0.01, 0.1, 0.5, 0.9, 1.0)

#: Random distributions on which Lemma 2 is tested, and points of each distribution.
DISTRIBUTIONS, ATOMS = 256, 8


def two_experts(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds a router w over experts u and -u (Section F).

    f(x) = p u + (1 - p)(-u) = q(x) u, q = 2 sigmoid(w^T x) - 1 = tanh(w^T x / 2).
    """
    data = config.data
    outputs = TASKS[data.name].outputs(data)

    def small(key, size):
        draw = jax.random.normal(key, (size,))
        return SMALL * draw / jnp.linalg.norm(draw)

    def init(key, batch):
        router, experts = jax.random.split(key)
        return {"router": {"w": small(router, batch.tokens.shape[1])}, "experts": {"u": small(experts, outputs)}}, {}

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        gate = jnp.tanh(batch.tokens @ params["router"]["w"] / 2)
        return Outputs(gate[:, None] * params["experts"]["u"][None], {}, state)

    def watch(params, world, test: Batch, key: PRNGKeyArray):
        """Compares w and u with z and v, and computes the margins of the proof's claims: above 0 if a claim holds."""
        (z, v), w, u = world.fixed, params["router"]["w"], params["experts"]["u"]
        sign = jnp.where(w @ z < 0, -1.0, 1.0)  # the proof takes w^T z > 0
        along, norm = jnp.abs(w @ z), jnp.linalg.norm(w)
        across = jnp.linalg.norm(w - (w @ z) * z)
        noise, weights = (jnp.asarray(part, jnp.float32) for part in two_gaussians.plane(data))
        x1 = 1 + noise[:, 0]
        at = [(alpha * cos, alpha * (1 - cos**2) ** 0.5) for alpha in ALPHAS for cos in COSINES]
        along, across = (
            jnp.append(jnp.array(grid), current)
            for grid, current in zip(zip(*at, strict=True), (along, across), strict=True)
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

    return Model(init, apply, watch=watch)


def margin(
    weights: Float[Array, " Q"], y: Float[Array, " Q"], rest: Float[Array, " Q"], f: Float[Array, " Q"]
) -> Scalar:
    """Computes (E[y^2] E[f] - E[y] E[y f]) / (Var[y] E[f]) = 1 - E[y] Cov[y, f] / (Var[y] E[f]) over weighted points.

    `rest` is 1 - y. Deviations are computed from the smaller of y and 1 - y, so that float32 keeps their digits.
    """
    mean, left = weights @ y, weights @ rest
    apart = jnp.where(mean < 0.5, y - mean, left - rest)
    scale = jnp.abs(apart).max()  # squares of tiny numbers would vanish
    apart /= scale
    return 1 - mean * (weights @ (apart * f)) / (scale * (weights @ apart**2) * (weights @ f))


def claims_1_and_2(t: Float[Array, " Q"], weights: Float[Array, " Q"]) -> tuple[Scalar, Scalar]:
    """Computes E[q] / E|q| (Claim 1), and the margin of E[q' q] E[q] < E[q^2] E[q'] (Claim 2), from t = w^T x."""
    q = jnp.tanh(t / 2)
    return weights @ q / (weights @ jnp.abs(q)), margin(weights, q, 2 * jax.nn.sigmoid(-t), slope(t))


def claim_3(alpha: float, x1: Float[Array, " Q"], weights: Float[Array, " Q"]) -> Scalar:
    """Computes the margin of E[x1 q' q] E[q] < E[q^2] E[x1 q'] (Claim 3) for w = alpha z."""
    t = alpha * x1
    return margin(weights, jnp.tanh(t / 2), 2 * jax.nn.sigmoid(-t), x1 * slope(t))


def slope(t: Float[Array, " Q"]) -> Float[Array, " Q"]:
    """Computes dq/dt = (1 - q^2) / 2 without subtracting numbers near 1."""
    return 2 * jax.nn.sigmoid(t) * jax.nn.sigmoid(-t)


def lemma_2(key: PRNGKeyArray) -> dict[str, Scalar]:
    """Computes the smallest margin of E[y^2] E[f] > E[y] E[y f] over random distributions on (0, 1).

    Both functions of the proof: f(y) = (1 - y^2) / 2, and f(y) = ln((1 + y) / (1 - y)) (1 - y^2) / (2 alpha);
    alpha cancels. The key is consumed.
    """
    where, how = jax.random.split(key)
    y = jax.random.uniform(where, (DISTRIBUTIONS, ATOMS), minval=0.01, maxval=0.99)
    weights = jax.random.dirichlet(how, jnp.ones(ATOMS), (DISTRIBUTIONS,))
    functions = {"parabola": (1 - y**2) / 2, "logarithm": jnp.arctanh(y) * (1 - y**2)}
    return {name: jax.vmap(margin)(weights, y, 1 - y, f).min() for name, f in functions.items()}


#: Columns of `watch`.
COLUMNS = {
    "theory/cosine": Column(
        "|cos(w, z)|",
        "Absolute cosine of the router and the direction that separates the two Gaussians.",
        bounds=SHARE,
        higher_is_better=True,
    ),
    "theory/norm": Column("|w|", "Norm of the router.", bounds=AT_LEAST_0),
    "theory/target_error": Column(
        "|u ∓ v| / |v|",
        "Distance of the expert from its target (up to the sign), over the target's norm.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    **{
        f"theory/claim{number}": Column(
            f"margin of Claim {number}",
            f"By how much Claim {number} of the proof holds at the worst place tried: above 0 it holds.",
        )
        for number in (1, 2, 3)
    },
    **{
        f"theory/lemma2_{name}": Column(
            f"margin of Lemma 2, {name}",
            f"By how much Lemma 2 holds with its {name}, at the worst distribution tried: above 0 it holds.",
        )
        for name in ("parabola", "logarithm")
    },
}


#: Two experts on two Gaussians, whose gradient flow Theorem 4 describes.
TWO_EXPERTS = ModelPart(
    two_experts,
    needs=("opposite Gaussians",),
    columns=COLUMNS,
    reads=("experts.learning_rate", "router.frozen", "router.learning_rate"),
)
