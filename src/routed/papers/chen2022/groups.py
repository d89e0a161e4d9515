"""The groups of experts of Theorem 4.2 (Chen et al. 2022): where the samples of their cluster go.

Group M_k holds the experts whose filters at initialisation favour cluster k. The task names the group of each expert
in the array `groups` [experts] of its `watch`; counts of samples by cluster and expert come from every router.
"""

from __future__ import annotations

import numpy as np

from routed.contracts import SHARE, Column

COLUMNS = {
    "router/group_share": Column(
        "share of samples that go to\nthe group of their cluster",
        bounds=SHARE,
        higher_is_better=True,
        definition=(
            "Share of the test samples that go to an expert whose filters at initialisation favour their cluster."
        ),
    ),
    "router/group_gap": Column(
        "difference of loads\nwithin a group (Lemma E.16)",
        bounds=SHARE,
        higher_is_better=False,
        definition=(
            "Largest difference between the shares of a cluster's test samples that two experts of its group get; mean"
            " over the groups of at least two experts. 0: equal loads; 1: one expert has all samples."
        ),
    ),
}


def group_share(groups: np.ndarray, counts: np.ndarray) -> float:
    """Returns the share of samples that go to an expert of their group [E], from counts [C, E] (Theorem 4.2)."""
    return float(counts[_members(groups, len(counts))].sum() / counts.sum())


def group_gap(groups: np.ndarray, counts: np.ndarray) -> float:
    """Returns the mean of max |n_km - n_kn| / n_k over m, n in M_k, of the groups with two experts or more.

    n_km counts the samples of cluster k that expert m gets. Lemma E.16 bounds the difference in every group. 0 if no
    group has two experts.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    gaps = [
        np.ptp(share[members])
        for share, members in zip(shares, _members(groups, len(counts)), strict=True)
        if members.sum() > 1
    ]
    return float(np.mean(gaps)) if gaps else 0.0


def _members(groups: np.ndarray, clusters: int) -> np.ndarray:
    """Returns True where an expert is in the group of a cluster [C, E]."""
    return np.arange(clusters)[:, None] == groups[None]
