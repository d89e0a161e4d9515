"""Churn between checkpoints of one model: the share of a token's experts that changed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from routed.contracts import UserError
from routed.trace import similarity
from routed.trace.counts import Sums
from routed.trace.format import Trace, stripes, token_column, with_slices
from routed.trace.numbers import ratio
from routed.trace.tokens import Tokens


def churn(traces: Sequence[Trace], tokens: Tokens, weights: np.ndarray | None) -> list[dict[str, Any]]:
    """Returns a row for each layer and each trace but the last: 1 - |S and S'| / |S|, with S' of the next trace.

    Both counts are summed over tokens; chance is of shuffled tokens. `alike` is |pi(S) and S'| / |S| under the
    permutation pi of experts for which it is largest, `alike_chance` that of independent choices, `router_alone` is
    `similarity.router_alone`.

    Raises:
      UserError: the traces are not of one model on the same tokens.
    """
    for trace in traces[1:]:
        _check_same(traces[0], trace)
    rows = []
    for (before, name), (after, next_name) in itertools.pairwise(zip(traces, _names(traces), strict=True)):
        for layer, layer_name in enumerate(traces[0].layers):
            row = {"before": name, "after": next_name, "layer": layer_name}
            rows.append(row | _between(before, after, layer, tokens, weights))
    return rows


def _check_same(first: Trace, trace: Trace) -> None:
    for name in ("layers", "experts", "k", "tokens"):
        expected, actual = getattr(first, name), getattr(trace, name)
        if expected != actual:
            difference = f"{trace.folder} has {name} {actual}, {first.folder} has {expected}"
            raise UserError(f"{difference}: checkpoints of one model are compared on the same tokens")
    both_have_ids = first.has_ids and trace.has_ids
    if both_have_ids and not np.array_equal(token_column(first, "token"), token_column(trace, "token")):
        raise UserError(f"{trace.folder} has other token ids than {first.folder}: capture both on the same text")


def _between(before: Trace, after: Trace, layer: int, tokens: Tokens, weights: np.ndarray | None) -> dict[str, Any]:
    sums, table = Sums(tokens.groups), np.zeros((before.experts, before.experts), np.int64)
    both = zip(stripes(before, layer, "expert"), stripes(after, layer, "expert"), strict=True)
    for here, (old, new) in with_slices((old, new) for (old,), (new,) in both):
        group, assigned = tokens.group[here], (old >= 0).sum(1)
        shuffled = new[np.random.default_rng(layer).permutation(len(new))]
        sums.add("assigned", group, assigned)
        sums.add("changed", group, assigned - _common(old, new))
        sums.add("changed_by_chance", group, assigned - _common(old, shuffled))
        table += similarity.together(old, new, before.experts)
    total = max(sums["assigned"].sum(), 1)
    number = ratio(sums["changed"], sums["assigned"], weights, float(sums["changed_by_chance"].sum() / total))
    # The table has up to k pairs for each expert, so shares of pairs are smaller than shares of experts.
    pairs_per_expert = float(table.sum() / total)
    return number._asdict() | {
        "alike": pairs_per_expert * similarity.matched(table)[0],
        "alike_chance": pairs_per_expert * similarity.by_chance(table),
        "router_alone": similarity.router_alone((before, after), layer),
    }


def _common(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns the number of experts of each token that are chosen again."""
    common = np.zeros(len(old), np.int64)
    for i in range(old.shape[1]):
        common += ((old[:, i, None] == new) & (old[:, i, None] >= 0)).any(1)
    return common


def _names(traces: Sequence[Trace]) -> list[str]:
    """Returns the steps, or else the folders, of traces, numbered where several have one name."""
    names = [f"step {trace.step}" if trace.step is not None else trace.folder.name for trace in traces]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]
