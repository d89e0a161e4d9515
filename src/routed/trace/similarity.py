"""How alike two routers choose where nobody says which expert of one is which of the other: equal choices under the best permutation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Num
from scipy.optimize import linear_sum_assignment

from routed.trace import features
from routed.trace.arrays import top
from routed.trace.format import Trace

#: Draws of tables by chance, and of routers, of which means are taken.
DRAWS = 4


def matched(table: Num[np.ndarray, "E E"]) -> tuple[float, Int[np.ndarray, " E"]]:
    """(share of the counts on the best permutation, that permutation): expert e of the one is expert permutation[e] of the other.

    The permutation is the one with the most counts (the Hungarian method; Kuhn 1955).
    """
    permutation = linear_sum_assignment(table, maximize=True)[1]
    return float(table[np.arange(len(table)), permutation].sum() / max(table.sum(), 1)), permutation


def by_chance(table: Num[np.ndarray, "E E"], draws: int = DRAWS, seed: int = 0) -> float:
    """The share on the best permutation of as many independent choices with the same loads, mean of draws.

    It is not 1 / E: loads are not equal, and the best of all permutations is taken of counts that vary.
    """
    total, random = table.sum(), np.random.default_rng(seed)
    fair = np.outer(table.sum(1), table.sum(0)).ravel() / max(float(total) ** 2, 1.0)
    if not total:
        return 0.0
    drawn = random.multinomial(int(total), fair / fair.sum(), draws).reshape(draws, *table.shape)
    return float(np.mean([matched(one)[0] for one in drawn]))


def together(old: Int[np.ndarray, "T k"], new: Int[np.ndarray, "T k"], experts: int) -> Int[np.ndarray, "E E"]:
    """How many tokens have expert e of the one and expert f of the other among their k; -1 is no expert."""
    table = np.zeros((experts, experts), np.int64)
    for i in range(old.shape[1]):
        for j in range(new.shape[1]):
            real = (old[:, i] >= 0) & (new[:, j] >= 0)
            key = old[real, i].astype(np.int64) * experts + new[real, j]
            table += np.bincount(key, minlength=experts**2).reshape(experts, experts)
    return table


def routers(trace: Trace, seed: int = 0) -> tuple[Float[np.ndarray, "L L"], Float[np.ndarray, " L"]]:
    """(shares [L, L] of tokens whose first choice by layer i's router, on its own features, is that of layer j's router there; chance [L]).

    Under the best permutation of experts. It asks whether two layers' routers read the same of what the one is given. Chance: routers
    with weights N(0, 1) on these features, mean of draws. Layers whose features have other widths are NaN.
    """
    held = [features.load(trace.folder, layer) for layer in range(len(trace.layers))]
    shares, chance = np.full((len(held), len(held)), np.nan), np.full(len(held), np.nan)
    random = np.random.default_rng(seed)
    for i, (_, values, kernel, offset) in enumerate(held):
        own, _ = top(values @ kernel + offset, 1)

        def alike(scores: np.ndarray, own=own) -> float:
            return matched(together(own, top(scores, 1)[0], trace.experts))[0]

        for j, (_, _, other, moved) in enumerate(held):
            if other.shape == kernel.shape:
                shares[i, j] = alike(values @ other + moved)
        chance[i] = np.mean([alike(values @ random.standard_normal(kernel.shape, np.float32)) for _ in range(DRAWS)])
    return shares, chance


def router_alone(traces: Sequence[Trace], layer: int) -> float:
    """The share of a token's k experts that the first trace's router gives otherwise than the second's on the second's features.

    What changed if only the router had: its features move in training too. NaN: the traces have no features of the same tokens.
    """
    before, after = traces
    if not (before.has_features and after.has_features):
        return float("nan")
    where, _, old, moved = features.load(before.folder, layer)
    there, values, new, offset = features.load(after.folder, layer)
    if not np.array_equal(where, there) or old.shape != new.shape:
        return float("nan")
    first, second = (top(values @ kernel + of, after.k)[0] for kernel, of in ((old, moved), (new, offset)))
    return 1 - float((first[:, :, None] == second[:, None]).any(2).mean())
