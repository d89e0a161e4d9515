"""Comparisons of routers: of layers, and of checkpoints of one model.

Experts of two routers have no common numbers: equal choices are also counted after the best renumbering.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num
from scipy.optimize import linear_sum_assignment

from routed.contracts import UserError
from routed.trace import features, information
from routed.trace.arrays import top
from routed.trace.counts import Sums, accumulate, mean_k
from routed.trace.format import Trace, stripes, token_column, with_slices
from routed.trace.numbers import Number, bootstrap_weights, ratio
from routed.trace.tokens import Tokens, shuffle_within

#: Draws of tables by chance, and of random routers, whose means are taken.
DRAWS = 4
#: Tokens of a stripe where every layer's first expert is in memory.
STRIPE = 1 << 17
#: Tokens whose experts do not all ascend by chance.
MANY_TOKENS = 100
#: Cells of the tables of a pair of layers, in all groups.
CELLS = 1 << 20


def matched(table: Num[np.ndarray, "E E"]) -> tuple[float, Int[np.ndarray, " E"]]:
    """Returns (share of the counts on the best permutation, permutation): expert e matches expert permutation[e].

    The best permutation has the largest sum of counts (the Hungarian method; Kuhn 1955).
    """
    permutation = linear_sum_assignment(table, maximize=True)[1]
    return float(table[np.arange(len(table)), permutation].sum() / max(table.sum(), 1)), permutation


def by_chance(table: Num[np.ndarray, "E E"], draws: int = DRAWS) -> float:
    """Returns the share on the best permutation for independent choices with the same loads, as a mean of draws.

    It is larger than 1 / E: loads are not equal, and the permutation is chosen after the draw.
    """
    total, random = table.sum(), np.random.default_rng(0)
    independent = np.outer(table.sum(1), table.sum(0)).ravel() / max(float(total) ** 2, 1.0)
    if not total:
        return 0.0
    tables = random.multinomial(int(total), independent / independent.sum(), draws).reshape(draws, *table.shape)
    return float(np.mean([matched(table)[0] for table in tables]))


def together(old: Int[np.ndarray, "T k"], new: Int[np.ndarray, "T k"], experts: int) -> Int[np.ndarray, "E E"]:
    """Returns the number of tokens with expert e among their old experts and f among their new; -1 is no expert."""
    pairs = [(column[column >= 0], new[column >= 0]) for column in old.T]
    return np.sum([information.joint(expert, chosen, experts, experts) for expert, chosen in pairs], axis=0)


def routers(trace: Trace, seed: int = 0) -> tuple[Float[np.ndarray, "L L"], Float[np.ndarray, " L"]]:
    """Returns (shares [L, L], chance [L]): agreement of the routers of layers i and j on the features of layer i.

    A share is of tokens with equal first choices under the best permutation of experts. Chance is of routers with
    weights N(0, 1) on these features, as a mean of draws. Layers whose features have different widths are NaN.
    """
    layers = [features.load(trace.folder, layer) for layer in range(len(trace.layers))]
    shares, chance = np.full((len(layers), len(layers)), np.nan), np.full(len(layers), np.nan)
    random = np.random.default_rng(seed)
    for i, (_, values, kernel, offset) in enumerate(layers):
        trained = top(values @ kernel + offset, 1)

        def agreement(scores: np.ndarray, trained=trained) -> float:
            return matched(together(trained, top(scores, 1), trace.experts))[0]

        for j, (_, _, other_kernel, other_offset) in enumerate(layers):
            if other_kernel.shape == kernel.shape:
                shares[i, j] = agreement(values @ other_kernel + other_offset)
        drawn = (random.standard_normal(kernel.shape, np.float32) for _ in range(DRAWS))
        chance[i] = np.mean([agreement(values @ random_kernel) for random_kernel in drawn])
    return shares, chance


def router_alone(traces: Sequence[Trace], layer: int, k: int) -> float:
    """Returns the share of experts that differ between two traces' routers, both on the second trace's features.

    Routers take `k` experts. It is the change of the router without the change of its features. NaN if the traces have
    no features of the same tokens.
    """
    before, after = traces
    if not (before.has_features and after.has_features):
        return float("nan")
    tokens, _, old_kernel, old_offset = features.load(before.folder, layer)
    other_tokens, values, kernel, offset = features.load(after.folder, layer)
    if not np.array_equal(tokens, other_tokens) or old_kernel.shape != kernel.shape:
        return float("nan")
    old, new = top(values @ old_kernel + old_offset, k), top(values @ kernel + offset, k)
    return 1 - float(common(old, new).sum() / old.size)


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


def compare_layers(trace: Trace, tokens: Tokens, weights: np.ndarray | None) -> Between | None:
    """Returns comparisons of all layers; None with one layer, or if the trace does not say which expert is first."""
    layers, experts = len(trace.layers), trace.experts
    columns = [_ranking_columns(trace, layer) for layer in range(layers)] if layers > 1 else []
    if not columns or not all(columns):
        return None
    groups = min(tokens.groups, max(8, CELLS // experts**2))  # fewer where tables are large
    if weights is not None and groups < tokens.groups:
        weights = bootstrap_weights(groups)
    joint, next_by_group, shuffled = _first_experts(trace, tokens, columns, groups)
    shares, equal, chance = (np.full((layers, layers), np.nan) for _ in range(3))
    following, alike = list[Number](), list[Number]()
    for (i, j), table in joint.items():
        equal[i, j] = equal[j, i] = matched(table)[0]
        chance[i, j] = chance[j, i] = by_chance(table)
        least = min(information.entropy(table.sum(axis)) for axis in (0, 1))
        bias = (experts - 1) ** 2 / (2 * max(int(table.sum()), 1))  # of a plug-in estimate, to first order
        shares[i, j] = shares[j, i] = max(0.0, information.mutual(table) - bias) / max(least, 1e-12)
    for i, by_group in enumerate(next_by_group):
        table, sizes = joint[i, i + 1], by_group.sum((1, 2))
        terms = (by_group * information.pointwise(table)[None]).sum((1, 2), dtype=float)
        following.append(ratio(terms, sizes, weights, information.mutual(shuffled[i])))
        on_permutation = by_group[:, np.arange(experts), matched(table)[1]].sum(1)
        alike.append(ratio(on_permutation, sizes, weights, chance[i, i + 1]))
    return Between(shares, following, equal, chance, alike)


def _first_experts(
    trace: Trace, tokens: Tokens, columns: list[tuple[str, ...]], groups: int
) -> tuple[dict[tuple[int, int], np.ndarray], np.ndarray, np.ndarray]:
    """Returns counts of (first expert, that of another layer) on tokens that have both: tables of all pairs of layers,
    and of each layer and the next by group [L - 1, G, E, E], and with shuffled tokens [L - 1, E, E].
    """
    layers, experts, random = len(trace.layers), trace.experts, np.random.default_rng(0)
    joint = {(i, j): np.zeros((experts, experts), np.int32) for i in range(layers) for j in range(i + 1, layers)}
    shuffled = np.zeros((layers - 1, experts, experts), np.int32)
    by_group = np.zeros((layers - 1, groups, experts, experts), np.int32)
    readers = [
        stripes(trace, layer, *names, size=STRIPE, most=1 if len(names) == 1 else None)
        for layer, names in enumerate(columns)
    ]
    firsts = (tuple(_first(*arrays) for arrays in by_layer) for by_layer in zip(*readers, strict=True))
    for here, first in with_slices(firsts):
        group, order = tokens.group[here].astype(np.int64) % groups, shuffle_within(tokens.sequence[here], random)
        # A token without a first expert gets a row of its own, which no table keeps.
        row = [np.where(expert < 0, experts, expert) for expert in first]
        for i, j in joint:
            second = first[j][:, None]
            if j > i + 1:
                accumulate(joint[i, j], information.joint(row[i], second, experts + 1, experts)[:-1])
                continue
            rows_by_group = information.joint(group * (experts + 1) + row[i], second, groups * (experts + 1), experts)
            counts = rows_by_group.reshape(groups, experts + 1, experts)[:, :-1]
            accumulate(by_group[i], counts)
            accumulate(joint[i, j], counts.sum(0))
            accumulate(shuffled[i], information.joint(row[i], second[order], experts + 1, experts)[:-1])
    return joint, by_group, shuffled


def _ranking_columns(trace: Trace, layer: int) -> tuple[str, ...]:
    """Returns the columns that rank a token's experts; none if nothing ranks them.

    Experts are stored in order, so their column ranks them, with two exceptions. -1 stands before an expert, as in
    choices of ReLU gates, where column e holds expert e or -1. Or the experts of all of many tokens ascend, as
    Megatron writes them. Then weights rank the experts.
    """
    unordered, ascending = False, trace.k > 1 and trace.tokens >= MANY_TOKENS
    for (expert,) in stripes(trace, layer, "expert", size=STRIPE) if trace.k > 1 else ():
        unordered = unordered or bool(((expert[:, :-1] < 0) & (expert[:, 1:] >= 0)).any())
        ascending = ascending and bool((expert[:, :-1] < expert[:, 1:]).all())
        if unordered:
            break
    if unordered or ascending:
        return ("expert", "weight") if "weight" in trace.columns else ()
    return ("expert",)


def _first(expert: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """Returns the first expert [n] of each token, -1 if it has none: of column 0, or of the largest weight."""
    if weight is None:
        return expert[:, 0].astype(np.int64)
    column = np.where(expert >= 0, weight, -np.inf).argmax(1)
    return expert[np.arange(len(expert)), column].astype(np.int64)


def churn(traces: Sequence[Trace], tokens: Tokens, weights: np.ndarray | None) -> list[dict[str, Any]]:
    """Returns a row for each layer and each trace but the last: 1 - |S and S'| / |S|, with S' of the next trace.

    Both counts are summed over tokens; chance is of shuffled tokens. `alike` is |pi(S) and S'| / |S| under the
    permutation pi of experts for which it is largest, `alike_chance` that of independent choices, `router_alone` is
    `router_alone`.

    Raises:
      UserError: the traces are not of one model on the same tokens.
    """
    first = traces[0]
    for trace in traces[1:]:
        for field in ("layers", "experts", "k", "tokens"):
            expected, actual = getattr(first, field), getattr(trace, field)
            if expected != actual:
                difference = f"{trace.folder} has {field} {actual}, {first.folder} has {expected}"
                raise UserError(f"{difference}: checkpoints of one model are compared on the same tokens")
        both_have_ids = first.has_ids and trace.has_ids
        if both_have_ids and not np.array_equal(token_column(first, "token"), token_column(trace, "token")):
            raise UserError(f"{trace.folder} has other token ids than {first.folder}: capture both on the same text")
    names = [f"step {trace.step}" if trace.step is not None else trace.folder.name for trace in traces]
    numbered = [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]
    return [
        {"before": name, "after": next_name, "layer": layer_name} | _between(before, after, layer, tokens, weights)
        for (before, name), (after, next_name) in itertools.pairwise(zip(traces, numbered, strict=True))
        for layer, layer_name in enumerate(first.layers)
    ]


def _between(before: Trace, after: Trace, layer: int, tokens: Tokens, weights: np.ndarray | None) -> dict[str, Any]:
    sums, table = Sums(tokens.groups), np.zeros((before.experts, before.experts), np.int64)
    both = zip(stripes(before, layer, "expert"), stripes(after, layer, "expert"), strict=True)
    for here, (old, new) in with_slices((old, new) for (old,), (new,) in both):
        group, assigned = tokens.group[here], (old >= 0).sum(1)
        shuffled = new[np.random.default_rng(layer).permutation(len(new))]
        sums.add("assigned", group, assigned)
        sums.add("changed", group, assigned - common(old, new))
        sums.add("changed_by_chance", group, assigned - common(old, shuffled))
        table += together(old, new, before.experts)
    total = max(sums["assigned"].sum(), 1)
    number = ratio(sums["changed"], sums["assigned"], weights, float(sums["changed_by_chance"].sum() / total))
    # The table has up to k pairs for each expert, so shares of pairs are smaller than shares of experts.
    pairs_per_expert = float(table.sum() / total)
    return number._asdict() | {
        "alike": pairs_per_expert * matched(table)[0],
        "alike_chance": pairs_per_expert * by_chance(table),
        "router_alone": router_alone((before, after), layer, mean_k(sums["assigned"], after.tokens)),
    }


def common(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns the number of experts of each token that are chosen again."""
    again = np.zeros(len(old), np.int64)
    for expert in old.T[:, :, None]:
        again += ((expert == new) & (expert >= 0)).any(1)
    return again
