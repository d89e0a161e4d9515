"""The numbers of a layer from its counts: each with its interval over sequences, and what chance and a hash of the token id have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import AT_LEAST_0, AT_LEAST_1, SHARE, Column
from routed.metrics import information
from routed.metrics.load import DEAD_SHARE, DEAD_TOKENS
from routed.trace.counts import FACTORS, QUEUE, Counts, capacity

#: Draws of the bootstrap over groups of sequences, and its level.
DRAWS, LEVEL = 1000, 0.95
#: Draws of routing by chance.
CHANCES = 20
#: Groups that hold a queue, at least, for an interval of drops: resampling fewer says little of what other queues would drop.
QUEUES = 8


class Number(NamedTuple):
    """A value with its 95 % interval (NaN ends: one sequence, or few queues), and the same of routing by chance; NaN: it has none."""

    value: float
    low: float
    high: float
    chance: float


#: name -> how a number is shown; of labels and codes the part before the first dot.
COLUMNS: dict[str, Column] = {
    "load_max": Column("largest load\n(1 = balanced)", bounds=AT_LEAST_1),
    "experts_used": Column("effective experts\n(exp of the load's entropy)", bounds=AT_LEAST_1),
    "dead": Column("share of dead experts", bounds=SHARE),
    "dropped": Column("share of assignments dropped", bounds=SHARE),
    "entropy_token": Column("entropy of a token's\nprobabilities (nats)", bounds=AT_LEAST_0),
    "confidence": Column("largest probability of a token", bounds=SHARE),
    "margin": Column("probability between\nplaces k and k + 1", bounds=SHARE),
    "weight_first": Column("largest weight of a token", bounds=AT_LEAST_0),
    "weight_all": Column("sum of a token's weights", bounds=AT_LEAST_0),
    "table": Column("share of choices\nthat a table names", bounds=SHARE),
    "mi": Column("information of experts (nats)", bounds=AT_LEAST_0),
    "given": Column("information beyond the token id (nats)", bounds=AT_LEAST_0),
    "pairs": Column("dependence of a token's\nexperts (nats a pair)", bounds=AT_LEAST_0),
    "next": Column("information of the next layer's\nfirst expert (nats)", bounds=AT_LEAST_0),
    "alike": Column("equal first choices of this\nand the next layer", bounds=SHARE),
    "churn": Column("share of experts that changed", bounds=SHARE),
}


def resampler(groups: int, seed: int = 0) -> np.ndarray | None:
    """How often each draw of the bootstrap takes each group, [draws, G]; None where there is one group."""
    if groups < 2:
        return None
    return np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), DRAWS).astype(np.float32)


def ratio(above: np.ndarray, below: np.ndarray, weights: np.ndarray | None, chance: float = np.nan) -> Number:
    """sum(above) / sum(below) over groups, with the percentiles of the bootstrap over the draws that have something below."""
    value = float(above.sum() / max(below.sum(), 1e-30))
    if weights is None:
        return Number(value, np.nan, np.nan, chance)
    sizes = weights @ below
    return _interval(value, np.where(sizes == 0, np.nan, (weights @ above) / np.maximum(sizes, 1e-30)), chance)


def _interval(value: float, drawn: np.ndarray, chance: float) -> Number:
    if np.isnan(drawn).all():
        return Number(value, np.nan, np.nan, chance)
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Number(value, float(low), float(high), chance)


def numbers(counts: Counts, k: int, weights: np.ndarray | None) -> dict[str, Number]:
    """Every number that the counts can say, by name; the null of information is that of shuffled codes."""
    sums, tokens = counts.sums, int(counts.sums["tokens"].sum())
    experts = counts.load.shape[1]
    chance = by_chance(tokens, k, experts)
    found = _of_load(counts.load, tokens, weights, chance)
    enough = np.count_nonzero(sums["queued"]) >= QUEUES  # a queue is counted in the group of its first token
    for factor in FACTORS:
        name = f"dropped_{factor:g}"
        found[name] = ratio(sums[name], sums["queued"], weights if enough else None, chance[name])
    if "dropped" in sums:
        found["dropped"] = ratio(sums["dropped"], sums["chosen"], weights)
    uniform = {"entropy_token": np.log(experts), "confidence": 1 / experts, "margin": 0.0}
    for name in ("entropy_token", "confidence", "margin", "weight_first", "weight_all"):
        if name in sums:
            found[name] = ratio(sums[name], sums["tokens"], weights, uniform.get(name, np.nan))
    constant = sums["table"].sum() / sums["assignments"].sum() if "table" in sums else np.nan
    for name in counts.tables:
        found[f"table.{name}"] = ratio(sums[f"table_{name}"], sums["assignments"], weights, float(constant))
        found[f"mi.{name}"] = ratio(sums[f"mi_{name}"], sums["assignments"], weights, counts.nulls[name])
    for name, (_, null, influence, assigned) in counts.given.items():
        found[f"given.{name}"] = ratio(influence, assigned, weights, null)
    if counts.pairs is not None and counts.pairs.any():
        found["pairs"] = dependence(counts.pairs, weights)
    return found


def _of_load(
    load: np.ndarray, tokens: int, weights: np.ndarray | None, chance: Mapping[str, float]
) -> dict[str, Number]:
    """load_max, experts_used and dead, as `routed.metrics.load.load_summary` and the exp of `entropy` have them."""
    experts = load.shape[1]
    values = _measures(load.sum(0))
    drawn = _measures(weights @ load) if weights is not None else {}
    found = {
        name: _interval(float(value), drawn[name], chance[name])
        if drawn
        else Number(float(value), np.nan, np.nan, chance[name])
        for name, value in values.items()
    }
    if tokens < DEAD_TOKENS * experts:  # where an empty expert proves nothing
        del found["dead"]
    return found


def _measures(loads: np.ndarray) -> dict[str, Any]:
    """load_max, experts_used and dead of counts [..., E]."""
    shares = loads / np.maximum(loads.sum(-1, keepdims=True), 1e-30)
    logs = np.log(np.where(shares > 0, shares, 1))
    return {
        "load_max": shares.shape[-1] * shares.max(-1),
        "experts_used": np.exp(-(shares * logs).sum(-1)),
        "dead": (shares < DEAD_SHARE / shares.shape[-1]).mean(-1),
    }


def by_chance(tokens: int, k: int, experts: int, seed: int = 0) -> dict[str, float]:
    """Loads and drops of tokens that choose k experts at random: multinomial counts, means of draws."""
    random, fair = np.random.default_rng(seed), np.full(experts, 1 / experts)
    whole = random.multinomial(tokens * k, fair, CHANCES)
    found = {name: float(np.mean(drawn)) for name, drawn in _measures(whole).items()}
    size = min(QUEUE, tokens)
    queued = random.multinomial(size * k, fair, CHANCES * 10)
    for factor in FACTORS:
        over = np.maximum(queued - capacity(factor, k, size, experts), 0).sum(1)
        found[f"dropped_{factor:g}"] = float(over.mean() / (size * k))
    return found


def dependence(pairs: np.ndarray, weights: np.ndarray | None, seed: int = 0) -> Number:
    """KL of unordered pairs of a token's experts from pairs of independent ones with the same loads, in nats.

    Chance: the same of so many pairs drawn from the independent ones.
    """
    both = pairs + pairs.swapaxes(-1, -2)
    whole = both.sum(0)
    q = information.independent_pairs(np.maximum(whole.sum(0), 1e-9))
    upper = np.triu_indices(len(q), 1)
    count, expected = whole[upper], 2 * q[upper]
    total = count.sum()

    def divergence(some: np.ndarray) -> np.ndarray:
        share = some / total
        return np.where(some > 0, np.log(np.maximum(share, 1e-30) / np.maximum(expected, 1e-30)), 0.0)

    drawn = np.random.default_rng(seed).multinomial(int(total), expected / expected.sum(), 4)
    chance = float(np.mean([(divergence(one) * one).sum() / total for one in drawn]))
    influence = divergence(count)
    by_group = both[:, upper[0], upper[1]]
    return ratio(by_group @ influence, by_group.sum(1), weights, chance)


def as_rows(found: Mapping[str, Number], **place: Any) -> list[dict[str, Any]]:
    """Rows of a table: where, which number, and its parts."""
    return [place | {"number": name} | number._asdict() for name, number in found.items()]
