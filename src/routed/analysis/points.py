"""What is seen at each point of a sweep: every claim as a line, every arm in a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import digits, verdicts
from routed.analysis.claims import Claim
from routed.analysis.plots.frame import Data
from routed.analysis.plots.paired import advantage, advantage_words, rivals
from routed.engine.rows import plain, shown
from routed.plan.arms import ARMS
from routed.plan.points import Point

#: Lines of a claim, at most: nobody reads more, and each has to be judged.
MOST = 200

#: What a line keeps of the verdict at its point.
KEPT = ("ours", "interval", "n", "verdict", "text", "reason")


def add(
    judged: Sequence[dict[str, Any]],
    claims: Sequence[Claim],
    table: pd.DataFrame,
    config: ConfigDict,
    swept: list[str],
    own: Collection[str],
) -> list[dict[str, Any]]:
    """The verdicts with `points`: each claim judged again at every value of the swept keys at which it is tried.

    A line is {point, ours, interval, n, verdict, text, reason}; there is none where nothing ran, and no list of a single line. The
    claims that are tried at one point are one family, whose p values are adjusted together. Of more than `MOST` points, as many
    spread evenly over them; `points_there` counts all.
    """
    there = [0 for _ in claims]
    lines: list[list[dict[str, Any]]] = [[] for _ in claims]
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, claim in enumerate(claims):
        groups.setdefault(tried(claim, swept, own), []).append(index)
    for keys, members in groups.items():
        places = table.groupby(list(keys), dropna=False) if keys else ()
        chosen = {*np.linspace(0, len(places) - 1, min(MOST, len(places))).round().astype(int)}
        for index in members:
            there[index] = len(places)
        for place, (values, rows) in enumerate(places):
            if place not in chosen:
                continue
            point = dict(zip(keys, map(as_python, values), strict=True))
            moved = tuple(claims[index]._replace(at={**claims[index].at, **point}, over=()) for index in members)
            for index, record in zip(members, verdicts.judge(moved, rows, config, swept), strict=True):
                if record["n"]:
                    lines[index].append({"point": point} | {name: record[name] for name in KEPT})
    return [
        record | {"points": of_claim if len(of_claim) > 1 else [], "points_there": count}
        for record, of_claim, count in zip(judged, lines, there, strict=True)
    ]


def tried(claim: Claim, swept: Sequence[str], own: Collection[str]) -> tuple[str, ...]:
    """The swept keys at whose values a claim makes sense: its nuisance keys, and those that the user sweeps on top of the file's `own`.

    None that one of its sides fixes.
    """
    fixed = {*claim.lower, *claim.higher}
    return tuple(key for key in swept if (key in claim.over or key not in own) and key not in fixed)


def by_arm(summary: pd.DataFrame, data: Data, methods: Mapping[str, Point]) -> pd.DataFrame:
    """The loss of every arm at every point, mean and 95 % interval, and what the frozen controls lose against the learned router.

    n stands where it is not that of most. Where the `methods` that figures name cover all points, a method's name stands in place of its settings.
    """
    keys, losses = data.varying, summary[summary.metric == data.loss]
    usual = float(losses.n.mode().iloc[0]) if len(losses) else 0.0
    texts = {
        (*place, arm): _words(mean, low, high, n, usual)
        for *place, arm, mean, low, high, n in losses[[*keys, "arm", "mean", "low", "high", "n"]].itertuples(
            index=False
        )
    }
    present = set(data.last.arm)
    arms, controls = [arm for arm in ARMS if arm in present], rivals(data)[:1]
    told, names = _named(methods, data)
    lines = []
    for place, rows in data.last.groupby(keys, dropna=False) if keys else [((), data.last)]:
        at = dict(zip(keys, map(as_python, place), strict=True))
        line = {"method": names[tuple(at[key] for key in told)]} if told else {}
        line |= {key: shown(value) for key, value in at.items() if key not in told}
        ran = set(rows.arm)
        line |= {arm: texts.get((*place, arm), "diverged" if arm in ran else "") for arm in arms}
        for control in controls:
            estimate, _ = advantage(rows, control, data)
            line[advantage_words(control, data)] = _words(*estimate, usual) if np.isfinite(estimate.mean) else ""
        lines.append(line)
    table = pd.DataFrame(lines)
    return (
        table.sort_values("method", key=lambda column: column.map([*methods].index), kind="stable") if told else table
    )


def _named(methods: Mapping[str, Point], data: Data) -> tuple[list[str], dict[tuple, str]]:
    """The varying keys that methods set, and the method that has these values; none where a point is nobody's."""
    told = [key for key in data.varying if any(key in point for point in methods.values())]
    names = {tuple(plain(point.get(key, data.base[key])) for key in told): name for name, point in methods.items()}
    there = {tuple(map(as_python, place)) for place in data.last[told].drop_duplicates().itertuples(index=False)}
    return (told, names) if there <= {*names} else ([], {})


def _words(mean: float, low: float, high: float, n: float, usual: float) -> str:
    return digits.with_interval((mean, low, high)) + (f" n={n:.0f}" if n != usual else "")


def as_python(value: Any) -> Any:
    """A value of a column as Python has it."""
    return value.item() if isinstance(value, np.generic) else value
