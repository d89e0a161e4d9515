"""Layers against each other, and checkpoints of one model: what a token's expert tells of its next one, and what changed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.metrics import information
from routed.trace import similarity
from routed.trace.counts import accumulate
from routed.trace.format import Trace, stripes, token_column
from routed.trace.numbers import Number, ratio, resampler
from routed.trace.tokens import Tokens, within

#: Tokens of a stripe where every layer's first choice is in memory.
STRIPE = 1 << 18
#: Cells of the tables of a pair of layers, in all groups.
CELLS = 1 << 20


class Between(NamedTuple):
    """`shares` [L, L]: information that the first experts of two layers have of each other, less its null, over the smaller entropy.

    `following` [L - 1]: that of a layer and the next in nats, with the null of first experts shuffled within their sequences. `equal`
    and `chance` [L, L]: shares of equal first choices under the best permutation of experts, and those of independent ones with the
    same loads; `alike` [L - 1] that of a layer and the next.
    """

    shares: np.ndarray
    following: list[Number]
    equal: np.ndarray
    chance: np.ndarray
    alike: list[Number]


def layers(trace: Trace, tokens: Tokens, weights: np.ndarray | None) -> Between | None:
    """Of all layers, on the tokens that have a first expert in both; None where there is one layer, or nothing says which is the first."""
    count, experts, random = len(trace.layers), trace.experts, np.random.default_rng(0)
    columns = [_ranked(trace, layer) for layer in range(count)] if count > 1 else []
    if not columns or not all(columns):
        return None
    groups = min(tokens.groups, max(8, CELLS // experts**2))  # fewer where tables are large
    weights = weights if groups == tokens.groups or weights is None else resampler(groups)
    joint = {(i, j): np.zeros((experts, experts), np.int32) for i in range(count) for j in range(i + 1, count)}
    mixed = np.zeros((count, experts, experts), np.int32)
    by_group = np.zeros((count - 1, groups, experts, experts), np.int32)
    readers = [stripes(trace, layer, *names, size=STRIPE) for layer, names in enumerate(columns)]
    begin = 0
    for found in zip(*readers, strict=True):
        first = [_first(*arrays) for arrays in found]
        has: list[Any] = [slice(None) if (one >= 0).all() else one >= 0 for one in first]  # a slice copies nothing
        whole = all(isinstance(one, slice) for one in has)
        here = slice(begin, begin := begin + len(first[0]))
        group, order = tokens.group[here].astype(np.int64) % groups, within(tokens.rows[here], random)
        for i, j in joint:
            both: Any = slice(None) if whole else (first[i] >= 0) & (first[j] >= 0)
            key = first[i][both] * experts + first[j][both]
            if j == i + 1:
                one = np.bincount(group[both] * experts**2 + key, minlength=by_group[i].size).reshape(by_group[i].shape)
                accumulate(by_group[i], one)
                accumulate(joint[i, j], one.sum(0))
                after = first[j][order][has[i], None]
                accumulate(mixed[i], information.joint(first[i][has[i]], after, experts, experts))
            else:
                accumulate(joint[i, j], np.bincount(key, minlength=experts**2).reshape(experts, experts))
    shares, equal, chance = (np.full((count, count), np.nan) for _ in range(3))
    following, alike = list[Number](), list[Number]()
    for (i, j), table in joint.items():
        equal[i, j] = equal[j, i] = similarity.matched(table)[0]
        chance[i, j] = chance[j, i] = similarity.by_chance(table)
        least = min(information.entropy(table.sum(axis)) for axis in (0, 1))
        bias = (experts - 1) ** 2 / (2 * max(int(table.sum()), 1))  # of a plug-in estimate, to first order
        shares[i, j] = shares[j, i] = max(0.0, information.mutual(table) - bias) / max(least, 1e-12)
    for i in range(count - 1):
        influence = information.pointwise(joint[i, i + 1])
        told = (by_group[i] * influence[None]).sum((1, 2), dtype=float)
        sizes, permutation = by_group[i].sum((1, 2)), similarity.matched(joint[i, i + 1])[1]
        following.append(ratio(told, sizes, weights, information.mutual(mixed[i])))
        same = by_group[i][:, np.arange(experts), permutation].sum(1)
        alike.append(ratio(same, sizes, weights, chance[i, i + 1]))
    return Between(shares, following, equal, chance, alike)


def _ranked(trace: Trace, layer: int) -> tuple[str, ...]:
    """The columns that say a token's first expert: the experts', which are in order unless -1 stands before one, else weights; or none do.

    An open choice, as ReLU gates make, has a column an expert: expert e or -1 in column e, whatever its weight.
    """
    for (expert,) in stripes(trace, layer, "expert", size=STRIPE) if trace.k > 1 else ():
        if ((expert[:, :-1] < 0) & (expert[:, 1:] >= 0)).any():
            return ("expert", "weight") if "weight" in trace.held else ()
    return ("expert",)


def _first(expert: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """The first expert [n] of each token, -1 if it has none: that of column 0, or with weights the one of the largest."""
    if weight is None:
        return expert[:, 0].astype(np.int64)
    column = np.where(expert >= 0, weight, -np.inf).argmax(1)
    return expert[np.arange(len(expert)), column].astype(np.int64)


def checkpoints(traces: Sequence[Trace], tokens: Tokens, weights: np.ndarray | None) -> list[dict]:
    """Churn between each trace and the next, by layer: 1 - |S and S'| / |S|, both summed over tokens, beside that of shuffled tokens.

    `alike` is |pi(S) and S'| / |S| under the permutation pi of experts for which it is largest, `alike_chance` that of independent choices;
    `router_alone` the churn of `similarity.router_alone`.

    Raises:
      UserError: they are not of one model on the same tokens.
    """
    first = traces[0]
    for other in traces[1:]:
        for name in ("layers", "experts", "k", "tokens"):
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise UserError(
                    f"{other.folder} has {name} {theirs}, {first.folder} has {ours}: checkpoints of one model are compared on the same tokens"
                )
        for name in ("token",) if first.has_ids and other.has_ids else ():
            if not np.array_equal(token_column(first, name), token_column(other, name)):
                raise UserError(
                    f"{other.folder} has other token ids than {first.folder}: capture both on the same text"
                )
    rows = []
    for (before, name_before), (after, name_after) in itertools.pairwise(zip(traces, _names(traces), strict=True)):
        for layer, name in enumerate(first.layers):
            changed, shuffled = np.zeros(tokens.groups), np.zeros(tokens.groups)
            sizes, begin, table = np.zeros(tokens.groups), 0, np.zeros((first.experts, first.experts), np.int64)
            for (old,), (new,) in zip(stripes(before, layer, "expert"), stripes(after, layer, "expert"), strict=True):
                group = tokens.group[begin : begin + len(old)]
                begin += len(old)
                mixed = np.random.default_rng(layer).permutation(len(new))
                there = np.bincount(group, weights=(old >= 0).sum(1), minlength=tokens.groups)
                changed += there - _kept(old, new, group, tokens.groups)
                shuffled += there - _kept(old, new[mixed], group, tokens.groups)
                sizes += there
                table += similarity.together(old, new, first.experts)
            chance = float(shuffled.sum() / max(sizes.sum(), 1))
            number = ratio(changed, sizes, weights, chance)
            # Every expert of the one meets all those of the other, up to k, so shares of the pairs are smaller than those of the experts.
            each = float(table.sum() / max(sizes.sum(), 1))
            alike = {
                "alike": each * similarity.matched(table)[0], "alike_chance": each * similarity.by_chance(table),
                "router_alone": similarity.router_alone((before, after), layer),
            }  # fmt: skip
            rows.append({"before": name_before, "after": name_after, "layer": name} | number._asdict() | alike)
    return rows


def _kept(old: np.ndarray, new: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """How many experts of the tokens of each group are chosen again."""
    kept = np.zeros(len(old), np.float32)
    for i in range(old.shape[1]):
        kept += ((old[:, i, None] == new) & (old[:, i, None] >= 0)).any(1)
    return np.bincount(group, weights=kept, minlength=groups)


def _names(traces: Sequence[Trace]) -> list[str]:
    """Steps, else folders; with their places where several have one name, as those of the encoders of several captures."""
    names = [f"step {trace.step}" if trace.step is not None else trace.folder.name for trace in traces]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]
