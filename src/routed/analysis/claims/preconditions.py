"""Conditions that the runs must meet before any claim about them is judged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from routed.analysis import digits, statistics
from routed.analysis.paired_values import Point, Rows, Side

#: Column of the loss of a model of counts -> the loss that is lower in a competent model, and words between both.
COUNT_MODELS = {
    "eval/bigram": ("eval/loss", "nats a token, a bigram model"),
    "eval/ngram": ("eval/loss", "nats a token, a 5-gram model"),
}


class Precondition(NamedTuple):
    """A precondition of a claim: one arm gains more than `gain` of a metric over another, with its whole interval.

    An experiment in which not even an oracle gains cannot tell whether other arms might (assay sensitivity).
    """

    better: str
    worse: str
    gain: float
    metric: str


def obstacle(reads: Iterable[tuple[Side, Point]], at: Point, needs: Iterable[Precondition], rows: Rows) -> str | None:
    """Returns the reason why these runs cannot decide a claim, or None."""
    return _behind_counts(reads, rows) or _unmet(needs, at, rows)


def _behind_counts(reads: Iterable[tuple[Side, Point]], rows: Rows) -> str | None:
    """Names an arm that is not known to predict text better than counts do, by the interval of its gain, or None."""
    for side, at in reads:
        for arm in rows.arms(side, at):
            runs = rows.runs(side, at, arm)
            for column, (loss, phrase) in COUNT_MODELS.items():
                if column not in runs:
                    continue
                gain = statistics.estimate((runs[column] - runs[loss]).dropna())
                if not gain.n:
                    return f"not known to be competent: {arm} has no {column}"
                if not gain.low > 0:
                    ours, theirs = runs[loss].mean(), runs[column].mean()
                    beside = "" if ours >= theirs else f", which is not told apart: {digits.with_interval(gain[:3])}"
                    return f"not competent: {arm} has {ours:.3g} {phrase} {theirs:.3g}{beside}"
    return None


def _unmet(needs: Iterable[Precondition], at: Point, rows: Rows) -> str | None:
    """Names the first precondition whose gain is too small or was not measured, or returns None."""
    for need in needs:
        runs = common_seeds(rows, at, need.metric, better={"arm": need.better}, worse={"arm": need.worse})
        gain = statistics.estimate(runs.worse - runs.better)
        if not gain.low > need.gain:  # NaN of less than two seeds
            interval = digits.with_interval(gain[:3])
            gains = f"{need.better} gains only {interval}" if gain.n else f"nobody knows what {need.better} gains"
            return f"{gains} over {need.worse} (needed {need.gain:g}), so this setting cannot tell"
    return None


def common_seeds(rows: Rows, at: Point, metric: str, **sides: Side) -> pd.DataFrame:
    """Returns the metric of some sides at their last evaluation: a row for each seed that all of them have."""
    columns = {name: rows.final_values(side, at, metric) for name, side in sides.items()}
    return pd.DataFrame(columns, columns=[*sides]).dropna()
