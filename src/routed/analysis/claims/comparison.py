"""Kinds of claims that compare two sides at one point: an order and an equivalence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from routed.analysis import statistics
from routed.analysis.claims.claim import Point, Side, Stakes, TwoSides
from routed.analysis.claims.outcomes import outcomes_of
from routed.analysis.claims.rules import ONE_SEED, UNKNOWN_TAIL, displayed, effect_text, inconclusive, verdict_of
from routed.analysis.claims.weaknesses import weakened
from routed.analysis.paired_values import ANY_FAIR, Rows, ends


class Differences(NamedTuple):
    """Differences of two sides, higher - lower, paired by seed: a column for each pair of arms.

    now: differences at the end of training.
    later: differences that are extrapolated beyond it.
    labels: both sides with their means, as text.
    """

    now: dict[str, pd.Series]
    later: dict[str, pd.Series]
    labels: tuple[str, str]


class Answer(NamedTuple):
    """The verdict of a rule on some differences, with its p value and its interval."""

    verdict: str
    p: float
    estimate: statistics.Estimate


class Comparison(TwoSides):
    """A claim about two sides at one point, judged by a rule on their differences."""

    def rule(self, differences: Mapping[str, pd.Series]) -> Answer:
        """Returns the answer to the claim from differences of its sides, by control."""
        raise NotImplementedError

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the rule's answer, unless more steps could turn it."""
        if self.setup.unit == "ratio" and (arm := self._below_zero(rows)):
            reason = f"values of {arm} are below 0, and have no ratio: unit='difference' compares them"
            return {"verdict": "not judged", "reason": reason, "text": "no ratio"}
        differences = self._differences(rows)
        if differences is None:
            return {}
        answer, size = self.rule(differences.now), displayed(self.setup.unit)
        mean, low, high, n = answer.estimate
        effect = effect_text(self.setup.unit, answer.estimate)
        record: dict[str, Any] = {"ours": size(mean), "interval": [size(low), size(high)], "n": n}
        kind = "geometric means" if self.setup.unit == "ratio" else "means"
        controls = f" (fairest of {', '.join(differences.now)})" if self._against_any() else ""
        record["text"] = f"{' against '.join(differences.labels)} ({kind}); {effect}{controls}"
        if n < 2:
            return inconclusive(record, ONE_SEED)
        record |= {"verdict": answer.verdict, "p": answer.p}
        return record | self._extrapolated(rows, answer, differences)

    def _against_any(self) -> bool:
        return any(side.get("arm") == ANY_FAIR for side in self.sides())

    def _extrapolated(self, rows: Rows, answer: Answer, differences: Differences) -> dict[str, Any]:
        """Returns changes to the record from the extrapolated differences: a verdict that they would turn is none."""
        horizon = rows.config.gate.horizon
        if horizon == 1:
            return {}
        if not all(np.isfinite(values).all() for values in differences.later.values()):
            return inconclusive({}, UNKNOWN_TAIL)
        later = self.rule(differences.later)
        size, text = displayed(self.setup.unit), effect_text(self.setup.unit, later.estimate)
        record: dict[str, Any] = {"later": [size(value) for value in later.estimate[:3]]}
        if later.verdict == answer.verdict:
            return record
        ahead = f"at {horizon:g} times the steps, if the curves go on as they end: {text}"
        if answer.verdict == "inconclusive":
            return record | {"reason": f"could become {later.verdict}; {ahead}"}
        return inconclusive(record, f"{answer.verdict} now, but could turn; {ahead}")

    def _differences(self, rows: Rows) -> Differences | None:
        """Returns the differences of both sides, in logarithms for ratios; None if a side has no finite runs."""
        lower, higher = (self._values(side, rows) for side in self.sides())
        now, later, labels = {}, {}, {}
        for low_arm, low in lower.items():
            for high_arm, high in higher.items():
                difference = (high - low).dropna(subset="now")
                if len(difference):
                    name = low_arm if self.lower.get("arm") == ANY_FAIR else high_arm
                    now[name], later[name] = difference["now"], difference["later"]
                    seeds = difference.index
                    labels[name] = (
                        f"{rows.label(self.lower, self.higher, low_arm)} {self._mean_text(low, seeds)}".lstrip(),
                        f"{rows.label(self.higher, self.lower, high_arm)} {self._mean_text(high, seeds)}".lstrip(),
                    )
        return Differences(now, later, labels[statistics.versus_best(now).name]) if now else None

    def _values(self, side: Side, rows: Rows) -> dict[str, Any]:
        """Returns by arm the values of a side by seed (`ends`); a constant has an empty name and no seeds."""
        logs, at = self.setup.unit == "ratio", self.setup.at
        if "value" in side:
            return {"": math.log(max(side["value"], statistics.TINY)) if logs else float(side["value"])}
        histories = {arm: rows.history(side, at, self.setup.metric, arm) for arm in rows.arms(side, at)}
        return {
            arm: ends(history, rows.config.gate.horizon, logs) for arm, history in histories.items() if len(history)
        }

    def _below_zero(self, rows: Rows) -> str | None:
        """Names an arm whose metric ends below 0 in a run, or returns None."""
        for side in self.sides():
            for arm in rows.arms(side, self.setup.at):
                history = rows.history(side, self.setup.at, self.setup.metric, arm)
                if len(history) and (history.iloc[-1] < 0).any():
                    return arm
        return None

    def _mean_text(self, values: Any, seeds: pd.Index) -> str:
        """Returns the mean of a side over the seeds of both sides, geometric for ratios, or its constant."""
        mean = float(values if isinstance(values, float) else values["now"][seeds].mean())
        return f"{math.exp(mean):.3g}" if self.setup.unit == "ratio" else f"{mean:.4f}"


@dataclasses.dataclass(frozen=True)
class Order(Comparison):
    """`lower` is below `higher`. An order is also tried at every value of the nuisance keys `over`."""

    kind = "order"
    allows_value = True
    allows_fairest = one_refutes = True

    def rule(self, differences: Mapping[str, pd.Series]) -> Answer:
        """Returns "supported" if the interval of the least difference lies above 0, "opposite" if below."""
        if outcomes := outcomes_of(self, differences):
            interval, p = outcomes.compared()
        else:
            _, interval, p = statistics.versus_best(differences)
        return Answer(verdict_of(interval), p, interval)

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns the side that did better as the winner: lost runs and better rates of the other would change less."""
        winner, loser = ((side, self.setup.at) for side in self.better(verdict, rows))
        return Stakes((winner,), (loser,), ((winner,),))

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the record of the comparison, with the order's robustness."""
        record = super().judge(rows)
        if not record:
            return record
        size = displayed(self.setup.unit)(self.setup.margin)
        if record.get("verdict") == "supported" and record["interval"][1] < size:
            record["reason"] = f"smaller than the smallest effect of interest, a {self.setup.unit} of {size:.3g}"
        return record | {"robustness": self._robustness(rows)}

    def _robustness(self, rows: Rows) -> dict[str, int] | None:
        """Returns the number of values of the nuisance keys at which the order is tried, and at which it is supported.

        None without nuisance keys, or if a side fixes one of them. Points at which both sides are the same runs count
        once.
        """
        keys = [key for key in self.setup.over if key in rows.swept]
        if not keys or any(key in side for side in self.sides() for key in keys):
            return None
        supported = 0
        counted: set[frozenset[str | int]] = set()
        for values in rows.last[keys].drop_duplicates().itertuples(index=False, name=None):
            point = {**self.setup.at, **dict(zip(keys, values, strict=True))}
            runs = self._runs_at(point, rows)
            if runs in counted:
                continue
            moved = self.replace(at=point)
            record = Comparison.judge(moved, rows)
            if record.get("n", 0) > 1:
                counted.add(runs)
                judged = weakened(moved, rows, {"p": None} | record)
                sure = judged["p"] is None or judged["p"] < self.setup.alpha
                supported += sure and judged["verdict"] in ("supported", "exact")
        return {"held": supported, "tried": len(counted)} if len(counted) > 1 else None

    def _runs_at(self, point: Point, rows: Rows) -> frozenset[str | int]:
        """Returns the keys of both sides' runs at a point."""
        arms = [(side, arm) for side in self.sides() for arm in rows.arms(side, point)]
        return frozenset(run for side, arm in arms for run in rows.runs(side, point, arm).run)


@dataclasses.dataclass(frozen=True)
class Equivalence(Comparison):
    """Both sides differ by less than the smallest effect of interest."""

    kind = "null"
    allows_value = True

    def rule(self, differences: Mapping[str, pd.Series]) -> Answer:
        """Returns "supported" if two one-sided tests bound the difference, "opposite" if its interval lies outside."""
        (values,) = differences.values()
        effect, outcomes = self.setup.margin, outcomes_of(self, differences)
        interval = outcomes.compared()[0] if outcomes else statistics.estimate(values)
        if interval.low > effect or interval.high < -effect:
            p = outcomes.outside(effect) if outcomes else statistics.outside_margin_p(values, effect)
            return Answer("opposite", p, interval)
        p = outcomes.equal(effect) if outcomes else statistics.equivalence(values, effect)
        return Answer("supported" if p < self.setup.alpha else "inconclusive", p, interval)
