"""Pairs of layers: information and agreement between a token's first experts in two layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from routed.metrics import information
from routed.trace import similarity
from routed.trace.counts import accumulate
from routed.trace.format import Trace, stripes, with_slices
from routed.trace.numbers import Number, bootstrap_weights, ratio
from routed.trace.tokens import Tokens, shuffle_within

#: Tokens of a stripe where every layer's first expert is in memory.
STRIPE = 1 << 18
#: Cells of the tables of a pair of layers, in all groups.
CELLS = 1 << 20


class Between(NamedTuple):
    """`shares` [L, L]: information between first experts of two layers, bias removed, over the smaller entropy.

    `following` [L - 1]: information between a layer and the next in nats; chance is of first experts shuffled within
    their sequences. `equal` and `chance` [L, L]: shares of equal first choices under the best permutation of experts,
    and of independent choices with the same loads. `alike` [L - 1]: `equal` of a layer and the next.
    """

    shares: np.ndarray
    following: list[Number]
    equal: np.ndarray
    chance: np.ndarray
    alike: list[Number]


class _Tables(NamedTuple):
    """Counts of (first expert, first expert of the other layer), on tokens that have both.

    `joint` is by pair of layers; `by_group` [L - 1, G, E, E] and `shuffled` [L - 1, E, E] are of each layer and the
    next.
    """

    joint: dict[tuple[int, int], np.ndarray]
    by_group: np.ndarray
    shuffled: np.ndarray


def compare_layers(trace: Trace, tokens: Tokens, weights: np.ndarray | None) -> Between | None:
    """Returns comparisons of all layers; None with one layer, or if the trace does not say which expert is first."""
    layers, experts = len(trace.layers), trace.experts
    columns = [_ranking_columns(trace, layer) for layer in range(layers)] if layers > 1 else []
    if not columns or not all(columns):
        return None
    groups = min(tokens.groups, max(8, CELLS // experts**2))  # fewer where tables are large
    if weights is not None and groups < tokens.groups:
        weights = bootstrap_weights(groups)
    tables = _count(trace, tokens, columns, groups)
    shares, equal, chance = (np.full((layers, layers), np.nan) for _ in range(3))
    following, alike = list[Number](), list[Number]()
    for (i, j), table in tables.joint.items():
        equal[i, j] = equal[j, i] = similarity.matched(table)[0]
        chance[i, j] = chance[j, i] = similarity.by_chance(table)
        least = min(information.entropy(table.sum(axis)) for axis in (0, 1))
        bias = (experts - 1) ** 2 / (2 * max(int(table.sum()), 1))  # of a plug-in estimate, to first order
        shares[i, j] = shares[j, i] = max(0.0, information.mutual(table) - bias) / max(least, 1e-12)
    for i, by_group in enumerate(tables.by_group):
        table, sizes = tables.joint[i, i + 1], by_group.sum((1, 2))
        terms = (by_group * information.pointwise(table)[None]).sum((1, 2), dtype=float)
        following.append(ratio(terms, sizes, weights, information.mutual(tables.shuffled[i])))
        matched = by_group[:, np.arange(experts), similarity.matched(table)[1]].sum(1)
        alike.append(ratio(matched, sizes, weights, chance[i, i + 1]))
    return Between(shares, following, equal, chance, alike)


def _count(trace: Trace, tokens: Tokens, columns: list[tuple[str, ...]], groups: int) -> _Tables:
    layers, experts, random = len(trace.layers), trace.experts, np.random.default_rng(0)
    joint = {(i, j): np.zeros((experts, experts), np.int32) for i in range(layers) for j in range(i + 1, layers)}
    shuffled = np.zeros((layers - 1, experts, experts), np.int32)
    by_group = np.zeros((layers - 1, groups, experts, experts), np.int32)
    readers = [stripes(trace, layer, *names, size=STRIPE) for layer, names in enumerate(columns)]
    firsts = (tuple(_first(*arrays) for arrays in by_layer) for by_layer in zip(*readers, strict=True))
    for here, first in with_slices(firsts):
        # A slice instead of a mask where all tokens have a first expert: it copies nothing.
        has: list[Any] = [slice(None) if (expert >= 0).all() else expert >= 0 for expert in first]
        complete = all(isinstance(mask, slice) for mask in has)
        group, order = tokens.group[here].astype(np.int64) % groups, shuffle_within(tokens.sequence[here], random)
        for i, j in joint:
            both: Any = slice(None) if complete else (first[i] >= 0) & (first[j] >= 0)
            key = first[i][both] * experts + first[j][both]
            if j == i + 1:
                keys = group[both] * experts**2 + key
                counts = np.bincount(keys, minlength=by_group[i].size).reshape(by_group[i].shape)
                accumulate(by_group[i], counts)
                accumulate(joint[i, j], counts.sum(0))
                after = first[j][order][has[i], None]
                accumulate(shuffled[i], information.joint(first[i][has[i]], after, experts, experts))
            else:
                accumulate(joint[i, j], np.bincount(key, minlength=experts**2).reshape(experts, experts))
    return _Tables(joint, by_group, shuffled)


def _ranking_columns(trace: Trace, layer: int) -> tuple[str, ...]:
    """Returns the columns that rank a token's experts; none if nothing ranks them.

    Experts are stored in order, so their column ranks them, unless -1 stands before an expert, as in choices of ReLU
    gates, where column e holds expert e or -1. Then weights rank the experts.
    """
    for (expert,) in stripes(trace, layer, "expert", size=STRIPE) if trace.k > 1 else ():
        if ((expert[:, :-1] < 0) & (expert[:, 1:] >= 0)).any():
            return ("expert", "weight") if "weight" in trace.columns else ()
    return ("expert",)


def _first(expert: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """Returns the first expert [n] of each token, -1 if it has none: of column 0, or of the largest weight."""
    if weight is None:
        return expert[:, 0].astype(np.int64)
    column = np.where(expert >= 0, weight, -np.inf).argmax(1)
    return expert[np.arange(len(expert)), column].astype(np.int64)
