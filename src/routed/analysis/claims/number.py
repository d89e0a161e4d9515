"""Kinds of claims about a number of a paper: reproduced, or only shown beside ours."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from routed.analysis import digits, statistics
from routed.analysis.claims.claim import LEARNED, OneSide, Side, Stakes
from routed.analysis.claims.rules import ONE_SEED, UNKNOWN_TAIL, inconclusive
from routed.analysis.paired_values import Rows, ends

#: Comparability -> reason why a number of the paper is only shown beside ours.
UNLIKE = {"scaled": "ours is scaled down", "stand_in": "ours is of other data"}
#: Runs from which on "reproduced" needs no narrow interval.
RUNS = 8


class Measured(NamedTuple):
    """A number of a paper with its standard deviation over n runs."""

    mean: float
    std: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4g} +- {self.std:.2g} (n = {self.n})"


@dataclasses.dataclass(frozen=True)
class Number(OneSide):
    """The paper's value lies in our prediction interval for one run.

    A `Measured` value is not rejected by Welch's test. `uninformed` is the value that the metric has by chance; None
    stands for the value of the untrained network. `rivals` are other values that the paper has for this metric.
    """

    kind = "number"
    of_number = True

    side: Side = dataclasses.field(default_factory=lambda: LEARNED)
    uninformed: float | None = None
    rivals: tuple[float, ...] = ()

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns the side; it may be worse than a constant, as the paper's may, which `_underpowered` asks."""
        reads = tuple(self.reads())
        return Stakes(reads, reads, ())

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns "reproduced" if the interval holds the paper's value, unless chance or more steps could do so too."""
        history = rows.history(self.side, self.setup.at, self.setup.metric)
        if not len(history):
            return {}
        logs = self.setup.unit == "ratio" and bool((history.to_numpy() > 0).all())
        values = ends(history, rows.config.gate.horizon, logs)
        values = np.exp(values) if logs else values
        measured = self.paper if isinstance(self.paper, Measured) else None
        interval, paper = self._interval(values["now"]), measured.mean if measured else self.paper
        mean, low, high, n = interval
        record: dict[str, Any] = {"ours": mean, "interval": [low, high], "n": n}
        record["paper"] = str(measured) if measured else paper
        subject = f"for our mean, against {measured}" if measured else "for one run"
        record["text"] = f"{digits.with_interval((mean, low, high))} {subject}"
        if n < 2:
            return inconclusive(record, ONE_SEED)
        inside = low <= paper <= high
        if self.setup.comparability in ("stand_in", "scaled"):
            where = f"{'inside' if inside else 'outside'} of the interval"
            setting = f"a {self.setup.comparability.replace('_', ' ')} setting"
            record["reason"] = f"the paper's value is {where}, but {setting} can neither reproduce nor refute a number"
            return record | {"verdict": "not comparable"}
        record["verdict"] = "reproduced" if inside else "not reproduced"
        if rows.config.gate.horizon != 1:
            record |= self._extrapolated(record["verdict"], paper, values["later"], rows.config.gate.horizon)
        if record["verdict"] == "reproduced" and (reason := self._underpowered(paper, interval, history, rows)):
            return inconclusive(record, reason)
        return record

    def _interval(self, values: pd.Series) -> statistics.Estimate:
        """Returns the prediction interval for one run, or that of Welch's test around a `Measured` value."""
        if not isinstance(self.paper, Measured):
            return statistics.prediction(values)
        difference, low, high, n = statistics.welch(values, *self.paper)
        theirs = self.paper.mean
        return statistics.Estimate(theirs + difference, theirs + low, theirs + high, n)

    def _extrapolated(self, verdict: str, paper: float, later: pd.Series, horizon: float) -> dict[str, Any]:
        """Returns changes to the record from the extrapolated values: a verdict that they would turn is none."""
        if not np.isfinite(later).all():
            return inconclusive({}, UNKNOWN_TAIL)
        interval = self._interval(later)
        record: dict[str, Any] = {"later": [*interval[:3]]}
        if (verdict == "reproduced") == (interval.low <= paper <= interval.high):
            return record
        ahead = f"at {horizon:g} times the steps, if the curve goes on as it ends: {digits.with_interval(interval[:3])}"
        return inconclusive(record, f"{verdict} now, but could turn; {ahead}")

    def _underpowered(
        self, paper: float, interval: statistics.Estimate, history: pd.DataFrame, rows: Rows
    ) -> str | None:
        """Returns the reason why an interval does not tell the paper's value from a rival one, or None.

        It must hold none of them; and of fewer than `RUNS` runs be no wider than half the distance to the nearest.
        """
        column = rows.column(self.side.get("metric", self.setup.metric), {**self.setup.at, **self.side})
        rivals = [(rival, "another value of the paper") for rival in self.rivals]
        if self.uninformed is not None:
            rivals.append((self.uninformed, "what chance gives"))
        elif history.index[0] == 0:
            rivals.append((history.iloc[0].mean(), "what an untrained network has"))
        if column is not None and column.constant is not None:
            rivals.append((column.constant, "what the best constant has"))
        for rival, source in rivals:
            if interval.low <= rival <= interval.high:
                return f"underpowered: the interval also holds {rival:.3g}, {source}"
        if not rivals:
            return "underpowered: nothing is known that the metric has by chance"
        distance, (rival, source) = min((abs(paper - rival), (rival, source)) for rival, source in rivals)
        narrow = interval.high - interval.low <= distance / 2
        if self.setup.unit == "ratio" and min(paper, rival) > 0:  # [.0004, .29] is narrow beside 1, not beside .01
            narrow &= interval.low > 0 and interval.high / interval.low <= max(paper / rival, rival / paper) ** 0.5
        if interval.n >= RUNS or narrow:
            return None
        return f"underpowered: {interval.n} runs, and an interval wider than half the distance to {rival:.3g}, {source}"


@dataclasses.dataclass(frozen=True)
class Beside(OneSide):
    """A number of the paper on a scale that it does not state; both numbers are shown, nothing is judged."""

    kind = "beside"

    side: Side = dataclasses.field(default_factory=lambda: LEARNED)

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns our mean with its interval."""
        values = rows.final_values(self.side, self.setup.at, self.setup.metric)
        if not len(values):
            return {}
        mean, low, high, n = statistics.estimate(values)
        reason = UNLIKE.get(self.setup.comparability, "the paper does not state its scale")
        record = {"ours": mean, "interval": [low, high], "n": n, "text": digits.with_interval((mean, low, high))}
        return record | {"verdict": "not comparable", "reason": reason}
