"""How many samples a side needs to reach a level of a metric, against another side's, and how that ratio goes with a setting.

The kinds of claim `reach` and `exponent`. Needs are interpolated: the mean curve over seeds, linear between logarithms of the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from routed.analysis import digits, statistics
from routed.analysis.claims import Claim
from routed.analysis.sides import Rows

#: Times that seeds are drawn for an interval, and seeds from which on it means something: of fewer, single seeds are its ends.
DRAWS, SEEDS = 2000, 5
FEW = f"fewer than {SEEDS} seeds: draws of them tell no interval"


def reached(values: Float[np.ndarray, " V"], curves: Float[np.ndarray, "B V"], level: float) -> Float[np.ndarray, " B"]:
    """Where each curve first is at the level: the first value where it starts there, infinite where it never is."""
    above, row = curves >= level, np.arange(len(curves))
    after = np.maximum(above.argmax(1), 1)
    low, high = curves[row, after - 1], curves[row, after]
    way = np.divide(level - low, high - low, out=np.zeros(len(curves)), where=high != low)
    way = way.clip(0, 1)  # of curves that are never there, where it is not used, it may be anything
    logs = np.log(values)
    inside = np.exp(logs[after - 1] + (logs[after] - logs[after - 1]) * way)
    return np.where(above[:, 0], values[0], np.where(above.any(1), inside, np.inf))


def curves_of(claim: Claim, rows: Rows, side: Mapping[str, Any], at: Mapping[str, Any]) -> pd.DataFrame:
    """The metric of a side at the last evaluation, a row a seed and a column a value of the claim's key."""
    assert claim.along is not None
    key, values = claim.along
    found = {v: rows.history(side, {**at, key: v}, claim.metric, side["arm"]) for v in values}
    ends = {v: history.iloc[-1] if len(history) else pd.Series(dtype=float) for v, history in found.items()}
    return pd.DataFrame(ends, columns=[*values]).dropna()


def drawn(count: int) -> np.ndarray:
    """Numbers of seeds: all of them first, then with replacement, a draw a row."""
    return np.vstack([np.arange(count), np.random.default_rng(0).integers(count, size=(DRAWS, count))])


def estimate(draws: Float[np.ndarray, " B"], n: int) -> statistics.Estimate:
    """The first of the draws, with the 95 % interval of the others (`statistics.percentiles`); infinite needs stay infinite, undefined ones are left out."""
    known = draws[1:][~np.isnan(draws[1:])]
    if n < 2 or not len(known):
        return statistics.Estimate(float(draws[0]), np.nan, np.nan, n)
    least, most = statistics.percentiles(n)
    low, high = np.quantile(known, least, method="lower"), np.quantile(known, most, method="higher")
    return statistics.Estimate(float(draws[0]), float(low), float(high), n)


def needs(
    claim: Claim, rows: Rows, at: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray, int]:
    """What both sides need in each draw of their common seeds, at their points, and the number of these seeds."""
    lower, higher = (
        curves_of(claim, rows, side, point) for side, point in zip((claim.lower, claim.higher), at, strict=True)
    )
    assert claim.along is not None
    seeds, values = lower.index.intersection(higher.index), np.array(claim.along.values, float)
    if not len(seeds):
        return np.empty(0), np.empty(0), 0
    which = drawn(len(seeds))
    low, high = (reached(values, one.loc[seeds].to_numpy()[which].mean(1), claim.level) for one in (lower, higher))
    return low, high, len(seeds)


def reach(claim: Claim, rows: Rows) -> dict[str, Any]:
    """The ratio of needs, `lower` over `higher`; supported where its interval lies below 1, opposite where above.

    Of a need beyond the largest value only a bound is known, so that a ratio may be 0 or infinite; it is 1 in a draw of seeds in which
    neither side reaches the level.
    """
    low, high, n = needs(claim, rows, (claim.at, claim.at))
    if not n:
        return {}
    found = estimate(ratio_of(low, high), n)
    assert claim.along is not None
    least = min(claim.along.values)
    words = [
        f"{rows.words(side, other, side['arm'])} needs {'at most ' if one[0] <= least else ''}{_shown(estimate(one, n))}"
        for side, other, one in ((claim.lower, claim.higher, low), (claim.higher, claim.lower, high))
    ]
    text = f"{words[0]}, {words[1]}; ratio {_shown(found)}"
    record: dict[str, Any] = {"ours": found.mean, "interval": [found.low, found.high], "n": n, "text": text}
    if np.isnan(found.mean) or np.isnan(found.low):
        return record | {"verdict": "inconclusive", "reason": "neither side reaches the level" if n > 1 else "one seed"}
    if n < SEEDS:
        return record | {"verdict": "inconclusive", "reason": FEW}
    verdict = "supported" if found.high < 1 else "opposite" if found.low > 1 else "inconclusive"
    paper = claim.paper
    if isinstance(paper, float):
        inside = "inside" if found.low <= paper <= found.high else "outside"
        record["reason"] = f"the paper's {paper:g} is {inside} of the interval"
    return record | {"verdict": verdict}


def ratio_of(low: Float[np.ndarray, " B"], high: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """low / high of every draw; 1, no evidence for either, in a draw of seeds in which neither side is there."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = low / high
    ratio[1:] = np.where(np.isnan(ratio[1:]), 1.0, ratio[1:])
    return ratio


def exponent(claim: Claim, rows: Rows) -> dict[str, Any]:
    """The slope of log(need of `higher` / need of `lower`) against log of the first of `slope`'s numbers, by least squares.

    Supported where its interval lies above 0, opposite where below. A need that is not reached in a draw, or reached at the smallest
    value, of which only a bound is known, leaves its point out of that draw.
    """
    places = np.log([x for x, _, _ in claim.slope])
    found = [needs(claim, rows, ({**claim.at, **low}, {**claim.at, **high})) for _, low, high in claim.slope]
    n = min((one[2] for one in found), default=0)
    if not n:
        return {}
    assert claim.along is not None
    least = min(claim.along.values)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.stack(
            [np.where(np.minimum(low, high) > least, np.log(high / low), np.nan) for low, high, _ in found]
        )  # [points, draws]
    slopes = np.array([fitted_slope(places, one) for one in ratios.T])
    best = estimate(slopes, n)
    at = ", ".join(
        f"{np.exp(r):.3g} at {x:g}" if np.isfinite(r) else f"a bound only at {x:g}"
        for (x, _, _), r in zip(claim.slope, ratios[:, 0], strict=True)
    )
    record: dict[str, Any] = {"ours": best.mean, "interval": [best.low, best.high], "n": n}
    record["text"] = f"exponent {digits.with_interval(best[:3])}; ratios {at}"
    if np.isnan(best.mean) or np.isnan(best.low):
        return record | {
            "verdict": "inconclusive",
            "reason": "fewer than two points at which both sides reach the level, above the smallest value",
        }
    if n < SEEDS:
        return record | {"verdict": "inconclusive", "reason": FEW}
    verdict = "supported" if best.low > 0 else "opposite" if best.high < 0 else "inconclusive"
    return record | {"verdict": verdict, "reason": f"the bound's exponent is {claim.paper:g}"}


def fitted_slope(places: np.ndarray, heights: np.ndarray) -> float:
    """The least-squares slope of what is finite; NaN of fewer than two points."""
    known = np.isfinite(heights)
    return float(np.polyfit(places[known], heights[known], 1)[0]) if known.sum() > 1 else np.nan


def _shown(one: statistics.Estimate) -> str:
    words = (f"{value:.3g}" if np.isfinite(value) else "not reached" for value in one[:3])
    return "{} [{}, {}]".format(*words)
