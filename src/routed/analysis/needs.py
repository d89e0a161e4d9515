"""What has to be seen before a claim is judged, and the share that an arm has of a possible gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from routed.analysis import digits, statistics
from routed.analysis.claims import Claim
from routed.analysis.sides import Rows

#: column -> whose validation loss it is, which no competent model is above.
COUNTS = {"eval/bigram": "a bigram model", "eval/ngram": "a 5-gram model"}


def unfit(claim: Claim, rows: Rows) -> str | None:
    """Why these runs cannot tell whether a claim holds, or None."""
    return _incompetent(claim, rows) or _unmet(claim, rows)


def edge_of(claim: Claim, rows: Rows, verdict: str) -> str | None:
    """Which side could have done better at a rate that nobody tried, so that it would turn the verdict; or None.

    Of an order that is the side that lost: the one that won would only win by more.
    """
    if verdict == "inconclusive":
        return None
    sides: tuple[Mapping[str, Any], ...] = (claim.lower, claim.higher)
    if claim.kind == "order":
        sides = sides[1:] if verdict == "supported" else sides[:1]
    return next(filter(None, (rows.edge(side, claim.at) for side in sides)), None)


def lost(claim: Claim, rows: Rows, verdict: str) -> str | None:
    """Which runs are missing from the side that did better, so that those that are left do not speak for it; or None.

    Of an order the side that lost may lack some: they would have been worse still.
    """
    sides: tuple[Mapping[str, Any], ...] = (claim.lower, claim.higher)
    if claim.kind == "order":
        sides = {"supported": sides[:1], "opposite": sides[1:]}.get(verdict, sides)
    return next((words for side in sides for words in rows.diverged(side, claim.at)), None)


def why_nothing(claim: Claim, rows: Rows) -> str:
    """Which side ran without the metric of the claim (what is not defined there, such as a prediction from too few samples); or nothing."""
    for side in (one for one in (claim.lower, claim.higher, claim.best) if "arm" in one):
        metric = side.get("metric", claim.metric)
        for arm in rows.arms(side, claim.at):
            if not len(rows.history(side, claim.at, metric, arm)):
                return f"{arm} ran, and has no {metric} there"
    return ""


def _incompetent(claim: Claim, rows: Rows) -> str | None:
    """Which arm of a claim predicts text no better than counts do, or None: it has not learned enough to compare."""
    for side in (claim.lower, claim.higher):
        for arm in rows.arms(side, claim.at) if side else ():
            runs = rows.runs(side, claim.at, arm)
            for column, counts in COUNTS.items():
                if column in runs and (ours := runs["eval/loss"].mean()) >= (theirs := runs[column].mean()):
                    return f"not competent: {arm} has {ours:.3g} nats a token, {counts} {theirs:.3g}"
    return None


def _unmet(claim: Claim, rows: Rows) -> str | None:
    """The first need whose gain does not lie above what is needed, interval and all, or that nobody measured; or None."""
    for need in claim.needs:
        runs = _last(claim._replace(metric=need.metric), rows, better=need.better, worse=need.worse)
        found = statistics.estimate(runs.worse - runs.better)
        if not found.low > need.gain:  # NaN of less than two seeds
            gains = f"{need.better} gains only {_words(found)}" if found.n else f"nobody knows what {need.better} gains"
            return f"{gains} over {need.worse} (needed {need.gain:g}), so this setting cannot tell"
    return None


def share(claim: Claim, rows: Rows) -> dict[str, Any]:
    """(higher - lower) / (higher - best), means over seeds, with a bootstrap interval that draws seeds.

    None of a whole that may be 0: its interval holds it.
    """
    arms = {name: getattr(claim, name)["arm"] for name in ("lower", "higher", "best")}
    runs = _last(claim, rows, **arms)
    if not len(runs):
        return {}
    part, whole = runs.higher - runs.lower, runs.higher - runs.best
    gained = statistics.estimate(whole)
    path = f"({arms['higher']} - {arms['lower']}) / ({arms['higher']} - {arms['best']})"
    text = f"{path} = {_words(statistics.estimate(part))} / {_words(gained)}"
    record = {"n": len(runs), "verdict": "inconclusive", "text": text}
    if why := unfit(claim, rows):
        return record | {"reason": why}
    if not gained.low > 0:
        return record | {"reason": f"{arms['best']} may gain nothing over {arms['higher']}, and nothing has no shares"}
    mean, low, high, n = statistics.share(part.to_numpy(), whole.to_numpy())
    text = f"{100 * mean:.0f} % [{100 * low:.0f}, {100 * high:.0f}]: {text}"
    return {"ours": mean, "interval": [low, high], "n": n, "verdict": "measured", "text": text}


def _last(claim: Claim, rows: Rows, **arms: str) -> pd.DataFrame:
    """The metric of some arms at their last evaluation, a row for each seed that all have."""
    found = {name: rows.history({"arm": arm}, claim.at, claim.metric, arm) for name, arm in arms.items()}
    ends = {name: history.iloc[-1] if len(history) else pd.Series(dtype=float) for name, history in found.items()}
    return pd.DataFrame(ends, columns=[*arms]).dropna()


def _words(found: statistics.Estimate) -> str:
    return digits.with_interval(found[:3])
