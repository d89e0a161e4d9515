"""Where on a swept key two sides change places: the kind of claim `crossing`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from routed.analysis import digits, statistics
from routed.analysis.claims import Along, Claim
from routed.analysis.sides import Rows, ends
from routed.engine.rows import shown

#: Times that seeds are drawn for the interval.
DRAWS = 2000


class Crossing(NamedTuple):
    """Where the mean difference goes from below 0 to above, with its 95 % interval over n seeds, and what the ends say.

    `p` is that of the claimed change (below 0 at the first value, above 0 at the last), `p_opposite` that of the other one;
    `changes` counts changes of sign from value to value.
    """

    place: statistics.Estimate
    p: float
    p_opposite: float
    changes: int
    first: statistics.Estimate
    last: statistics.Estimate

    @property
    def verdict(self) -> str:
        """What both 95 % intervals say; a curve that changes sign several times has no one place, whatever its ends say."""
        if self.changes != 1 or min(self.p, self.p_opposite) >= 1 - statistics.LEVEL:
            return "inconclusive"
        return "supported" if self.p < self.p_opposite else "opposite"


def crossing(claim: Claim, rows: Rows) -> dict[str, Any]:
    """The verdict on a claim that `higher` is the lower side at the first value of a key and `lower` at the last.

    Supported when both ends are significant, in the claimed directions, and the mean curve changes sign once. (The level that a claim
    asks for is that of its adjusted p value: `verdicts.judge`.)
    """
    assert claim.along is not None
    key, values = claim.along
    found = [_differences(claim, rows, {**claim.at, key: value}) for value in values]
    if not all(map(len, found)):
        return {}
    now, later = (pd.concat([one[when] for one in found], axis=1, keys=values) for when in ("now", "later"))
    good = now.notna().all(axis=1)
    if not good.any():
        return {}
    seen = locate(values, now[good].to_numpy())
    size, place = math.exp if claim.unit == "ratio" else float, seen.place
    at_ends = ", ".join(
        f"{digits.with_interval(map(size, one[:3]))} at {shown(value)}"
        for one, value in ((seen.first, values[0]), (seen.last, values[-1]))
    )
    record: dict[str, Any] = {"ours": place.mean, "interval": [place.low, place.high], "n": place.n}
    where = f"changes sign at {key} = {digits.with_interval(place[:3])}"
    record["text"] = f"{where if seen.changes else 'no change of sign'}; {claim.unit} {at_ends}"
    if place.n < 2:
        return record | {"verdict": "inconclusive", "reason": "one seed"}
    verdict = seen.verdict
    record |= {"verdict": verdict, "p": min(seen.p, seen.p_opposite)}
    if why := _voided(claim, rows, verdict):
        return record | {"verdict": "inconclusive", "p": None, "reason": why}
    if seen.changes != 1:
        return record | {
            "reason": f"the mean changes sign {seen.changes} times from {shown(values[0])} to {shown(values[-1])}"
        }
    horizon = rows.config.gate.horizon
    if horizon == 1 or verdict == "inconclusive":
        return record
    if not np.isfinite(later[good]).all(axis=None):
        return record | {
            "verdict": "inconclusive",
            "reason": "nobody knows whether the curves still move: lower eval_every",
        }
    ahead = locate(values, later[good].to_numpy())
    record["later"] = [*ahead.place[:3]]
    if ahead.verdict != verdict:
        reason = f"{verdict} now, but could turn at {horizon:g} times the steps, if the curves go on as they end"
        return record | {"verdict": "inconclusive", "reason": reason}
    return record


def locate(values: tuple[float, ...], differences: Float[np.ndarray, "n V"]) -> Crossing:
    """The crossing of the mean over seeds, differences [seeds, values]; its interval is a bootstrap that draws seeds (`statistics.percentiles`)."""
    n = len(differences)
    drawn = np.random.default_rng(0).integers(n, size=(DRAWS, n))
    places, means = np.array(values, float), differences.mean(0)
    turned = -1.0 if means[0] > 0 > means[-1] else 1.0  # the other change: where it comes below 0
    where = first_above(places, turned * means[None])[0]
    levels = statistics.percentiles(n) if n > 1 else (0.0, 1.0)
    low, high = np.quantile(first_above(places, turned * differences[drawn].mean(1)), levels)
    above: Bool[np.ndarray, " V"] = differences.mean(0) > 0
    return Crossing(
        statistics.Estimate(float(where), *((float(low), float(high)) if n > 1 else (np.nan, np.nan)), n),
        statistics.both_sides(differences[:, 0], differences[:, -1]),
        statistics.both_sides(differences[:, -1], differences[:, 0]),
        int((above[1:] != above[:-1]).sum()),
        statistics.estimate(differences[:, 0]),
        statistics.estimate(differences[:, -1]),
    )


def first_above(values: Float[np.ndarray, " V"], curves: Float[np.ndarray, "B V"]) -> Float[np.ndarray, " B"]:
    """Where each curve first comes above 0, by lines between its values.

    The first value where it is above from the start, the last where it never is: an interval that ends there may go on beyond.
    """
    above = curves > 0
    after = np.maximum(above.argmax(1), 1)
    row = np.arange(len(curves))
    low, high = curves[row, after - 1], curves[row, after]
    way = np.divide(-low, high - low, out=np.zeros(len(curves)), where=high != low)
    inside = values[after - 1] + (values[after] - values[after - 1]) * way
    return np.where(above[:, 0], values[0], np.where(above.any(1), inside, values[-1]))


def _differences(claim: Claim, rows: Rows, at: dict[str, Any]) -> pd.DataFrame:
    """higher - lower by seed at one value, now and later; in logs for ratios."""
    logs = claim.unit == "ratio"
    low, high = (
        ends(rows.history(side, at, claim.metric, side["arm"]), rows.config.gate.horizon, logs)
        for side in (claim.lower, claim.higher)
    )
    return (high - low).dropna(subset="now")


def _voided(claim: Claim, rows: Rows, verdict: str) -> str | None:
    """Why the ends carry no verdict: a control that did not control, or a loser that might win at a rate that nobody tried."""
    key, values = claim.along or Along("", ())
    for value, loser in zip((values[0], values[-1]), (claim.lower, claim.higher), strict=True):
        at = {**claim.at, key: value}
        for side in (claim.lower, claim.higher):
            if why := rows.missed(side, at):
                return why
        side = loser if verdict == "supported" else claim.higher if loser is claim.lower else claim.lower
        if verdict != "inconclusive" and (edge := rows.edge(side, at)):
            return f"{verdict}, but at {key} = {shown(value)} {edge}"
    return None
