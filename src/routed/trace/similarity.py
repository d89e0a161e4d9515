"""Agreement of two routers whose experts have no common numbers: equal choices after the best renumbering."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Num
from scipy.optimize import linear_sum_assignment

from routed.trace import features
from routed.trace.arrays import top
from routed.trace.format import Trace

#: Draws of tables by chance, and of random routers, whose means are taken.
DRAWS = 4


def matched(table: Num[np.ndarray, "E E"]) -> tuple[float, Int[np.ndarray, " E"]]:
    """Returns (share of the counts on the best permutation, permutation): expert e matches expert permutation[e].

    The best permutation has the largest sum of counts (the Hungarian method; Kuhn 1955).
    """
    permutation = linear_sum_assignment(table, maximize=True)[1]
    return float(table[np.arange(len(table)), permutation].sum() / max(table.sum(), 1)), permutation


def by_chance(table: Num[np.ndarray, "E E"], draws: int = DRAWS, seed: int = 0) -> float:
    """Returns the share on the best permutation for independent choices with the same loads, as a mean of draws.

    It is larger than 1 / E: loads are not equal, and the permutation is chosen after the draw.
    """
    total, random = table.sum(), np.random.default_rng(seed)
    independent = np.outer(table.sum(1), table.sum(0)).ravel() / max(float(total) ** 2, 1.0)
    if not total:
        return 0.0
    tables = random.multinomial(int(total), independent / independent.sum(), draws).reshape(draws, *table.shape)
    return float(np.mean([matched(table)[0] for table in tables]))


def together(old: Int[np.ndarray, "T k"], new: Int[np.ndarray, "T k"], experts: int) -> Int[np.ndarray, "E E"]:
    """Returns the number of tokens with expert e among their old experts and f among their new; -1 is no expert."""
    table = np.zeros((experts, experts), np.int64)
    for i in range(old.shape[1]):
        for j in range(new.shape[1]):
            real = (old[:, i] >= 0) & (new[:, j] >= 0)
            key = old[real, i].astype(np.int64) * experts + new[real, j]
            table += np.bincount(key, minlength=experts**2).reshape(experts, experts)
    return table


def routers(trace: Trace, seed: int = 0) -> tuple[Float[np.ndarray, "L L"], Float[np.ndarray, " L"]]:
    """Returns (shares [L, L], chance [L]): agreement of the routers of layers i and j on the features of layer i.

    A share is of tokens with equal first choices under the best permutation of experts. Chance is of routers with
    weights N(0, 1) on these features, as a mean of draws. Layers whose features have different widths are NaN.
    """
    layers = [features.load(trace.folder, layer) for layer in range(len(trace.layers))]
    shares, chance = np.full((len(layers), len(layers)), np.nan), np.full(len(layers), np.nan)
    random = np.random.default_rng(seed)
    for i, (_, values, kernel, offset) in enumerate(layers):
        trained, _ = top(values @ kernel + offset, 1)

        def agreement(scores: np.ndarray, trained=trained) -> float:
            return matched(together(trained, top(scores, 1)[0], trace.experts))[0]

        for j, (_, _, other_kernel, other_offset) in enumerate(layers):
            if other_kernel.shape == kernel.shape:
                shares[i, j] = agreement(values @ other_kernel + other_offset)
        drawn = (random.standard_normal(kernel.shape, np.float32) for _ in range(DRAWS))
        chance[i] = np.mean([agreement(values @ random_kernel) for random_kernel in drawn])
    return shares, chance


def router_alone(traces: Sequence[Trace], layer: int) -> float:
    """Returns the share of experts that differ between two traces' routers, both on the second trace's features.

    It is the change of the router without the change of its features. NaN if the traces have no features of the same
    tokens.
    """
    before, after = traces
    if not (before.has_features and after.has_features):
        return float("nan")
    tokens, _, old_kernel, old_offset = features.load(before.folder, layer)
    other_tokens, values, kernel, offset = features.load(after.folder, layer)
    if not np.array_equal(tokens, other_tokens) or old_kernel.shape != kernel.shape:
        return float("nan")
    old, new = top(values @ old_kernel + old_offset, after.k)[0], top(values @ kernel + offset, after.k)[0]
    return 1 - float((old[:, :, None] == new[:, None]).any(2).mean())
