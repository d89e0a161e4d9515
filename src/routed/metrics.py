"""What a router does, measured: pure functions of probabilities, choices and clusters. Entropies are in nats.

Definitions follow the notes of each function; the three entropies split H(E) exactly (see `entropies`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Scalar
from sklearn import metrics as sklearn_metrics

from routed.words import Routing, SoftRouting

#: A dead expert gets less than this share of its fair load.
DEAD_SHARE = 0.01
#: `dead` is undefined (NaN) with fewer tokens per expert.
DEAD_TOKENS = 100


def entropy(probs: Float[Array, "*batch E"]) -> Float[Array, "*batch"]:
    """H(p) = -sum_e p_e log p_e, with 0 log 0 = 0."""
    return -xlogy(probs, probs).sum(-1)


def cluster_sums(probs: Float[Array, "T E"], cluster: Int[Array, " T"], clusters: int) -> Float[Array, "C E"]:
    """Sum of `probs` over the tokens of each cluster."""
    return jax.nn.one_hot(cluster, clusters, axis=0) @ probs


def entropies(probs: Float[Array, "T E"], cluster: Int[Array, " T"], clusters: int) -> dict[str, Scalar]:
    """The entropies of routing and Dikkala's sparsity.

    entropy_token = E_x H(p(x)); entropy_cluster = sum_c q_c H(E[p|c]) with q_c the share of cluster c;
    entropy_load = H(E_x p(x)). They split H(E) = I(E;C) + I(E;X|C) + H(E|X): between clusters (load - cluster),
    splitting within (cluster - token), per-token softness (token).
    sparsity = mean_c exp H(E[p|c]) is what Dikkala et al. (2023) tabulate: the effective number of experts of a cluster,
    1 when each has one, E when routing ignores the input; sparsity_exp_mean = exp mean_c H is the other reading.
    """
    return split(cluster_sums(probs, cluster, clusters), entropy(probs).mean())


def split(sums: Float[Array, "C E"], entropy_token: Scalar) -> dict[str, Scalar]:
    """`entropies` from the summed probabilities of each cluster and the mean entropy of a token."""
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
    """H(C|E) = sum_e q_e H(C|e), of hard choices (Chen et al. 2022): 0 when every expert serves one cluster."""
    load = counts.sum(0)
    return (load / load.sum() * entropy((counts / jnp.maximum(load, 1e-9)[None]).T)).sum()


def covered(counts: Float[Array, "C E"], share: float = 0.9) -> Bool[Array, " C"]:
    """Which clusters have specialists: `share` of their tokens go to experts `share` of whose tokens are theirs.

    Counts are hard choices. False for all when routing is collapsed or random; one expert a cluster is enough.
    """
    own = counts >= share * jnp.maximum(counts.sum(0, keepdims=True), 1e-9)
    return (counts * own).sum(1) >= share * counts.sum(1)


def load(choices: Int[Array, "T k"], num_experts: int) -> Float[Array, " E"]:
    """Share of the assignments chosen for each expert, before drops; sums to 1."""
    return jnp.zeros(num_experts).at[choices.reshape(-1)].add(1.0) / choices.size


def load_of(
    routing: Routing | SoftRouting, mask: Bool[Array, " T"] | None = None, groups: int = 1
) -> Float[Array, "groups E"]:
    """Share of the assignments chosen for each expert, before drops and without padding; of soft routing the mean weight.

    A row for each of `groups` contiguous groups of tokens. Counted by comparison, which stays on the device of its tokens;
    a scatter would gather all assignments.
    """
    experts = routing.scores.shape[1]
    if isinstance(routing, SoftRouting):
        total = routing.weight.reshape(groups, -1, experts).sum(1)
    else:
        chosen = jax.nn.one_hot(routing.expert, experts)
        if mask is not None:
            chosen *= mask[routing.token][:, None]
        total = chosen.reshape(groups, -1, experts).sum(1)
    return total / jnp.maximum(total.sum(1), 1e-9)[:, None]


def dropped(routing: Routing | SoftRouting, mask: Bool[Array, " T"] | None = None) -> Scalar:
    """Share of the assignments that found no place; padding counts nowhere, and soft routing drops nothing."""
    if isinstance(routing, SoftRouting):
        return jnp.float32(0)
    real = jnp.ones(len(routing.scores), bool) if mask is None else mask
    real = real[routing.token]
    return (real & ~routing.kept).sum() / jnp.maximum(real.sum(), 1)


def rebalanced(bias: Float[Array, " E"], load: Float[Array, " E"], rate: float) -> Float[Array, " E"]:
    """The balancing bias after one step: up by `rate` for experts below a fair load, down above it (Wang et al. 2024)."""
    missing = 1 / len(load) - load
    return bias + rate * jnp.sign(jnp.where(jnp.abs(missing) < 1e-6, 0.0, missing))  # rounding is no direction


def load_summary(load: Float[Array, " E"], tokens: int) -> dict[str, Scalar]:
    """load_max = E max load (1 when balanced, E when collapsed); dead = share of experts below 1 % of a fair load.

    `dead` is NaN with fewer than 100 tokens per expert, where an empty expert proves nothing.
    """
    experts = len(load)
    dead = (load < DEAD_SHARE / experts).mean() if tokens >= DEAD_TOKENS * experts else jnp.nan
    return {"load_max": experts * load.max(), "dead": jnp.asarray(dead)}


def shuffled_sparsity(
    scores: Callable[[Float[Array, "T ..."]], Float[Array, "T E"]],
    x: Float[Array, "T ..."],
    cluster: Int[Array, " T"],
    clusters: int,
    key: PRNGKeyArray,
    shuffles: int = 32,
) -> Float[Array, " shuffles"]:
    """Sparsity of the shuffled router: the same weights, with one permutation of the input features for all experts.

    For a linear router this permutes the columns of W (Dikkala et al. 2023, Section 2.1); defined for any router. One
    value per draw. The key is consumed.
    """

    def one(key):
        permuted = jax.random.permutation(key, x.reshape(len(x), -1), axis=1).reshape(x.shape)
        return entropies(jax.nn.softmax(scores(permuted)), cluster, clusters)["sparsity"]

    return jax.lax.map(one, jax.random.split(key, shuffles))


def norm_ratio(kernel: Float[Array, "D E"]) -> Scalar:
    """E_e|w_e|^2 / (E_e|w_e|)^2 over the experts' router weights: 1 when all norms are equal, E when one is non-zero.

    Dikkala et al. (2023), C.1. A fresh Gaussian router in D dimensions already has 1 + 1/(2 D) or so.
    """
    norms = jnp.linalg.norm(kernel, axis=0)
    return (norms**2).mean() / norms.mean() ** 2


def first_layer(params) -> Float[Array, "D H"] | None:
    """The weights that a router applies to its input: of its first hidden layer, or of its scores. None: it has no such."""
    hidden = params.get("features", {})
    for weights in (hidden.get("Dense_0", {}), hidden, {} if hidden else params):
        if "kernel" in weights:
            return weights["kernel"]
    return None


def signal_share(kernel: Float[Array, "D E"], signal: int) -> Scalar:
    """Share of the router's squared norm on the first `signal` input dimensions (Dikkala et al. 2023, 3.1)."""
    return (kernel[:signal] ** 2).sum() / (kernel**2).sum()


def churn(choices: Int[np.ndarray, "T k"], other: Int[np.ndarray, "T k"]) -> float:
    """1 - |S and S'| / k, mean over tokens: the share of a token's experts that differ between two moments."""
    return 1.0 - float((choices[:, :, None] == other[:, None, :]).any(-1).mean())


def group_hit(groups: np.ndarray, counts: np.ndarray) -> float:
    """Share of the live experts whose largest cluster is the one in `groups` [E], from counts [C, E]; live: 1 % of a fair load."""
    load = counts.sum(0)
    live = load >= DEAD_SHARE * load.mean()
    return float((counts.argmax(0) == groups)[live].mean())


def agreement(counts: np.ndarray) -> dict[str, float]:
    """Adjusted mutual information and homogeneity of hard choices with clusters, from counts [C, E] (scikit-learn).

    ami is 0 in expectation for independent labels and 1 for a perfect match; homogeneity = 1 - H(C|E)/H(C) is 1 when
    every expert serves one cluster. Raw mutual information and purity are not reported: with many experts they are high
    for independent labels.
    """
    cluster, expert = np.indices(counts.shape)
    repeats = counts.astype(int).ravel()
    truth, chosen = np.repeat(cluster.ravel(), repeats), np.repeat(expert.ravel(), repeats)
    return {
        "ami": float(sklearn_metrics.adjusted_mutual_info_score(truth, chosen)),
        "homogeneity": float(sklearn_metrics.homogeneity_score(truth, chosen)),
    }


def information(
    choices: Int[np.ndarray, "T k"],
    label: Int[np.ndarray, " T"],
    token: Int[np.ndarray, " T"],
    draws: int,
    seed: int = 0,
) -> dict[str, float]:
    """I(expert; label) and I(expert; label | token id) in nats: what experts know of a token's language, and beyond its id.

    Plug-in estimates minus their mean over `draws` permutations of the labels, within each token id for the second, so that
    independent labels give 0 in expectation. A router by token id has I(expert; label | token id) = 0.
    """
    rng = np.random.default_rng(seed)
    k = choices.shape[1]
    within = np.argsort(token, kind="stable")  # tokens of an id side by side

    def shuffled():
        mixed = np.empty_like(label)
        mixed[within] = label[within[np.lexsort((rng.random(len(token)), token[within]))]]
        return mixed

    def told(label, given):
        return _mutual(choices.reshape(-1), np.repeat(label, k), np.repeat(given, k))

    everywhere = np.zeros_like(token)
    free_null = np.mean([told(rng.permutation(label), everywhere) for _ in range(draws)])
    tied_null = np.mean([told(shuffled(), token) for _ in range(draws)])
    return {
        "mi_language": told(label, everywhere) - float(free_null),
        "mi_language_given_token": told(label, token) - float(tied_null),
    }


def _mutual(a: np.ndarray, b: np.ndarray, given: np.ndarray) -> float:
    """I(a; b | given) = H(a, given) + H(b, given) - H(a, b, given) - H(given), plug-in, in nats."""

    def entropy_of(*columns):
        key = columns[0].astype(np.int64)
        for column in columns[1:]:
            key = key * (int(column.max()) + 1) + column
        counts = np.unique(key, return_counts=True)[1] / len(key)
        return -(counts * np.log(counts)).sum()

    return float(entropy_of(a, given) + entropy_of(b, given) - entropy_of(a, b, given) - entropy_of(given))
