"""Mixtures of random subspaces with noise, a linear function per subspace (Dikkala et al. 2023, 3.3 and C.1)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.settings.setting import refuse
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of


class Fixed(NamedTuple):
    """An orthonormal basis and a weight vector for each subspace."""

    bases: Float[Array, "C D R"]
    weights: Float[Array, "C D"]


class Draws(NamedTuple):
    """Coordinates within the subspace, and the noise around it, both N(0, 1)."""

    cluster: Int[Array, " T"]
    inside: Float[Array, "T R"]
    noise: Float[Array, "T D"]


def fixed(keys: Key[Array, " n"], data) -> Fixed:
    """Draws subspaces spanned by Gaussian vectors, and weights N(0, I), scaled to labels of mean variance 1."""
    bases, _ = jnp.linalg.qr(jax.random.normal(keys[0], (data.clusters, data.dim, data.rank)))
    weights = jax.random.normal(keys[1], (data.clusters, data.dim))
    # signal: E (w^T B s)^2 = |B^T w|^2, R of D dimensions; noise: E (w^T eps)^2 = noise^2 |w|^2.
    variance = data.rank if data.target == "signal" else data.dim * data.noise**2
    return Fixed(bases, weights / jnp.sqrt(variance))


def draw(fixed: Fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Draws subspaces, and N(0, I) coordinates inside and around the subspaces."""
    inside, around = jax.random.split(noise_key)
    return Draws(
        cluster=clusters_of(cluster_key, (size,), data.clusters),
        inside=jax.random.normal(inside, (size, data.rank)),
        noise=jax.random.normal(around, (size, data.dim)),
    )


def batch(world: World, draws: Draws, data) -> Batch:
    """Returns x = s + eps with s = B_c z, and the label.

    The label is w_c^T s (target `signal`: the meaning of the paper) or w_c^T eps (target `noise`: as printed).
    """
    signal = jnp.einsum("tdr,tr->td", world.fixed.bases[draws.cluster], draws.inside)
    noise = data.noise * draws.noise
    labelled = signal if data.target == "signal" else noise
    y = (world.fixed.weights[draws.cluster] * labelled).sum(-1, keepdims=True)
    return Batch(x=signal + noise, y=y, cluster=draws.cluster)


def bayes(world: World, batch: Batch, data) -> Float[Array, "T O"]:
    """Computes E[y|x] = sum_c p(c|x) w_c^T E[s|x, c], E[s|x, c] = B B^T x / (1 + noise^2); eps is x - s.

    Given c, x is N(0, B B^T + noise^2 I): all subspaces share its determinant, and x^T Cov^-1 x differs between them by
    -|B^T x|^2 / (noise^2 (1 + noise^2)) only.
    """
    bases, weights = world.fixed
    variance = data.noise**2
    inside = jnp.einsum("cdr,td->tcr", bases, batch.x)
    likely = jax.nn.softmax(0.5 * (inside**2).sum(-1) / (variance * (1 + variance)))
    of_signal = jnp.einsum("tcr,cdr,cd->tc", inside, bases, weights) / (1 + variance)
    expected = of_signal if data.target == "signal" else batch.x @ weights.T - of_signal
    return (likely * expected).sum(-1, keepdims=True)


def _check(config: ConfigDict) -> None:
    if config.data.rank > config.data.dim:
        refuse("data.rank", config.data.rank, f"a subspace has at most data.dim={config.data.dim} dimensions")


TASK = Task(
    tokens="rows",
    targets={"signal": "vector", "noise": "vector"},
    fixed=fixed,
    draw=draw,
    batch=batch,
    bayes=bayes,
    signal=lambda data: data.dim,
    reads=("clusters", "dim", "rank", "noise"),
    check=_check,
)
