"""Verdicts and losses at each point of a sweep: a line for each claim and point, a table of every arm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import changed, digits, verdicts
from routed.analysis.claims import Claim
from routed.analysis.paired_values import ANY_FAIR
from routed.analysis.plots.frame import Data
from routed.analysis.plots.paired import advantage, advantage_label, rivals
from routed.engine.rows import at_base, format_value, plain_value
from routed.plan.arms import ARMS, fair_arms
from routed.plan.experiment import Figure
from routed.plan.points import Point
from routed.settings.tree import flatten

#: Most lines of a claim: nobody reads more, and each has to be judged.
MOST = 200

#: Entries of a verdict that its line keeps.
KEPT = ("ours", "interval", "n", "verdict", "text", "reason")


def add(
    judged: Sequence[dict[str, Any]],
    claims: Sequence[Claim],
    table: pd.DataFrame,
    config: ConfigDict,
    swept: list[str],
    figure_keys: Collection[str],
    changes: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Returns the verdicts with `points`: each claim judged again at every point at which it is tried.

    With `changes` of a figure's settings, lines of a paper's claims are the user's, as the claims are.

    A line is {point, ours, interval, n, verdict, text, reason}. A point without runs has no line, and a claim with a
    single line no list. The line of a claim's own point is its verdict. At another point the claims that are tried
    there are one family, whose p values are adjusted together. Of more than `MOST` points as many are judged, spread
    evenly over them; `points_there` counts all.
    """
    counts = [0 for _ in claims]
    lines: list[list[dict[str, Any]]] = [[] for _ in claims]
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, claim in enumerate(claims):
        groups.setdefault(tried(claim, swept, figure_keys, table), []).append(index)
    for keys, members in groups.items():
        points = table.groupby(list(keys), dropna=False) if keys else ()
        own_points = {index: _own_point(claims[index], keys, table, config) for index in members}
        chosen = {*np.linspace(0, len(points) - 1, min(MOST, len(points))).round().astype(int)}
        for index in members:
            counts[index] = len(points)
        for number, (values, rows) in enumerate(points):
            if number not in chosen:
                continue
            point = dict(zip(keys, map(as_python, values), strict=True))
            moved = tuple(claims[i].replace(at={**claims[i].setup.at, **point}, over=()) for i in members)
            for index, judged_there in zip(members, verdicts.judge(moved, rows, config, swept), strict=True):
                is_own = point == own_points[index]
                record = judged[index] if is_own else changed.filed(judged_there, changes)
                if record["n"]:
                    lines[index].append({"point": point} | {name: record[name] for name in KEPT})
    return [
        record | {"points": of_claim if len(of_claim) > 1 else [], "points_there": count}
        for record, of_claim, count in zip(judged, lines, counts, strict=True)
    ]


def _own_point(claim: Claim, keys: Sequence[str], table: pd.DataFrame, config: ConfigDict) -> Point:
    """Returns the values of swept keys at which the claim itself is judged."""
    at = {key: plain_value(claim.setup.at[key]) for key in keys if key in claim.setup.at}
    rest = at_base(table, [key for key in keys if key not in at], flatten(config))
    return {key: at[key] if key in at else as_python(rest[key].iloc[0]) for key in keys}


def tried(claim: Claim, swept: Sequence[str], figure_keys: Collection[str], table: pd.DataFrame) -> tuple[str, ...]:
    """Returns the swept keys over which a claim is tried: its nuisance keys, and keys that no point of the figure sets.

    Keys that a side fixes are left out, and keys that no arm of the claim reads: its runs are the same at each value.
    """
    fixed = {key for side in claim.sides() for key in side}
    keys = [key for key in swept if (key in claim.setup.over or key not in figure_keys) and key not in fixed]
    names = {side.get("arm") for side in claim.sides()}
    runs = table[table.arm.isin({*names, *(fair_arms() if ANY_FAIR in names else ())})]
    values = runs.groupby("run")[keys].nunique().min()
    return tuple(key for key in keys if not values[key] == runs[key].nunique() > 1)


def claims_of(asked: Figure, config: ConfigDict, table: pd.DataFrame, swept: list[str]) -> tuple[Claim, ...]:
    """Returns the claims of a figure at the points that ran (`with_rows`)."""
    return with_rows(asked.claims(config), config, table[swept].drop_duplicates().to_dict("records"))


def with_rows(claims: Iterable[Claim], config: ConfigDict, points: Sequence[Point]) -> tuple[Claim, ...]:
    """Returns the claims; one at a nuisance value that no point has moves to another one, and its statement says so."""
    flat, moved = flatten(config), list[Claim]()
    for claim in claims:
        at, replaced = dict(claim.setup.at), list[str]()
        for key in [key for key in at if key in claim.setup.over]:
            values = {plain_value(point.get(key, flat[key])) for point in points or ({},)}
            if plain_value(at[key]) not in values:
                replaced.append(f"{key} = {format_value(at[key])}")
                at[key] = plain_value(flat[key]) if plain_value(flat[key]) in values else max(values)
        here = ", ".join(f"{key} = {format_value(at[key])}" for key in at if at[key] != claim.setup.at[key])
        statement = f"{claim.statement} (at {here}: no run has {', '.join(replaced)})"
        moved.append(claim.replace(at=at, statement=statement) if replaced else claim)
    return tuple(moved)


def by_arm(summary: pd.DataFrame, data: Data, methods: Mapping[str, Point]) -> pd.DataFrame:
    """Returns the loss of every arm at every point with its interval, and of the controls against the learned router.

    A cell names its n if most cells have another. If the `methods` that figures name cover all points, a method's name
    replaces its settings.
    """
    keys, losses = data.varying, summary[summary.metric == data.loss]
    usual_n = float(losses.n.mode().iloc[0]) if len(losses) else 0.0
    columns = [*keys, "arm", "mean", "low", "high", "n"]
    texts = {
        (*point, arm): _interval_text(mean, low, high, n, usual_n)
        for *point, arm, mean, low, high, n in losses[columns].itertuples(index=False)
    }
    present = set(data.last.arm)
    arms, controls = [arm for arm in ARMS if arm in present], rivals(data)[:1]
    keys_of_methods, names = _method_names(methods, data)
    lines = []
    for values, rows in data.last.groupby(keys, dropna=False) if keys else [((), data.last)]:
        at = dict(zip(keys, map(as_python, values), strict=True))
        line = {"method": names[tuple(at[key] for key in keys_of_methods)]} if keys_of_methods else {}
        line |= {key: format_value(value) for key, value in at.items() if key not in keys_of_methods}
        ran = set(rows.arm)
        line |= {arm: texts.get((*values, arm), "diverged" if arm in ran else "") for arm in arms}
        for control in controls:
            estimate, _ = advantage(rows, control, data)
            text = _interval_text(*estimate, usual_n) if np.isfinite(estimate.mean) else ""
            line[advantage_label(control, data)] = text
        lines.append(line)
    table = pd.DataFrame(lines)
    if not keys_of_methods:
        return table
    return table.sort_values("method", key=lambda column: column.map([*methods].index), kind="stable")


def _method_names(methods: Mapping[str, Point], data: Data) -> tuple[list[str], dict[tuple, str]]:
    """Returns the varying keys that methods set, and value -> method; nothing if a point belongs to no method."""
    keys = [key for key in data.varying if any(key in point for point in methods.values())]
    names = {
        tuple(plain_value(point.get(key, data.base[key])) for key in keys): name for name, point in methods.items()
    }
    points = {tuple(map(as_python, values)) for values in data.last[keys].drop_duplicates().itertuples(index=False)}
    return (keys, names) if points <= {*names} else ([], {})


def _interval_text(mean: float, low: float, high: float, n: float, usual_n: float) -> str:
    return digits.with_interval((mean, low, high)) + (f" n={n:.0f}" if n != usual_n else "")


def as_python(value: Any) -> Any:
    """Returns a value of a column as a Python object."""
    return value.item() if isinstance(value, np.generic) else value
