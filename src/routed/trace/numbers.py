"""Numbers of a layer from its counts, each with its interval over sequences and its value by chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from routed.metrics.load import DEAD_SHARE, DEAD_TOKENS
from routed.trace import information
from routed.trace.counts import BATCH, FACTORS, Counts, capacity

#: Draws of the bootstrap over groups of sequences, and its level.
DRAWS, LEVEL = 1000, 0.95
#: Draws of routing by chance.
CHANCE_DRAWS = 20
#: Least number of groups with a batch for an interval of drops: resampling fewer says little about other batches.
BATCH_GROUPS = 8


class Number(NamedTuple):
    """A value with its 95 % interval and its value by chance.

    The ends of the interval are NaN with one sequence or few batches, chance where a number has none.
    """

    value: float
    low: float
    high: float
    chance: float


#: A number that a layer lacks.
NONE = Number(np.nan, np.nan, np.nan, np.nan)
#: Name -> label of a number; for labels and codes the part of the name before the first dot.
NUMBERS = {
    "load_max": "largest load (1 = balanced)",
    "experts_used": "effective experts (exp of the load's entropy)",
    "dead": "share of dead experts",
    "dropped": "share of assignments dropped",
    "dropped_1.25": "share of assignments dropped at capacity 1.25",
    "entropy_token": "entropy of a token's probabilities (nats)",
    "confidence": "largest probability of a token",
    "margin": "probability between ranks k and k + 1",
    "weight_first": "largest weight of a token",
    "weight_all": "sum of a token's weights",
    "table": "share of choices that a table names",
    "mi": "information of experts (nats)",
    "given": "information beyond the token id (nats)",
    "pairs": "dependence of a token's experts (nats a pair)",
    "next": "information of the next layer's first expert (nats)",
    "alike": "equal first choices of this and the next layer",
    "churn": "share of experts that changed",
}


def bootstrap_weights(groups: int, seed: int = 0) -> np.ndarray | None:
    """Returns how often each draw of the bootstrap takes each group [draws, G]; None with fewer than two groups."""
    if groups < 2:
        return None
    return np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), DRAWS).astype(np.float32)


def ratio(above: np.ndarray, below: np.ndarray, weights: np.ndarray | None, chance: float = np.nan) -> Number:
    """Returns sum(above) / sum(below) over groups, with percentiles over bootstrap draws whose sum below is not 0."""
    value = float(above.sum() / max(below.sum(), 1e-30))
    if weights is None:
        return Number(value, np.nan, np.nan, chance)
    sizes = weights @ below
    return _interval(value, np.where(sizes == 0, np.nan, (weights @ above) / np.maximum(sizes, 1e-30)), chance)


def _interval(value: float, draws: np.ndarray, chance: float) -> Number:
    if np.isnan(draws).all():
        return Number(value, np.nan, np.nan, chance)
    low, high = np.nanquantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Number(value, float(low), float(high), chance)


def numbers(counts: Counts, weights: np.ndarray | None) -> dict[str, Number]:
    """Returns all numbers that the counts allow, by name."""
    sums, tokens, experts = counts.sums, int(counts.sums["tokens"].sum()), counts.load.shape[1]
    chance = by_chance(tokens, int(counts.load.sum()), experts)
    results = _of_load(counts.load, weights, chance)
    if tokens < DEAD_TOKENS * experts:  # where an expert without tokens proves nothing
        del results["dead"]
    enough = np.count_nonzero(sums["queued"]) >= BATCH_GROUPS  # a batch is counted in the group of its first token
    for factor in FACTORS:
        name = f"dropped_{factor:g}"
        results[name] = ratio(sums[name], sums["queued"], weights if enough else None, chance[name])
    if "dropped" in sums:
        results["dropped"] = ratio(sums["dropped"], sums["chosen"], weights)
    uniform = {"entropy_token": np.log(experts), "confidence": 1 / experts, "margin": 0.0}
    for name in ("entropy_token", "confidence", "margin", "weight_first", "weight_all"):
        if name in sums:
            results[name] = ratio(sums[name], sums["tokens"], weights, uniform.get(name, np.nan))
    for name in counts.tables:
        most_loaded = float(sums["table"].sum() / max(sums["assignments"].sum(), 1))
        results[f"table.{name}"] = ratio(sums[f"table_{name}"], sums["assignments"], weights, most_loaded)
        results[f"mi.{name}"] = ratio(sums[f"mi_{name}"], sums["assignments"], weights, counts.chance[name])
    for name, within_ids in counts.conditional.items():
        results[f"given.{name}"] = ratio(within_ids.terms, within_ids.assignments, weights, within_ids.chance)
    if counts.pairs is not None:
        results["pairs"] = dependence(counts.pairs, weights)
    return results


def _of_load(load: np.ndarray, weights: np.ndarray | None, chance: Mapping[str, float]) -> dict[str, Number]:
    """Returns load_max and dead, as in `routed.metrics.load.load_summary`, and experts_used, the exp of `entropy`."""
    values = _load_numbers(load.sum(0))
    if weights is None:
        return {name: Number(float(value), np.nan, np.nan, chance[name]) for name, value in values.items()}
    draws = _load_numbers(weights @ load)
    return {name: _interval(float(value), draws[name], chance[name]) for name, value in values.items()}


def _load_numbers(loads: np.ndarray) -> dict[str, Any]:
    """Returns load_max, experts_used and dead of counts [..., E]."""
    shares = loads / np.maximum(loads.sum(-1, keepdims=True), 1e-30)
    logs = np.log(np.where(shares > 0, shares, 1))
    return {
        "load_max": shares.shape[-1] * shares.max(-1),
        "experts_used": np.exp(-(shares * logs).sum(-1)),
        "dead": (shares < DEAD_SHARE / shares.shape[-1]).mean(-1),
    }


def by_chance(tokens: int, assignments: int, experts: int) -> dict[str, float]:
    """Returns loads and drops of as many random choices of tokens: multinomial counts, means of draws."""
    random, fair = np.random.default_rng(0), np.full(experts, 1 / experts)
    loads = random.multinomial(assignments, fair, CHANCE_DRAWS)
    means = {name: float(np.mean(draws)) for name, draws in _load_numbers(loads).items()}
    size = min(BATCH, tokens)
    queued = round(size * assignments / tokens)
    queues = random.multinomial(queued, fair, CHANCE_DRAWS * 10)
    for factor in FACTORS:
        over = np.maximum(queues - capacity(factor, queued, size, experts), 0).sum(1)
        means[f"dropped_{factor:g}"] = float(over.mean() / max(queued, 1))
    return means


def dependence(pairs: np.ndarray, weights: np.ndarray | None) -> Number:
    """Returns the KL divergence, in nats, of a token's pairs of experts from independent pairs with the same loads.

    Chance is the same for as many pairs drawn from the independent ones. All are 0 where no token has two experts.
    """
    if not pairs.any():
        end = 0.0 if weights is not None else np.nan
        return Number(0.0, end, end, 0.0)
    symmetric = pairs + pairs.swapaxes(-1, -2)
    total_pairs = symmetric.sum(0)
    independent = information.independent_pairs(np.maximum(total_pairs.sum(0), 1e-9))
    upper = np.triu_indices(len(independent), 1)
    count, expected = total_pairs[upper], 2 * independent[upper]
    total = count.sum()

    def terms(counts: np.ndarray) -> np.ndarray:
        share = counts / total
        return np.where(counts > 0, np.log(np.maximum(share, 1e-30) / np.maximum(expected, 1e-30)), 0.0)

    draws = np.random.default_rng(0).multinomial(int(total), expected / expected.sum(), 4)
    chance = float(np.mean([(terms(counts) * counts).sum() / total for counts in draws]))
    by_group = symmetric[:, upper[0], upper[1]]
    return ratio(by_group @ terms(count), by_group.sum(1), weights, chance)


def as_rows(numbers: Mapping[str, Number], layer: str) -> list[dict[str, Any]]:
    """Returns a table row for each number of a layer."""
    return [{"layer": layer, "number": name} | number._asdict() for name, number in numbers.items()]
