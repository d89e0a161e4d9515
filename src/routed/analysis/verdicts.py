"""Verdicts: what the rows of a workdir say about the claims of its experiment; a kind of claim is a line in KINDS."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import digits, statistics
from routed.analysis.claims import UNLIKE, Claim, Measured
from routed.analysis.crossing import crossing
from routed.analysis.foretold import prediction
from routed.analysis.needs import edge_of, lost, share, unfit, why_nothing
from routed.analysis.outcomes import outcomes_of
from routed.analysis.powers import power
from routed.analysis.reach import exponent, reach
from routed.analysis.sides import ANY_FAIR, Rows, ends
from routed.contracts import UserError
from routed.settings.tree import nearest

#: How two sides are compared, with the smallest effect of interest: losses that approach 0 by their log ratio (a factor
#: 1.1), nats per token and shares by their difference (.01), shares of successful runs by theirs (.05).
EFFECTS = {"ratio": math.log(1.1), "difference": 0.01, "probability": 0.05}


def judge(claims: tuple[Claim, ...], table: pd.DataFrame, config: ConfigDict, swept: list[str]) -> list[dict[str, Any]]:
    """A verdict for every claim, from all rows of the workdir.

    P values are adjusted over the family: the orders, equivalences and crossings that one figure of an experiment claims. Numbers are no
    part of it, as an adjusted test would find a paper's value reproduced more easily.
    """
    rows = Rows(table, config, swept)
    records = [judge_one(claim, rows) for claim in claims]
    family = [(claim, one) for claim, one in zip(claims, records, strict=True) if one["p"] is not None]
    for (claim, one), p in zip(family, statistics.adjusted([one["p"] for _, one in family]), strict=True):
        one["p_adjusted"] = float(p)
        if one["verdict"] in ("supported", "opposite") and p >= claim.alpha:
            one["verdict"] = "inconclusive"
            one["reason"] = f"p = {p:.2g} after adjusting for {len(family)} tests, asked for: p < {claim.alpha:g}"
    return records


def check(claim: Claim) -> None:
    """Refuses a claim that nothing can judge.

    Raises:
      UserError: an unknown kind, or one that cannot be asked of several controls.
    """
    if claim.kind not in KINDS:
        raise UserError(
            f"claim {claim.id}: unknown kind {claim.kind!r}{nearest(claim.kind, KINDS)}; known: {', '.join(KINDS)}"
        )
    if claim.kind not in ("order", "prediction") and ANY_FAIR in (claim.lower.get("arm"), claim.higher.get("arm")):
        raise UserError(
            f"claim {claim.id}: only an order or a prediction can be claimed against the fairest control; name one arm"
        )


def judge_one(claim: Claim, rows: Rows) -> dict[str, Any]:
    """The verdict on one claim by itself, with the numbers that it rests on.

    Raises:
      UserError: as `check`.
    """
    check(claim)
    record = {
        "id": claim.id, "kind": claim.kind, "comparability": claim.comparability, "statement": claim.statement,
        "metric": claim.metric, "at": claim.at, "paper": claim.paper, "ours": None, "interval": None, "later": None, "n": 0,
        "verdict": "not run", "reason": "", "p": None, "p_adjusted": None, "robustness": None, "text": "",
    } | KINDS[claim.kind](claim, rows)  # fmt: skip
    if record["verdict"] in DECIDED and (weak := unfit(claim, rows)):
        record |= {"verdict": "inconclusive", "reason": weak}
    if record["n"] and rows.config.scale == "smoke":
        reason = "a smoke run shows that the figure runs, not what it finds"
        record |= {"verdict": "not judged", "reason": reason, "p": None, "robustness": None}
    if not record["n"] and not record["text"]:
        record["text"] = why_nothing(claim, rows)
    return record


#: Verdicts that an unmet need takes back, whatever the kind of claim.
DECIDED = ("supported", "opposite", "reproduced", "not reproduced")


class Compared(NamedTuple):
    """Two sides paired by seed: one column of differences, higher - lower, for each pair of arms; text for a reader."""

    now: dict[str, pd.Series]
    later: dict[str, pd.Series]
    sides: tuple[str, str]


class Answer(NamedTuple):
    """What a rule says of some differences: the words, and the p value and the interval behind them."""

    verdict: str
    p: float
    estimate: statistics.Estimate


def _comparison(claim: Claim, rows: Rows, rule: Callable[[Claim, Mapping[str, pd.Series]], Answer]) -> dict[str, Any]:
    """What `rule` says of two sides, unless more steps could turn it."""
    compared = _compare(claim, rows)
    if compared is None:
        return {}
    answer, size = rule(claim, compared.now), _shown_size(claim)
    mean, low, high, n = answer.estimate
    record: dict[str, Any] = {"ours": size(mean), "interval": [size(low), size(high)], "n": n}
    record["text"] = f"{compared.sides[0]} against {compared.sides[1]}; {_effect_text(claim, answer.estimate)}"
    if n < 2:
        return record | {"verdict": "inconclusive", "reason": "one seed"}
    record |= {"verdict": answer.verdict, "p": answer.p}
    for side in (claim.lower, claim.higher):
        if why := rows.missed(side, claim.at):
            return record | {"verdict": "inconclusive", "reason": why, "p": None}
    if weak := unfit(claim, rows):
        return record | {"verdict": "inconclusive", "reason": weak}
    if answer.verdict != "inconclusive" and (gone := lost(claim, rows, answer.verdict)):
        return record | {"verdict": "inconclusive", "reason": f"{answer.verdict} among the others, but {gone}"}
    if edge := edge_of(claim, rows, answer.verdict):
        return record | {"verdict": "inconclusive", "reason": f"{answer.verdict}, but {edge}"}
    return record | _outlook(claim, rows, answer, rule, compared)


def _outlook(claim: Claim, rows: Rows, answer: Answer, rule: Callable, compared: Compared) -> dict[str, Any]:
    """What the rule would say if the tails of training went on: a verdict that this could turn is none."""
    horizon = rows.config.gate.horizon
    if horizon == 1:
        return {}
    if not all(np.isfinite(values).all() for values in compared.later.values()):
        return {"verdict": "inconclusive", "reason": UNKNOWN_TAIL}
    later = rule(claim, compared.later)
    size, text = _shown_size(claim), _effect_text(claim, later.estimate)
    record: dict[str, Any] = {"later": [size(value) for value in later.estimate[:3]]}
    if later.verdict == answer.verdict:
        return record
    ahead = f"at {horizon:g} times the steps, if the curves go on as they end: {text}"
    if answer.verdict == "inconclusive":
        return record | {"reason": f"could become {later.verdict}; {ahead}"}
    return record | {"verdict": "inconclusive", "reason": f"{answer.verdict} now, but could turn; {ahead}"}


#: Why nothing is said of a metric that was recorded once.
UNKNOWN_TAIL = "one evaluation in the second half of training, so nobody knows whether it still moves: lower eval_every"


def _compare(claim: Claim, rows: Rows) -> Compared | None:
    """Both sides at the claim's point, in logs for ratios; None where a side has no finite runs."""
    lower, higher = (_ends(claim, side, rows) for side in (claim.lower, claim.higher))
    now, later, sides = {}, {}, {}
    for low_arm, low in lower.items():
        for high_arm, high in higher.items():
            difference = (high - low).dropna(subset="now")
            if len(difference):
                name = low_arm if claim.lower.get("arm") == ANY_FAIR else high_arm
                now[name], later[name] = difference["now"], difference["later"]
                both = difference.index
                sides[name] = (
                    f"{rows.words(claim.lower, claim.higher, low_arm)} {_mean_text(claim, low, both)}".lstrip(),
                    f"{rows.words(claim.higher, claim.lower, high_arm)} {_mean_text(claim, high, both)}".lstrip(),
                )
    return Compared(now, later, sides[statistics.least(now).name]) if now else None


def _ends(claim: Claim, side: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    """By arm: the values of a side by seed, now and later, in logs for ratios. A constant has no name and no seeds."""
    logs = claim.unit == "ratio"
    if "value" in side:
        return {"": math.log(max(side["value"], statistics.TINY)) if logs else float(side["value"])}
    histories = {arm: rows.history(side, claim.at, claim.metric, arm) for arm in rows.arms(side, claim.at)}
    return {arm: ends(history, rows.config.gate.horizon, logs) for arm, history in histories.items() if len(history)}


def _order(claim: Claim, rows: Rows) -> dict[str, Any]:
    record = _comparison(claim, rows, _order_rule)
    if not record:
        return record
    effect = EFFECTS[claim.unit]
    if record["verdict"] == "supported" and record["interval"][1] < _shown_size(claim)(effect):
        size = _shown_size(claim)(effect)
        record["reason"] = f"smaller than the smallest effect of interest, a {claim.unit} of {size:.3g}"
    return record | {"robustness": _robustness(claim, rows)}


def _order_rule(claim: Claim, differences: Mapping[str, pd.Series]) -> Answer:
    """Supported when the interval lies above 0, opposite when it lies below."""
    if counted := outcomes_of(claim, differences):
        interval, p = counted.compared()
    else:
        _, interval, p = statistics.least(differences)
    return Answer("supported" if interval.low > 0 else "opposite" if interval.high < 0 else "inconclusive", p, interval)


def _null(claim: Claim, rows: Rows) -> dict[str, Any]:
    return _comparison(claim, rows, _null_rule)


def _null_rule(claim: Claim, differences: Mapping[str, pd.Series]) -> Answer:
    """Supported when both one-sided tests put the difference within the smallest effect of interest."""
    (values,) = differences.values()
    effect, counted = EFFECTS[claim.unit], outcomes_of(claim, differences)
    interval = counted.compared()[0] if counted else statistics.estimate(values)
    if interval.low > effect or interval.high < -effect:
        return Answer("opposite", statistics.beyond(values, effect), interval)
    p = counted.equal(effect) if counted else statistics.equivalence(values, effect)
    return Answer("supported" if p < claim.alpha else "inconclusive", p, interval)


def _robustness(claim: Claim, rows: Rows) -> dict[str, int] | None:
    """On how many values of its nuisance keys the order is supported; none where it names none, or a side fixes one.

    Points at which both sides are the same runs, as they read none of the keys that tell the points apart, count once.
    """
    keys = [key for key in claim.over if key in rows.swept]
    if not keys or any(key in side for side in (claim.lower, claim.higher) for key in keys):
        return None
    held = tried = 0
    counted: set[frozenset[str]] = set()
    for values in rows.last[keys].drop_duplicates().itertuples(index=False, name=None):
        point = {**claim.at, **dict(zip(keys, values, strict=True))}
        runs = frozenset(
            run for side in (claim.lower, claim.higher) for arm in rows.arms(side, point) for run in rows.runs(side, point, arm).run
        )  # fmt: skip
        if runs in counted:
            continue
        record = _comparison(claim._replace(at=point), rows, _order_rule)
        if record.get("n", 0) > 1:
            counted.add(runs)
            tried += 1
            held += record["verdict"] == "supported"
    return {"held": held, "tried": tried} if tried > 1 else None


def _number(claim: Claim, rows: Rows) -> dict[str, Any]:
    history = _only_history(claim, rows)
    if not len(history):
        return {}
    logs = claim.unit == "ratio" and bool((history.to_numpy() > 0).all())
    values = ends(history, rows.config.gate.horizon, logs)
    values = np.exp(values) if logs else values
    paper = claim.paper if isinstance(claim.paper, Measured) else None
    now, size = _number_rule(claim, values["now"]), paper.mean if paper else claim.paper
    mean, low, high, n = now
    record: dict[str, Any] = {"ours": mean, "interval": [low, high], "n": n, "paper": str(paper) if paper else size}
    of = f"for our mean, against {paper}" if paper else "for one run"
    record["text"] = f"{digits.with_interval((mean, low, high))} {of}"
    if n < 2:
        return record | {"verdict": "inconclusive", "reason": "one seed"}
    inside = low <= size <= high
    if claim.comparability in ("stand_in", "scaled"):
        where = f"{'inside' if inside else 'outside'} of the interval"
        setting = claim.comparability.replace("_", " ")
        reason = f"the paper's value is {where}, but a {setting} setting can neither reproduce nor refute a number"
        return record | {"verdict": "not comparable", "reason": reason}
    if weak := unfit(claim, rows):
        return record | {"verdict": "inconclusive", "reason": weak}
    verdict = "reproduced" if inside else "not reproduced"
    if rows.config.gate.horizon != 1:
        if not np.isfinite(values["later"]).all():
            return record | {"verdict": "inconclusive", "reason": UNKNOWN_TAIL}
        later = _number_rule(claim, values["later"])
        record["later"] = [*later[:3]]
        if inside != (later.low <= size <= later.high):
            ahead = digits.with_interval(later[:3])
            reason = f"{verdict} now, but could turn; at {rows.config.gate.horizon:g} times the steps, if the curve goes on as it ends: {ahead}"
            return record | {"verdict": "inconclusive", "reason": reason}
    uninformed = history.iloc[0].mean() if claim.uninformed is None else claim.uninformed
    if inside and low <= uninformed <= high:
        source = "what an untrained network has" if claim.uninformed is None else "what chance gives"
        reason = f"underpowered: the interval also holds {uninformed:.3g}, {source}"
        return record | {"verdict": "inconclusive", "reason": reason}
    return record | {"verdict": verdict}


def _number_rule(claim: Claim, values: pd.Series) -> statistics.Estimate:
    """The interval in which the paper's value would agree: for one run, or, where the paper has a deviation, by Welch's test."""
    if not isinstance(claim.paper, Measured):
        return statistics.prediction(values)
    difference, low, high, n = statistics.welch(values, *claim.paper)
    theirs = claim.paper.mean
    return statistics.Estimate(theirs + difference, theirs + low, theirs + high, n)


def _beside(claim: Claim, rows: Rows) -> dict[str, Any]:
    history = _only_history(claim, rows)
    if not len(history):
        return {}
    mean, low, high, n = statistics.estimate(history.iloc[-1])
    return {
        "ours": mean, "interval": [low, high], "n": n, "verdict": "not comparable",
        "reason": UNLIKE.get(claim.comparability, "the paper does not state its scale"), "text": digits.with_interval((mean, low, high)),
    }  # fmt: skip


def _only_history(claim: Claim, rows: Rows) -> pd.DataFrame:
    """The evaluations of the one arm that a number is about."""
    return rows.history(claim.lower, claim.at, claim.metric, claim.lower["arm"])


def _shown_size(claim: Claim) -> Callable[[float], float]:
    """What turns a mean difference into the number that is shown: ratios are compared in logs."""
    return math.exp if claim.unit == "ratio" else float


def _effect_text(claim: Claim, interval: statistics.Estimate) -> str:
    if claim.unit == "ratio":
        return f"ratio {digits.with_interval(map(math.exp, interval[:3]))}"
    return f"difference {digits.with_interval(interval[:3], sign='+')}"


def _mean_text(claim: Claim, values: Any, seeds: pd.Index) -> str:
    """The mean of a side over the seeds that both have (geometric for ratios, so that theirs is that of the means), or the constant that it is."""
    mean = float(values if isinstance(values, float) else values["now"][seeds].mean())
    mean = math.exp(mean) if claim.unit == "ratio" else mean
    return f"{mean:{'.3g' if claim.unit == 'ratio' else '.4f'}}"


def to_json(records: list[dict[str, Any]] | dict[str, Any]) -> str:
    """claims.json; NaN becomes null."""

    def clean(value):
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(v) for v in value]
        if isinstance(value, np.generic):
            value = value.item()
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(clean(records), indent=1) + "\n"


#: kind -> what judges a claim of it, as changes to its record. A user's file adds to it.
KINDS: dict[str, Callable[[Claim, Rows], dict[str, Any]]] = {
    "order": _order,
    "null": _null,
    "number": _number,
    "beside": _beside,
    "crossing": crossing,
    "share": share,
    "prediction": prediction,
    "reach": reach,
    "exponent": exponent,
    "power": power,
}
