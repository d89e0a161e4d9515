"""Weaknesses of runs that leave a claim without a verdict, the same for every kind: nothing here knows a kind."""

from __future__ import annotations

from typing import Any

from routed.analysis import digits, statistics
from routed.analysis.claims.claim import Claim, Reading
from routed.analysis.claims.rules import inconclusive
from routed.analysis.paired_values import Rows
from routed.engine.rows import format_value

#: Verdict -> the verdict of values that are equal in every seed, which no seed can support: it is tallied apart.
EXACT = {"supported": "exact", "reproduced": "exact", "opposite": "exact opposite", "not reproduced": "exact opposite"}
#: Verdicts that a weakness takes back.
DECIDED = ("supported", "opposite", "reproduced", "not reproduced", "measured")
#: Width of an interval, as a share of its ends, below which values count as equal: float32 rounds by less.
EQUAL = 1e-6
#: Reason of a verdict about values without spread.
ALIKE = "equal in every seed, so seeds are no evidence"


def weakened(claim: Claim, rows: Rows, record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of a claim with the verdict that these runs can carry.

    A control that missed what it controls, an unmet precondition, diverged runs of who won, a rate at the end of what
    was tried of who lost, and a winner that is no better than a constant leave no verdict.
    """
    alike = record.pop("alike", _has_no_width(record))
    if record["n"] < 2 or record["verdict"] not in (*DECIDED, "inconclusive"):
        return record
    for side, at in claim.reads():
        if reason := rows.failed_control(side, at):
            return inconclusive(record, _where(claim, at) + reason) | {"p": None}
    if reason := claim.obstacle(rows):
        return inconclusive(record, reason)
    if record["verdict"] == "inconclusive":
        return record | ({"p": None} if alike else {})
    if reason := _doubt(claim, rows, record["verdict"]):
        return inconclusive(record, reason)
    if not alike:
        return record
    verdict = EXACT.get(record["verdict"], "inconclusive")
    return record | {"verdict": verdict, "reason": ALIKE, "p": None}


def _doubt(claim: Claim, rows: Rows, verdict: str) -> str | None:
    """Returns the reason why a verdict could be another one with all runs, other rates, or other constants; or None."""
    winners, losers, contenders = claim.stakes(verdict, rows)
    for side, at in () if verdict == "opposite" and claim.one_refutes else claim.reads():
        if missing := rows.missing_controls(side, at):
            return f"{verdict} against the rest, but {_where(claim, at)}no {', no '.join(missing)} here"
    for side, at in winners:
        for loss in rows.lost(side, at, claim.setup.metric):
            return f"{verdict} among the others, but {_where(claim, at)}{loss}"
    for side, at in losers:
        if edge := rows.rate_at_edge(side, at):
            return f"{verdict}, but {_where(claim, at)}{edge}"
    for readings in contenders:
        if reason := incompetent(readings, claim.setup.metric, rows):
            return f"not competent: {_where(claim, readings[0][1])}{reason}"
    return None


def incompetent(readings: tuple[Reading, ...], metric: str, rows: Rows) -> str | None:
    """Returns a text if no arm of some sides at a point beats the best constant by its interval, or None.

    None also where the metric has no such constant, or a side is a constant itself.
    """
    texts = []
    for side, at in readings:
        name = side.get("metric", metric)
        column = rows.column(name, {**at, **side})
        if column is None or column.constant is None or "value" in side:
            return None
        for arm in rows.arms(side, at):
            history = rows.history(side, at, name, arm)
            values = statistics.estimate(history.iloc[-1] if len(history) else [])
            if values.low > column.constant if column.higher_is_better else values.high < column.constant:
                return None
            texts.append(f"{arm} has {digits.with_interval(values[:3])}, the best constant {column.constant:.3g}")
    return texts[0] if texts else None


def _has_no_width(record: dict[str, Any]) -> bool:
    """True if the interval of a record says that its values are equal in every seed; a kind may say so by `alike`."""
    low, high = record["interval"] or (0.0, 1.0)
    return bool(high - low <= EQUAL * max(abs(low), abs(high)))


def _where(claim: Claim, at: Any) -> str:
    """Returns the settings of a point that are not those of the claim, as the begin of a reason."""
    changed = {key: value for key, value in at.items() if claim.setup.at.get(key) != value}
    return "".join(f"at {key} = {format_value(value)}: " for key, value in changed.items())
