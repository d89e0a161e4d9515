"""Entropies of routing in nats: of a token, a cluster and the load, which split H(E), and the sparsity of clusters."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar


def entropy(probs: Float[Array, "*batch E"]) -> Float[Array, "*batch"]:
    """Returns H(p) = -sum_e p_e log p_e, with 0 log 0 = 0."""
    return -xlogy(probs, probs).sum(-1)


def cluster_sums(probs: Float[Array, "T E"], cluster: Int[Array, " T"], clusters: int) -> Float[Array, "C E"]:
    """Returns the sum of `probs` over the tokens of each cluster."""
    return jax.nn.one_hot(cluster, clusters, axis=0) @ probs


def entropies(probs: Float[Array, "T E"], cluster: Int[Array, " T"], clusters: int) -> dict[str, Scalar]:
    """Returns the entropies of routing and Dikkala's sparsity.

    entropy_token = E_x H(p(x)); entropy_cluster = sum_c q_c H(E[p|c]) with q_c the share of cluster c; entropy_load =
    H(E_x p(x)). They split H(E) = I(E;C) + I(E;X|C) + H(E|X): between clusters (load - cluster), splitting within
    (cluster - token), per-token softness (token). sparsity = sum_c q_c exp H(E[p|c]) is what Dikkala et al. (2023)
    tabulate, of clusters of equal size: the effective number of experts of a cluster, 1 when each has one, E when
    routing ignores the input; sparsity_exp_mean = exp mean_c H is the other reading.
    """
    return split(cluster_sums(probs, cluster, clusters), entropy(probs).mean())


def split(sums: Float[Array, "C E"], entropy_token: Scalar) -> dict[str, Scalar]:
    """Returns `entropies` from the summed probabilities of each cluster and the mean entropy of a token."""
    counts = sums.sum(-1)
    share = counts / counts.sum()
    per_cluster = entropy(sums / jnp.maximum(counts, 1e-9)[:, None])
    mean_entropy = (share * per_cluster).sum()
    return {
        "entropy_token": entropy_token,
        "entropy_cluster": mean_entropy,
        "entropy_load": entropy(sums.sum(0) / counts.sum()),
        "sparsity": (share * jnp.exp(per_cluster)).sum(),
        "sparsity_exp_mean": jnp.exp(mean_entropy),
    }


def dispatch_entropy(counts: Float[Array, "C E"]) -> Scalar:
    """Returns H(C|E) = sum_e q_e H(C|e), of hard choices (Chen et al. 2022): 0 when every expert serves one cluster."""
    load = counts.sum(0)
    return (load / load.sum() * entropy((counts / jnp.maximum(load, 1e-9)[None]).T)).sum()


def shuffled_sparsity(
    scores: Callable[[Float[Array, "T ..."]], Float[Array, "T E"]],
    x: Float[Array, "T ..."],
    cluster: Int[Array, " T"],
    clusters: int,
    key: PRNGKeyArray,
    shuffles: int = 32,
) -> Float[Array, " shuffles"]:
    """Returns the sparsity of a shuffled router: the same weights, with permuted input features.

    For a linear router this permutes the columns of W (Dikkala et al. 2023, Section 2.1); defined for any router. One
    value per draw. The key is consumed.
    """

    def draw(key):
        permuted = jax.random.permutation(key, x.reshape(len(x), -1), axis=1).reshape(x.shape)
        return entropies(jax.nn.softmax(scores(permuted)), cluster, clusters)["sparsity"]

    return jax.lax.map(draw, jax.random.split(key, shuffles))
