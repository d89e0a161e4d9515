"""The table of arms at each point, of which a report shows one first, and the arms that need no network."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import diagnosis, digits, shapley, statistics
from routed.analysis.paired_values import fair_gap, paired
from routed.analysis.plots import curves, frame
from routed.analysis.plots.frame import Data
from routed.contracts import UserError
from routed.engine.rows import format_value
from routed.plan.arms import ARMS, REFERENCE, changes_of
from routed.plan.config import canonical, problem_of
from routed.plan.runs import static_key
from routed.settings.tree import override, parse

#: Points of a page's menu, at most.
MOST = 24

#: Metrics after the losses, if the rows have them: dead experts, and the information of experts about the labels.
AFTER_LOSSES = ("router/dead", "router/ami", "router/mi_language_given_token")

#: Other losses of the same runs, beside the loss by which arms are compared.
OTHER_LOSSES = ("test/loss_soft", "test/accuracy", "eval/accuracy")

#: Definitions of headings that are no metric.
FLOPS = (
    "Floating-point operations of a training step for each token: 6 for every parameter that serves it (2 forward, 4"
    " backward). A soft mixture computes all experts, a top-1 router one."
)
PARAMETERS = "Weights of the whole model, all experts and the router included."
SEEDS = (
    "Runs of the arm, each with its own data, order and initial weights, which the arms of a seed share."
    " Intervals are over these."
)


class Heading(NamedTuple):
    """A column of the table: its label and its definition."""

    words: str
    definition: str


class Cell(NamedTuple):
    """A mean and its interval, as text."""

    value: str
    interval: str = ""


class Table(NamedTuple):
    """Headings, the kind of their means, and a line for each arm: name, label, colour, and a cell for each heading."""

    headings: list[Heading]
    means: str
    lines: list[dict[str, Any]]


class AtPoint(NamedTuple):
    """A point of a page's menu: the values that tell it from others, all its settings, the arms, the gap decomposed."""

    values: dict[str, str]
    at: str
    is_first: bool
    standings: Table
    gap: list[dict[str, Any]]
    shares: list[dict[str, Any]]


def by_point(data: Data, config: ConfigDict) -> list[AtPoint]:
    """Returns the arms at the points, of more than `MOST` some, spread evenly; `is_first`: that of the claims."""
    if not len(data.last):
        return []
    keys, first = data.varying, data.at_point(data.last, {})
    groups = [rows for _, rows in data.last.groupby(keys, dropna=False)] if keys else [first]
    chosen = {*np.linspace(0, len(groups) - 1, min(MOST, len(groups))).round().astype(int)}
    points = []
    for number, rows in enumerate(groups):
        is_first = rows.index.equals(first.index)
        if not (is_first or number in chosen):
            continue
        values = {key: rows[key].iloc[:1].tolist()[0] for key in data.swept}
        texts = {key: parse(config, key, value) for key, value in values.items() if isinstance(value, str)}
        standings = table(rows, data, override(config, values | texts))
        at = ", ".join(f"{key} = {value}" for key, value in values.items()) or "the only point"
        gaps = [table.to_dict("records") for table in (diagnosis.gap(rows), shapley.shares(rows))]
        points.append(AtPoint({key: format_value(values[key]) for key in keys}, at, is_first, standings, *gaps))
    return points


def behind(data: Data) -> list[str]:
    """Returns a sentence for each model without a network, or constant, that arms do not beat, with these arms."""
    column, worse = data.axes[data.loss], dict[str, dict[str, list[str]]]()
    for _, rows in data.last.groupby([*data.varying, "arm"], dropna=False):
        ours = rows[data.loss][rows.status == "ok"].mean()  # a constant has the mean of its losses too, not of logs
        for label, theirs in curves.simple(rows, data).items():
            if ours >= theirs:
                where = ", ".join(f"{key} = {format_value(rows[key].iloc[0])}" for key in data.varying)
                text = f"{ours:.3g} against {theirs:.3g}" + (f" at {where}" if where else "")
                worse.setdefault(label, {}).setdefault(rows.arm.iloc[0], []).append(text)
    sentences = []
    for label, arms in worse.items():
        texts = [f"{arm} ({of[0]}{f'; at {len(of)} points' if of[1:] else ''})" for arm, of in arms.items()]
        sentences.append(f"No better than the {label}, by {' '.join(column.label.split())}: {', '.join(texts)}.")
    return sentences


def table(rows: pd.DataFrame, data: Data, config: ConfigDict) -> Table:
    """Returns the arms at one point, the best first: losses, dead experts, information, cost and seeds.

    `rows` are the last rows at the point, `config` is the config of the point.
    """
    good = rows[rows.status == "ok"]
    arms = [arm for arm in ARMS if arm in set(rows.arm)]
    losses = {arm: frame.mean(good[good.arm == arm][data.loss], data.axes[data.loss]).mean for arm in arms}
    metrics = [name for name in (*OTHER_LOSSES, *AFTER_LOSSES) if name in good and good[name].notna().any()]
    before = [name for name in metrics if name in OTHER_LOSSES]
    rival = _rival(good, data)
    cost = {arm: _cost(config, arm) for arm in arms}
    headings = [_heading(data.loss, data), *(_heading(name, data) for name in before)]
    headings += [_against(rival, data)] if rival else []
    headings += [_heading(name, data) for name in metrics if name not in OTHER_LOSSES]
    headings += [Heading("FLOPs a token", FLOPS), Heading("parameters", PARAMETERS), Heading("n", SEEDS)]
    lines = []
    for arm in sorted(arms, key=lambda arm: losses[arm] if np.isfinite(losses[arm]) else np.inf):
        finite, diverged = good[good.arm == arm], rows[(rows.arm == arm) & (rows.status == "diverged")]
        cells = [_cell(finite, name, data) for name in (data.loss, *before)]
        cells += [_beside(good, arm, rival, data)] if rival else []
        cells += [_cell(finite, name, data) for name in metrics if name not in OTHER_LOSSES]
        cells += [Cell(_large(cost[arm][0])), Cell(_large(cost[arm][1]))]
        cells += [Cell(f"{len(finite)}", f"{len(diverged)} diverged" if len(diverged) else "")]
        lines.append({"arm": arm, "label": ARMS[arm].label, "colour": ARMS[arm].colour, "cells": cells})
    logs = [head.words for name, head in zip((data.loss, *before), headings, strict=False) if data.axes[name].log]
    means = f"geometric means of {' and '.join(logs)}, as in figures and ratios, arithmetic means of the rest"
    return Table(headings, means if logs else "arithmetic means", lines)


def _rival(good: pd.DataFrame, data: Data) -> str | None:
    """Returns the fairest control at the point, or the learned router, or None if neither ran."""
    fairest = fair_gap(good, data.loss, data.axes[data.loss].log)
    return fairest.name if fairest else REFERENCE if REFERENCE in set(good.arm) else None


def _heading(metric: str, data: Data) -> Heading:
    column = data.axes[metric]
    return Heading(" ".join(column.label.split()), column.definition)


def _against(rival: str, data: Data) -> Heading:
    name = "learned router" if rival == REFERENCE else "fairest control"
    operator = "over" if data.axes[data.loss].log else "minus"
    definition = (
        f"The arm's loss {operator} that of “{ARMS[rival].label}” ({rival}), paired by seed, with its 95 % t interval: "
    )
    definition += "below 1 the arm is better." if operator == "over" else "below 0 the arm is better (nats per token)."
    if rival != REFERENCE:
        definition += (
            " The fairest control is the frozen router with the lowest loss here, of those that answer a confound"
            " (as sharp as the learned one, trained as evaluated, rows from data, k-means) and did control it. The"
            " learned router's interval knows that it was chosen among several."
        )
    return Heading(f"against the {name}", definition)


def _cell(rows: pd.DataFrame, metric: str, data: Data) -> Cell:
    """Returns a mean with its interval, both as in figures: geometric on log axes."""
    mean, low, high, n = frame.mean(rows[metric], data.axes[metric])
    if metric == "router/dead":
        return _interval(statistics.Estimate(100 * mean, 100 * low, 100 * high, n), unit=" %")
    return _interval(statistics.Estimate(mean, low, high, n))


def _interval(estimate: statistics.Estimate, sign: str = "", unit: str = "") -> Cell:
    if not np.isfinite(estimate.mean):
        return Cell("–")
    mean, *ends = digits.parts(estimate[:3], sign)
    return Cell(mean + unit, f"[{', '.join(ends)}]" if len({*ends}) > 1 else "")


def _beside(good: pd.DataFrame, arm: str, rival: str, data: Data) -> Cell:
    """Returns the arm's loss over the rival's, or minus it if the loss has no log axis, paired by seed."""
    if arm == rival:
        return Cell("is it" if rival != REFERENCE else "–")
    log = data.axes[data.loss].log
    fairest = fair_gap(good, data.loss, log) if arm == REFERENCE else None
    ahead = fairest.estimate if fairest else statistics.estimate(paired(good, rival, arm, data.loss, log))
    mean, low, high = (float(np.exp(-end)) if log else -end for end in (ahead.mean, ahead.high, ahead.low))
    return _interval(statistics.Estimate(mean, low, high, ahead.n), "" if log else "+")


def _large(value: float | None) -> str:
    """Returns a number with three digits and a unit of thousands."""
    if value is None:
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


#: static settings -> FLOPs of a training step for each token, and parameters: arms that share a program share these.
_COSTS: dict[str, tuple[float | None, int | None]] = {}


def _cost(config: ConfigDict, arm: str) -> tuple[float | None, int | None]:
    """Returns FLOPs of a training step for each token, and parameters; None if they cannot be computed here."""
    try:
        arm_config = canonical(override(config, changes_of(arm, config)))
        if (key := static_key(arm_config)) not in _COSTS:
            cost = problem_of(arm_config).cost(arm_config)
            _COSTS[key] = cost.flops / cost.tokens, cost.parameters() if cost.parameters else None
        return _COSTS[key]
    except (UserError, LookupError, ValueError):  # missing text or images, or a value that this version does not know
        return None, None
