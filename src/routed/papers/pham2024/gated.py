"""Mixtures of Gaussian experts under a gate of the K largest scores: density, Hellinger distance, Voronoi loss.

Source: Pham et al. (2024), eq. 6. p_G(y | x) = sum_i softmax(TopK(s(x), K))_i N(y | g_i(x), v_i), g_i(x) = a_i x + b_i,
v_i a variance, x and y numbers. Scores are |g_i(x)| (gate `norms`: competition) or alpha_i x + beta_i (gate `softmax`:
a router with weights).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Scalar

from routed.contracts.ties import highest

#: Gates, which weight the experts.
GATES = NORMS, SOFTMAX = ("norms", "softmax")

#: Log weight of an expert that is not chosen: probability 0, but finite, so that gradients stay finite.
NEVER = -1e30


class Components(NamedTuple):
    """The measure G of k experts, with optional leading axes. The gate `norms` ignores the field `gate`."""

    line: Float[Array, "*S k 2"]  # a, b
    variance: Float[Array, "*S k"]
    gate: Float[Array, "*S k 2"]  # alpha, beta


def answers(components: Components, x: Float[Array, " T"]) -> Float[Array, "T k"]:
    """Computes g_i(x)."""
    return x[:, None] * components.line[None, :, 0] + components.line[None, :, 1]


def log_weights(components: Components, gate: str, most: int, x: Float[Array, " T"]) -> Float[Array, "T k"]:
    """Computes log softmax(TopK(scores, most)), and NEVER for experts that are not chosen.

    The choice of experts has no gradient.
    """
    scores = answers(components, x)
    scores = (
        jnp.abs(scores) if gate == NORMS else x[:, None] * components.gate[None, :, 0] + components.gate[None, :, 1]
    )
    # Chosen by index: a comparison with the K-th score may miss this expert if XLA computes the score twice.
    chosen = jax.nn.one_hot(highest(jax.lax.stop_gradient(scores), most), scores.shape[1]).sum(1) > 0
    return jnp.where(chosen, scores - jax.nn.logsumexp(jnp.where(chosen, scores, NEVER), axis=1, keepdims=True), NEVER)


def log_density(
    components: Components, gate: str, most: int, x: Float[Array, " T"], y: Float[Array, "T N"]
) -> Float[Array, "T N"]:
    """Computes log p_G(y | x) of several y at each x."""
    weights, variance = log_weights(components, gate, most, x)[:, None], components.variance[None, None]
    apart = y[:, :, None] - answers(components, x)[:, None]
    return jax.nn.logsumexp(weights - 0.5 * (apart**2 / variance + jnp.log(2 * jnp.pi * variance)), axis=-1)


def grid(xs: int, ys: int, reach: float) -> tuple[Float[np.ndarray, " X"], Float[np.ndarray, "X Y"], float]:
    """Returns midpoints x of [-1, 1], equally spaced y within +-reach at each x, and the spacing of y."""
    x = (np.arange(xs) + 0.5) * 2 / xs - 1
    y = np.linspace(-reach, reach, ys)
    return x.astype(np.float32), np.broadcast_to(y, (xs, ys)).astype(np.float32), float(y[1] - y[0])


def hellinger(first: Components, second: Components, gate: str, most: int, nodes: tuple) -> Scalar:
    """Computes E_X h, h^2 = 1/2 integral (sqrt f - sqrt f')^2 dy, X uniform on [-1, 1], by quadrature on `grid`."""
    x, y, step = nodes
    # Without the barrier XLA evaluates the truth's density at compile time.
    x, y = jax.lax.optimization_barrier((jnp.asarray(x), jnp.asarray(y)))
    roots = [jnp.exp(0.5 * log_density(components, gate, most, x, y)) for components in (first, second)]
    return jnp.sqrt(0.5 * step * ((roots[0] - roots[1]) ** 2).sum(1)).mean()


def voronoi(estimated: Components, true: Components, gate: str, most: int) -> Scalar:
    """Computes the Voronoi loss D(G, G*) (Pham et al. 2024, Theorem 4.2).

    D is the largest sum_j sum_(i in A_j) (|W_i - W*_j| + |v_i - v*_j|) over K true components j; A_j are the estimated
    components nearest to j. With the gate `softmax`, W includes the gate's weights minus their means, as the means do
    not change the density.
    """
    centred = lambda gate: gate - gate.mean(-2, keepdims=True)  # noqa: E731
    parts = [(side.line,) if gate == NORMS else (side.line, centred(side.gate)) for side in (estimated, true)]
    weights, targets = (jnp.concatenate(side, axis=-1) for side in parts)
    apart = jnp.linalg.norm(weights[:, None] - targets[None], axis=-1) + jnp.abs(
        estimated.variance[:, None] - true.variance[None]
    )
    cell = apart.argmin(1)
    sums = jnp.zeros(len(true.variance)).at[cell].add(apart.min(1))
    return jax.lax.top_k(sums, most)[0].sum()
