"""Verdicts: what the rows of a workdir say about the claims of its experiment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from absl import logging as log
from ml_collections import ConfigDict

from routed.analysis import statistics
from routed.analysis.claims import KINDS, Claim, Point
from routed.analysis.claims.claim import COMPARABILITIES, EFFECTS, TwoSides
from routed.analysis.claims.number import Measured
from routed.analysis.claims.rules import absent, inconclusive
from routed.analysis.claims.weaknesses import weakened
from routed.analysis.paired_values import ANY_FAIR, Rows
from routed.contracts import UserError, column_of, nearest
from routed.plan.arms import ARMS
from routed.plan.config import declared, problem_of
from routed.settings.tree import flatten


def judge(claims: tuple[Claim, ...], table: pd.DataFrame, config: ConfigDict, swept: list[str]) -> list[dict[str, Any]]:
    """Returns a record with the verdict of every claim, from all rows of the workdir.

    P values are adjusted over the family: all claims of one figure that have one. Numbers have none, since an adjusted
    test would find a paper's value reproduced more easily.
    """
    rows = Rows(table, config, swept, problem_of(config))
    records = [judge_one(claim, rows) for claim in claims]
    family = [(claim, record) for claim, record in zip(claims, records, strict=True) if record["p"] is not None]
    p_values = statistics.adjusted([record["p"] for _, record in family])
    for (claim, record), p in zip(family, p_values, strict=True):
        alpha = claim.setup.alpha
        record["p_adjusted"] = float(p)
        if record["verdict"] in ("supported", "opposite") and p >= alpha:
            reason = f"p = {p:.2g} after adjusting for {len(family)} tests, asked for: p < {alpha:g}"
            record.update(inconclusive({}, reason))
    return records


def judge_one(claim: Claim, rows: Rows) -> dict[str, Any]:
    """Returns the record of one claim by itself: its verdict, without adjustment, and the numbers behind the verdict.

    Raises:
      UserError: as `check`.
    """
    check(claim)
    setup = claim.setup
    record = {
        "id": claim.id,
        "kind": claim.kind,
        "comparability": setup.comparability,
        "statement": claim.statement,
        "metric": setup.metric,
        "at": setup.at,
        "paper": claim.paper,
        "ours": None,
        "interval": None,
        "later": None,
        "n": 0,
        "verdict": "not run",
        "reason": "",
        "p": None,
        "p_adjusted": None,
        "robustness": None,
        "text": "",
    } | _of_kind(claim, rows)
    record = weakened(claim, rows, record)
    if record["n"] and rows.config.scale == "smoke":
        reason = "a smoke run shows that the figure runs, not what it finds"
        record |= {"verdict": "not judged", "reason": reason, "p": None, "robustness": None}
    if not record["n"] and not record["text"]:
        record["text"] = absent(claim, rows)
        if reason := next(filter(None, (rows.all_diverged(side, at) for side, at in claim.reads())), ""):
            record |= {"verdict": "not judged", "reason": reason, "text": "no finite value"}
    return record


def _of_kind(claim: Claim, rows: Rows) -> dict[str, Any]:
    """Returns the record of the claim's kind; a kind that fails, such as a user's, costs no other verdict."""
    try:
        return {**claim.judge(rows)}
    except UserError:
        raise
    except Exception as error:
        log.exception("claim %s cannot be judged: %s: %s", claim.id, type(error).__name__, error)
        reason = f"its kind ended in an error: {type(error).__name__}: {error}"
        return {"verdict": "not judged", "reason": reason, "text": "an error"}


def check(claim: Claim) -> None:
    """Refuses a claim that nothing can judge.

    Raises:
      UserError: a kind that cannot be claimed against several controls.
    """
    if not claim.allows_fairest and any(side.get("arm") == ANY_FAIR for side in claim.sides()):
        allowed = " or ".join(name for name, kind in KINDS.items() if kind.allows_fairest)
        raise UserError(f"claim {claim.id}: only claims of kind {allowed} know the fairest control; name one arm")


def check_parts(claim: Claim, config: ConfigDict) -> None:
    """Refuses what would end in an error after training.

    Raises:
      UserError: an unknown unit, comparability, arm, setting or column; a side without an arm; words where a number is
        needed; the fairest control on the side that should do better; two sides that are one.
    """

    def refuse(reason: str) -> NoReturn:
        raise UserError(f"claim {claim.id}: {reason}")

    if claim.setup.unit not in EFFECTS:
        refuse(f"unit={claim.setup.unit!r}: use one of {', '.join(EFFECTS)}")
    if claim.setup.comparability not in COMPARABILITIES:
        refuse(f"comparability={claim.setup.comparability!r}: use one of {', '.join(COMPARABILITIES)}")
    metrics, columns, flat = [claim.setup.metric], problem_of(config).columns(config), flatten(config)
    arms = [arm for need in claim.setup.needs for arm in (need.better, need.worse)]
    keys = [*claim.setup.over]
    for side, at in claim.reads():
        if isinstance(side.get("value"), str):
            refuse(f"the side {dict(side)}: its value must be a number")
        metrics += [side["metric"]] if "metric" in side else []
        for key in {*side, *at} & {*flat}:
            if isinstance(value := {**at, **side}[key], str) != isinstance(flat[key], str):
                refuse(f"{key}={value!r} is {type(value).__name__}, must be {type(flat[key]).__name__}")
        keys += [key for key in (*side, *at) if key not in ("arm", "metric", "value")]
        arms += [side["arm"]] if side.get("arm", ANY_FAIR) != ANY_FAIR else []
        if "arm" not in side and not ("value" in side and claim.allows_value):
            refuse(f"the side {dict(side)} has no arm: write {{'arm': 'learned'}}, with settings beside it")
    for key in keys:
        if key not in declared():
            refuse(f"there is no setting {key!r}{nearest(key, declared())}")
    for arm in arms:
        if arm not in ARMS:
            refuse(f"there is no arm {arm!r}{nearest(arm, ARMS)}")
    for metric in metrics:
        if column_of(metric, columns) is None:
            refuse(f"there is no column {metric!r}{nearest(metric, columns)}")
    if claim.of_number and not isinstance(claim.paper, int | float | Measured):
        refuse(f"paper={claim.paper!r}: a claim of kind {claim.kind} needs the paper's number")
    if isinstance(claim.paper, Measured) and claim.paper.n < 2:
        refuse(f"paper={claim.paper}: a standard deviation needs 2 runs; give the number alone")
    if isinstance(claim, TwoSides):
        if claim.kind in ("order", "null") and claim.lower == claim.higher:
            refuse(f"both sides are {dict(claim.lower)}")
        column = column_of(claim.setup.metric, columns)
        better = claim.higher if column is not None and column.higher_is_better else claim.lower
        if better.get("arm") == ANY_FAIR:
            refuse("the fairest control must be the side that the claim says is worse")


def unanswered(claims: Iterable[Claim], config: ConfigDict, points: Iterable[Point]) -> list[Claim]:
    """Returns the claims that read a point which is not in a plan, whatever its arms."""
    flat, points = flatten(config), [*points] or [{}]
    planned: dict[tuple[str, ...], set[tuple]] = {}

    def is_planned(point: Point) -> bool:
        keys = tuple(sorted(point.keys() & flat.keys()))
        if keys not in planned:
            planned[keys] = {tuple(row.get(key, flat[key]) for key in keys) for row in points}
        return tuple(point[key] for key in keys) in planned[keys]

    return [claim for claim in claims if not all(is_planned({**at, **side}) for side, at in claim.reads())]


def to_json(records: list[dict[str, Any]] | dict[str, Any]) -> str:
    """Returns the text of claims.json; NaN becomes null."""

    def clean(value):
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(v) for v in value]
        if isinstance(value, np.generic):
            value = value.item()
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(clean(records), indent=1) + "\n"
