"""Agreement of choices: with clusters, with labels of text, between two moments, and between experts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Scalar


def covered(counts: Float[Array, "C E"], share: float = 0.9) -> Bool[Array, " C"]:
    """Returns True for clusters with specialists.

    `share` of their tokens go to experts `share` of whose tokens are theirs. Counts are hard choices. False for all
    when routing is collapsed or random, and for a cluster without tokens; one expert a cluster is enough.
    """
    special = counts >= share * jnp.maximum(counts.sum(0, keepdims=True), 1e-9)
    tokens = counts.sum(1)
    return (tokens > 0) & ((counts * special).sum(1) >= share * tokens)


def churn(choices: Int[np.ndarray, "T k"], before: Int[np.ndarray, "T k"]) -> float:
    """Returns the share of choices that differ between two moments, 1 - mean |S and S'| / k; -1 is no choice."""
    real = choices >= 0
    return 1.0 - float((choices[:, :, None] == before[:, None, :]).any(-1)[real].mean()) if real.any() else 0.0


def churns(choices: Int[np.ndarray, "N T k"]) -> dict[str, np.ndarray]:
    """Returns the churn from each evaluation to the next one, and to the last one."""
    steps = [churn(new, old) for new, old in zip(choices[1:], choices[:-1], strict=True)]
    return {
        "churn": np.array([np.nan, *steps]),
        "churn_to_final": np.array([churn(moment, choices[-1]) for moment in choices]),
    }


def agreement(counts: np.ndarray) -> dict[str, float]:
    """Returns adjusted mutual information and homogeneity of choices with clusters, from counts [C, E] (scikit-learn).

    ami is 0 in expectation for independent labels and 1 for a perfect match; homogeneity = 1 - H(C|E)/H(C) is 1 when
    every expert serves one cluster. Raw mutual information and purity are not reported: with many experts they are high
    for independent labels. Both are NaN without a choice.
    """
    if not counts.sum():
        return {"ami": float("nan"), "homogeneity": float("nan")}
    from sklearn import metrics  # here, as scikit-learn takes two seconds to load

    cluster, expert = np.indices(counts.shape)
    repeats = counts.astype(int).ravel()
    truth, chosen = np.repeat(cluster.ravel(), repeats), np.repeat(expert.ravel(), repeats)
    return {
        "ami": float(metrics.adjusted_mutual_info_score(truth, chosen)),
        "homogeneity": float(metrics.homogeneity_score(truth, chosen)),
    }


def information(
    choices: Int[np.ndarray, "T k"],
    label: Int[np.ndarray, " T"],
    row: Int[np.ndarray, " T"],
    token: Int[np.ndarray, " T"],
    draws: int,
    seed: int = 0,
) -> dict[str, float]:
    """Returns I(expert; label), I(expert; label | token id), I(expert; token id) in nats; of one label the last alone.

    A label belongs to a row of text, whose tokens have more in common than their label. Plug-in estimates minus their
    mean over `draws` permutations of the labels among rows (for the second among the rows that have a token id, for
    each id by itself), so that independent labels give 0 in expectation, however alike the tokens of a row are
    routed; permuting tokens instead would count that likeness as information. Labels that experts almost determine
    are underestimated. Ids are permuted among tokens. A router by token id has I(expert; label | token id) = 0.
    """
    rng = np.random.default_rng(seed)
    k = choices.shape[1]
    chosen = choices.reshape(-1)
    real = chosen >= 0
    constant = np.zeros(len(token), np.int64)

    def estimate(label, given):
        return _mutual(chosen[real], np.repeat(label, k)[real], np.repeat(given, k)[real])

    def beyond_chance(given):
        """Returns I(expert; label | given) less its mean for labels of permuted rows."""
        mixed = [mixed_labels(label, row, given, rng) for _ in range(draws)]
        return estimate(label, given) - float(np.mean([estimate(labels, given) for labels in mixed]))

    metrics = {}
    if (label != label[0]).any():
        metrics["mi_language"] = beyond_chance(constant)
        metrics["mi_language_given_token"] = beyond_chance(token.astype(np.int64))
    routed = np.asarray(real.reshape(-1, k).any(1))  # padding keeps its ids
    by_chance = float(np.mean([estimate(_among(routed, token, rng), constant) for _ in range(draws)]))
    return metrics | {"mi_token": estimate(token, constant) - by_chance}


def _among(
    real: Bool[np.ndarray, " T"], token: Int[np.ndarray, " T"], rng: np.random.Generator
) -> Int[np.ndarray, " T"]:
    """Returns ids permuted among the tokens that are `real`."""
    mixed = token.copy()
    mixed[real] = rng.permutation(token[real])
    return mixed


def mixed_labels(
    label: Int[np.ndarray, " T"], row: Int[np.ndarray, " T"], given: Int[np.ndarray, " T"], rng: np.random.Generator
) -> Int[np.ndarray, " T"]:
    """Returns labels permuted among the rows that share a value of `given`, for each value by itself.

    Tokens of a row with the same value keep a common label.
    """
    _, first, block = np.unique(given * (int(row.max()) + 1) + row, return_index=True, return_inverse=True)
    owner, within = label[first], given[first]  # sorted by what is given
    return owner[np.lexsort((rng.random(len(owner)), within))][block]


def _mutual(a: np.ndarray, b: np.ndarray, given: np.ndarray) -> float:
    """Returns I(a; b | given) = H(a, given) + H(b, given) - H(a, b, given) - H(given), plug-in, in nats."""

    def entropy_of(*columns):
        key = columns[0].astype(np.int64)
        for column in columns[1:]:
            key = key * (int(column.max()) + 1) + column
        counts = np.unique(key, return_counts=True)[1] / len(key)
        return -(counts * np.log(counts)).sum()

    return float(entropy_of(a, given) + entropy_of(b, given) - entropy_of(a, b, given) - entropy_of(given))


def mean_cosine(responses: Float[Array, "T E O"], real: Bool[Array, " T"] | None = None) -> Scalar:
    """Returns the mean cosine of two experts' outputs, over all pairs and the `real` tokens (None: all).

    1 where all experts agree, 0 in expectation for random directions.
    """
    experts = responses.shape[1]
    norms = jnp.linalg.norm(responses, axis=-1, keepdims=True)
    unit = responses / jnp.maximum(norms, 1e-12)
    pairs = (unit.sum(1) ** 2).sum(-1) - (unit**2).sum((1, 2))  # each pair counts twice
    cosine = pairs / max(experts * (experts - 1), 1)
    return cosine.mean() if real is None else (cosine * real).sum() / jnp.maximum(real.sum(), 1)
