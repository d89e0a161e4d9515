"""Two kinds of claims: `crossing`, sides change places along a key; `share`, what an arm recovers of the best gain."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from routed.analysis import digits, statistics
from routed.analysis.claims import Along, Point, Side, Stakes, TwoSides
from routed.analysis.claims.preconditions import common_seeds
from routed.analysis.claims.rules import ONE_SEED, displayed, inconclusive
from routed.analysis.paired_values import Rows, ends
from routed.engine.rows import format_value
from routed.papers.draws import resampled

UNKNOWN_TAIL = "nobody knows whether the curves still move: lower eval_every"


class SignChange(NamedTuple):
    """The change of sign of a mean difference along a key."""

    location: statistics.Estimate  # value of the key at which the mean goes through 0
    p: float  # of the claimed change, from below 0 at the first value to above 0 at the last
    p_opposite: float
    changes: int  # of sign from value to value
    first: statistics.Estimate  # difference at the first value
    last: statistics.Estimate  # difference at the last value

    @property
    def verdict(self) -> str:
        """Verdict of the intervals at both ends; a curve that changes sign several times has none."""
        if self.changes != 1 or min(self.p, self.p_opposite) >= 1 - statistics.LEVEL:
            return "inconclusive"
        return "supported" if self.p < self.p_opposite else "opposite"


@dataclasses.dataclass(frozen=True)
class Crossing(TwoSides):
    """`higher` is below `lower` at the first value of the key of `along`, and `lower` below `higher` at the last."""

    kind = "crossing"

    along: Along

    def reads(self) -> list[tuple[Side, Point]]:
        """Returns both sides at every value of the key."""
        return [(side, point) for side in self.sides() for point in self.along.points(self.setup.at)]

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the location: supported if both ends are significant as claimed and the mean changes sign once."""
        values = self.along.values
        differences = [self._differences(rows, point) for point in self.along.points(self.setup.at)]
        if not all(map(len, differences)):
            return {}
        now, later = (pd.concat([each[when] for each in differences], axis=1, keys=values) for when in ("now", "later"))
        good = now.notna().all(axis=1)
        if not good.any():
            return {}
        change = locate(values, now[good].to_numpy())
        location = change.location
        record: dict[str, Any] = {"ours": location.mean, "interval": [location.low, location.high], "n": location.n}
        record["text"] = self._text(change)
        if location.n < 2:
            return inconclusive(record, ONE_SEED)
        record |= {"verdict": change.verdict, "p": min(change.p, change.p_opposite)}
        record["alike"] = any(each.low == each.high for each in (change.first, change.last))
        if change.changes != 1:
            ends_of_key = f"from {format_value(values[0])} to {format_value(values[-1])}"
            return record | {"reason": f"the mean changes sign {change.changes} times {ends_of_key}"}
        horizon = rows.config.gate.horizon
        if horizon == 1 or change.verdict == "inconclusive":
            return record
        if not np.isfinite(later[good]).all(axis=None):
            return inconclusive(record, UNKNOWN_TAIL)
        ahead = locate(values, later[good].to_numpy())
        record["later"] = [*ahead.location[:3]]
        if ahead.verdict != change.verdict:
            if_extrapolated = f"could turn at {horizon:g} times the steps, if the curves go on as they end"
            return inconclusive(record, f"{change.verdict} now, but {if_extrapolated}")
        return record

    def _text(self, change: SignChange) -> str:
        """Returns the location and the differences at both ends as text."""
        values, size = self.along.values, displayed(self.setup.unit)
        at_ends = ", ".join(
            f"{digits.with_interval(map(size, difference[:3]))} at {format_value(value)}"
            for difference, value in ((change.first, values[0]), (change.last, values[-1]))
        )
        location = f"changes sign at {self.along.key} = {digits.with_interval(change.location[:3])}"
        return f"{location if change.changes else 'no change of sign'}; {self.setup.unit} {at_ends}"

    def _differences(self, rows: Rows, at: Point) -> pd.DataFrame:
        """Returns higher - lower by seed at one value, now and later; in logarithms for ratios."""
        logs = self.setup.unit == "ratio"
        low, high = (
            ends(rows.history(side, at, self.setup.metric), rows.config.gate.horizon, logs) for side in self.sides()
        )
        return (high - low).dropna(subset="now")

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns who did better at each end as winners, and both sides between, where lost runs may turn signs."""
        first, *between, last = self.along.points(self.setup.at)
        rising, falling = self.sides() if verdict == "supported" else self.sides()[::-1]
        winners = (falling, first), (rising, last)
        inner = [(side, point) for side in self.sides() for point in between]
        return Stakes((*winners, *inner), ((rising, first), (falling, last)), tuple((each,) for each in winners))


def locate(values: tuple[float, ...], differences: Float[np.ndarray, "n V"]) -> SignChange:
    """Returns the change of sign of the mean over seeds of differences [seeds, values].

    The interval of its location is a bootstrap that draws seeds (`statistics.percentiles`).
    """
    n = len(differences)
    at, means = np.array(values, float), differences.mean(0)
    sign = -1.0 if means[0] > 0 > means[-1] else 1.0  # of the opposite change: where the mean comes below 0
    location = first_above(at, sign * means[None])[0]
    levels = statistics.percentiles(n) if n > 1 else (0.0, 1.0)
    low, high = np.quantile(first_above(at, sign * differences[resampled(n)].mean(1)), levels)
    above: Bool[np.ndarray, " V"] = means > 0
    first, last = differences[:, 0], differences[:, -1]
    return SignChange(
        statistics.Estimate(float(location), *((float(low), float(high)) if n > 1 else (np.nan, np.nan)), n),
        statistics.intersection_union_p(first, last),
        statistics.intersection_union_p(last, first),
        int((above[1:] != above[:-1]).sum()),
        statistics.estimate(first),
        statistics.estimate(last),
    )


def first_above(values: Float[np.ndarray, " V"], curves: Float[np.ndarray, "B V"]) -> Float[np.ndarray, " B"]:
    """Returns the value at which each curve first comes above 0, by lines between the values.

    It is the first value for a curve that begins above 0, and the last for a curve that never is: an interval that ends
    there may go on beyond.
    """
    above = curves > 0
    after = np.maximum(above.argmax(1), 1)
    row = np.arange(len(curves))
    low, high = curves[row, after - 1], curves[row, after]
    fraction = np.divide(-low, high - low, out=np.zeros(len(curves)), where=high != low)
    between = values[after - 1] + (values[after] - values[after - 1]) * fraction
    return np.where(above[:, 0], values[0], np.where(above.any(1), between, values[-1]))


@dataclasses.dataclass(frozen=True)
class RecoveredGap(TwoSides):
    """`lower` gains a share of what `best` gains over `higher`: (higher - lower) / (higher - best)."""

    kind = "share"

    best: Side

    def sides(self) -> tuple[Side, ...]:
        """Returns all three sides."""
        return self.lower, self.higher, self.best

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns all sides; the best one has to be competent."""
        reads = tuple(self.reads())
        return Stakes(reads, reads, ((reads[-1],),))

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the share with a bootstrap interval; none if the interval of the whole gain holds 0."""
        names = dict(zip(("lower", "higher", "best"), self.sides(), strict=True))
        lower, higher, best = (side["arm"] for side in self.sides())
        runs = common_seeds(rows, self.setup.at, self.setup.metric, **names)
        if not len(runs):
            return {}
        part, whole = runs.higher - runs.lower, runs.higher - runs.best
        gain = statistics.estimate(whole)
        numerator, denominator = (digits.with_interval(each[:3]) for each in (statistics.estimate(part), gain))
        text = f"({higher} - {lower}) / ({higher} - {best}) = {numerator} / {denominator}"
        record = {"n": len(runs), "text": text}
        if reason := self.obstacle(rows):  # then a share is not even shown
            return inconclusive(record, reason)
        if not gain.low > 0:
            return inconclusive(record, f"{best} may gain nothing over {higher}, and nothing has no shares")
        mean, low, high, n = statistics.bootstrap_ratio(part.to_numpy(), whole.to_numpy())
        text = f"{100 * mean:.0f} % [{100 * low:.0f}, {100 * high:.0f}]: {text}"
        return {"ours": mean, "interval": [low, high], "n": n, "verdict": "measured", "text": text}
