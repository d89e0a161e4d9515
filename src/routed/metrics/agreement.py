"""What a router does, measured: pure functions of probabilities, choices and clusters. Entropies are in nats.

Definitions follow the notes of each function; the three entropies split H(E) exactly (see `entropies`).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Scalar
from sklearn import metrics as sklearn_metrics

from routed.metrics.load import DEAD_SHARE


def covered(counts: Float[Array, "C E"], share: float = 0.9) -> Bool[Array, " C"]:
    """Which clusters have specialists: `share` of their tokens go to experts `share` of whose tokens are theirs.

    Counts are hard choices. False for all when routing is collapsed or random, and for a cluster without tokens; one expert
    a cluster is enough.
    """
    own = counts >= share * jnp.maximum(counts.sum(0, keepdims=True), 1e-9)
    tokens = counts.sum(1)
    return (tokens > 0) & ((counts * own).sum(1) >= share * tokens)


def churn(choices: Int[np.ndarray, "T k"], other: Int[np.ndarray, "T k"]) -> float:
    """1 - |S and S'| / k, mean over choices of all tokens: the share of experts that differ between two moments; -1 is none."""
    real = choices >= 0
    return 1.0 - float((choices[:, :, None] == other[:, None, :]).any(-1)[real].mean()) if real.any() else 0.0


def group_hit(groups: np.ndarray, counts: np.ndarray) -> float:
    """Share of the live experts whose largest cluster is the one in `groups` [E], from counts [C, E]; live: 1 % of a fair load."""
    load = counts.sum(0)
    live = load >= DEAD_SHARE * load.mean()
    return float((counts.argmax(0) == groups)[live].mean())


def group_errors(groups: np.ndarray, errors: Float[np.ndarray, "C E"]) -> tuple[float, float]:
    """The mean error of experts on their cluster in `groups` [E], and their least error on any other cluster, as a mean."""
    own = np.arange(len(errors))[:, None] == groups[None]
    return float(errors[own].mean()), float(np.where(own, np.inf, errors).min(0).mean())


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
    row: Int[np.ndarray, " T"],
    token: Int[np.ndarray, " T"],
    draws: int,
    seed: int = 0,
) -> dict[str, float]:
    """I(expert; label), I(expert; label | token id), I(expert; token id) in nats: what experts know of a token's language, beyond its id, and of that.

    A label belongs to a row of text, whose tokens have more in common than their label. Plug-in estimates minus their mean over
    `draws` permutations of the labels among rows (for the second among the rows that have a token id, for each id by itself), so that
    labels that experts know nothing of give 0 in expectation, however alike the tokens of a row are routed; permuting tokens instead
    counts that likeness as information. Labels that experts know almost entirely get less than they have. Ids are permuted among tokens. A router by token id has I(expert; label | token id) = 0.
    Where there is one label nobody can know it, and the last alone is returned.
    """
    rng = np.random.default_rng(seed)
    k = choices.shape[1]

    chosen = choices.reshape(-1)
    real = chosen >= 0

    none = np.zeros(len(token), np.int64)

    def told(label, given):
        return _mutual(chosen[real], np.repeat(label, k)[real], np.repeat(given, k)[real])

    def beyond_chance(given):
        """I(expert; label | given), less what labels of permuted rows tell."""
        mixed = [mixed_labels(label, row, given, rng) for _ in range(draws)]
        return told(label, given) - float(np.mean([told(one, given) for one in mixed]))

    found = {}
    if (label != label[0]).any():
        found = {"mi_language": beyond_chance(none), "mi_language_given_token": beyond_chance(token.astype(np.int64))}
    there = np.asarray(real.reshape(-1, k).any(1))  # padding keeps its ids, or it would take them from those that count
    by_chance = float(np.mean([told(_among(there, token, rng), none) for _ in range(draws)]))
    return found | {"mi_token": told(token, none) - by_chance}


def _among(
    there: Bool[np.ndarray, " T"], token: Int[np.ndarray, " T"], rng: np.random.Generator
) -> Int[np.ndarray, " T"]:
    """Ids permuted among the tokens that are `there`."""
    mixed = token.copy()
    mixed[there] = rng.permutation(token[there])
    return mixed


def mixed_labels(
    label: Int[np.ndarray, " T"], row: Int[np.ndarray, " T"], given: Int[np.ndarray, " T"], rng: np.random.Generator
) -> Int[np.ndarray, " T"]:
    """Labels permuted among the rows that have a `given`, for each of these by itself; tokens of a row with one `given` share theirs."""
    _, first, block = np.unique(given * (int(row.max()) + 1) + row, return_index=True, return_inverse=True)
    owner, within = label[first], given[first]  # sorted by what is given
    return owner[np.lexsort((rng.random(len(owner)), within))][block]


def _mutual(a: np.ndarray, b: np.ndarray, given: np.ndarray) -> float:
    """I(a; b | given) = H(a, given) + H(b, given) - H(a, b, given) - H(given), plug-in, in nats."""

    def entropy_of(*columns):
        key = columns[0].astype(np.int64)
        for column in columns[1:]:
            key = key * (int(column.max()) + 1) + column
        counts = np.unique(key, return_counts=True)[1] / len(key)
        return -(counts * np.log(counts)).sum()

    return float(entropy_of(a, given) + entropy_of(b, given) - entropy_of(a, b, given) - entropy_of(given))


def mean_cosine(responses: Float[Array, "T E O"], real: Bool[Array, " T"] | None = None) -> Scalar:
    """Returns the mean cosine of two experts' outputs for the same token, over all pairs and tokens (without padding, if `real` is given).

    1 where all experts agree, 0 in expectation for random directions.
    """
    experts = responses.shape[1]
    norms = jnp.linalg.norm(responses, axis=-1, keepdims=True)
    unit = responses / jnp.maximum(norms, 1e-12)
    pairs = (unit.sum(1) ** 2).sum(-1) - (unit**2).sum((1, 2))  # each pair counts twice
    cosine = pairs / max(experts * (experts - 1), 1)
    return cosine.mean() if real is None else (cosine * real).sum() / jnp.maximum(real.sum(), 1)
