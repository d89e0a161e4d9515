"""Mutual information from tables of counts, in nats, in NumPy for tables of millions of cells."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, Integer, Num


def joint(
    code: Integer[np.ndarray, " T"], expert: Integer[np.ndarray, "T k"], codes: int, experts: int
) -> Int[np.ndarray, "C E"]:
    """Counts the assignments of tokens of each code to each expert; -1 is no expert."""
    if experts * codes == 0:
        return np.zeros((codes, experts), np.int64)
    key = code.astype(np.int64)[:, None] * experts + expert
    flat = key.ravel() if expert.min(initial=0) >= 0 else key[expert >= 0]
    return np.bincount(flat, minlength=codes * experts).reshape(codes, experts)


def entropy(counts: Num[np.ndarray, "*any"]) -> float:
    """Returns H in nats of a table of counts, plug-in: log N - sum c log c / N."""
    some = counts[counts > 0].astype(float)
    total = some.sum()
    return float(np.log(total) - (some * np.log(some)).sum() / total) if total else 0.0


def mutual(table: Num[np.ndarray, "C E"]) -> float:
    """Returns I(code; expert) = H(code) + H(expert) - H(code, expert), plug-in.

    It is too large by about (C - 1)(E - 1) / 2N where N is small.
    """
    return max(0.0, entropy(table.sum(1)) + entropy(table.sum(0)) - entropy(table))


def pointwise(table: Num[np.ndarray, "C E"]) -> Float[np.ndarray, "C E"]:
    """Returns log c_ij N / (c_i. c_.j), 0 for empty cells: its mean over all counts is `mutual`.

    As that mean is stationary in the table, means over sequences are the influence of these sequences on the estimate.
    """
    counts = table.astype(np.float32)
    rows, columns = counts.sum(1, keepdims=True), counts.sum(0, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(counts) - np.log(rows) - np.log(columns) + np.log(counts.sum(dtype=float))
    return np.where(counts > 0, logs, 0.0).astype(np.float32)


def independent_pairs(load: Float[np.ndarray, " E"], rounds: int = 200) -> Float[np.ndarray, "E E"]:
    """Returns the shares of ordered pairs of different experts that their loads alone would give.

    q_ij = a_i a_j off the diagonal, fitted so that every expert keeps its share (iterative proportional fitting);
    quasi-independence of Goodman (1968).
    """
    load = np.asarray(load, float) / load.sum()
    a = load.copy()
    for _ in range(rounds):
        a = np.sqrt(a * load / np.maximum(a.sum() - a, 1e-30))
    q = np.outer(a, a)
    np.fill_diagonal(q, 0)
    return q / q.sum()
