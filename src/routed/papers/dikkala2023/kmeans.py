"""K-means as a mixture whose experts are also the router (Dikkala et al. 2023, Section E), with tests of Lemma 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Scalar
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, Column
from routed.layer.rule import SelectionRule
from routed.models.model import Model, ModelPart, Outputs
from routed.routers.clusters import lloyd_step, members, nearest


def kmeans(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds f(x) = u_j with the centre j nearest to x (Section E); centres start at random samples of the batch."""

    def init(key, batch):
        centres = jax.random.choice(key, batch.tokens, (config.experts.count,), replace=False)
        return {"router": {}, "experts": {"centres": centres}}, {}

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        centres = params["experts"]["centres"]
        return Outputs(centres[nearest(centres, batch.tokens)], {}, state)

    def watch(params, world, test, key):
        """Computes the distance of steps on the squared loss from k-means steps, over the largest coordinate."""
        centres = params["experts"]["centres"]

        def loss(centres):
            outputs = apply({"experts": {"centres": centres}}, {}, test, SelectionRule(), "")
            return ((outputs.prediction - test.tokens) ** 2).sum(-1).mean()

        gradient, count = jax.grad(loss)(centres), members(centres, test.tokens).sum(0)[:, None]
        rate = len(test.tokens) / (2 * jnp.maximum(count, 1))
        return {
            "theory/gradient_step": _apart(centres - gradient, inertia_step(centres, test.tokens, 1.0)),
            "theory/lloyd_step": _apart(centres - rate * gradient, lloyd_step(centres, test.tokens)),
        }

    return Model(init, apply, watch=watch)


def inertia_step(centres: Float[Array, "E D"], x: Float[Array, "T D"], rate: float) -> Float[Array, "E D"]:
    """Takes a gradient step on the inertia, the mean squared distance to the nearest centre.

    u_j - rate (2 / n) sum (u_j - x) over the samples x nearest to u_j.
    """
    membership = members(centres, x)
    return centres - rate * 2 / len(x) * (membership.sum(0)[:, None] * centres - membership.T @ x)


def _apart(a: Float[Array, "E D"], b: Float[Array, "E D"]) -> Scalar:
    return jnp.abs(a - b).max() / jnp.abs(b).max()


#: Columns of `watch`.
COLUMNS = {
    "theory/gradient_step": Column(
        "distance from a descent step on the inertia",
        "Distance of the router's step from a step of gradient descent on the k-means inertia.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    "theory/lloyd_step": Column(
        "distance from an iteration of k-means",
        "Distance of the router's step from an iteration of Lloyd's algorithm.",
        log=True,
        bounds=AT_LEAST_0,
    ),
}


#: Lloyd's k-means as a model: the centres of Theorem 2.
KMEANS = ModelPart(kmeans, targets=("input",), columns=COLUMNS, reads=("experts.count", "experts.learning_rate"))
