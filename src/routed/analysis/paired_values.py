"""The values that a claim compares: arms at one point, paired by seed, now and extrapolated to more steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import controls, statistics
from routed.contracts import Column, UserError, column_of
from routed.engine.rows import at_base, format_value, last_evaluations, plain_value
from routed.plan.arms import ARMS, REFERENCE, changes_of, fair_arms
from routed.settings.tree import flatten, override

if TYPE_CHECKING:
    from routed.training.problem import ProblemPart

#: An arm ("fairest": each fair control in turn) with swept keys, and a `metric` in place of the claim's; or a constant
#: `value`.
Side = Mapping[str, Any]
#: Swept keys and their values.
Point = Mapping[str, Any]

#: The name that stands for all fair controls in a side of a claim.
ANY_FAIR = "fairest"


class Rows:
    """The rows of a workdir: `last` holds the last row of each run; `loss` is the column of its problem's loss."""

    def __init__(self, table: pd.DataFrame, config: ConfigDict, swept: list[str], problem: ProblemPart):
        self.last, self.config, self.swept, self.loss = last_evaluations(table), config, swept, problem.loss
        self._columns_of = problem.columns
        self._columns: dict[tuple, Mapping[str, Column]] = {}
        self._table, self._base = table, flatten(config)
        self._points: dict[tuple, pd.DataFrame] = {}
        self._indices_of_run: Mapping[str, np.ndarray] = table.groupby("run").indices if len(table) else {}

    def at(self, filters: Point) -> pd.DataFrame:
        """Returns the last rows at one point.

        A swept key without a filter is fixed at one value (`at_base`), so that no claim pools points.
        """
        point = tuple(sorted(filters.items()))
        if point not in self._points:  # the claims of a figure ask for few points, and many times for each
            self._points[point] = self._select(filters)
        return self._points[point]

    def column(self, metric: str, at: Point) -> Column | None:
        """Returns the column of a metric at a point, where a swept loss or task may have other constants; or None."""
        moved = {key: value for key, value in at.items() if key == "loss" or key.startswith("data.")}
        point = tuple(sorted(moved.items()))
        if point not in self._columns:
            self._columns[point] = self._columns_of(self.config)
            if any(self._base.get(key) != value for key, value in point):
                with contextlib.suppress(UserError, LookupError):  # a point of a table without such a task
                    self._columns[point] = self._columns_of(override(self.config, moved))
        return column_of(metric, self._columns[point])

    def _select(self, filters: Point) -> pd.DataFrame:
        rows = self.last
        for key, value in filters.items():
            if key not in rows:
                rows = rows if plain_value(self._base.get(key)) == plain_value(value) else rows.iloc[:0]
                continue
            same = (
                np.isclose(rows[key], value, rtol=1e-9, atol=0)
                if isinstance(value, float)
                else rows[key] == plain_value(value)
            )
            rows = rows[same]
        return at_base(rows, [key for key in self.swept if key not in filters], self._base)

    def arms(self, side: Side, at: Point) -> list[str]:
        """Returns the arms of a side with finite runs at a point.

        For "fairest" these are all fair controls that worked; a constant has none.
        """
        if "value" in side:
            return []
        rows = self.at(_point_of(side, at))
        present = set(rows[rows.status == "ok"].arm)
        return [arm for arm in (_fair(rows) if side["arm"] == ANY_FAIR else [side["arm"]]) if arm in present]

    def all_diverged(self, side: Side, at: Point) -> str:
        """Returns "all 4 runs of learned diverged" for a side whose runs all did, or else ""."""
        rows = self.at(_point_of(side, at)) if "arm" in side else self.last.iloc[:0]
        status = rows.status[rows.arm == side["arm"]] if len(rows) else ()
        return f"all {len(status)} runs of {side['arm']} diverged" if {*status} == {"diverged"} else ""

    def absent(self, side: Side, at: Point) -> str:
        """Returns the reason why no arm of a side has a finite run at a point, or "" (an empty text)."""
        if self.arms(side, at):
            return ""
        is_any, point = side["arm"] == ANY_FAIR, _point_of(side, at)
        name, ran = "a fair control" if is_any else side["arm"], self.last
        ran = ran[ran.arm.isin(fair_arms() if is_any else [name])]
        if not len(ran) or self.at(point).run.isin(ran.run).any():
            return f"no {'finite ' if len(ran) else ''}run of {name}"
        for key, value in point.items():
            values = sorted(ran[key].unique()) if key in ran else [self._base[key]]
            if plain_value(value) not in values:
                return f"no run at {key} = {format_value(value)}, only at {', '.join(map(format_value, values))}"
        return f"no run of {name} at {', '.join(f'{key} = {format_value(value)}' for key, value in point.items())}"

    def failed_control(self, side: Side, at: Point) -> str | None:
        """Returns the reason why the arm of a side is no control at a point, or None."""
        rows = self.at(_point_of(side, at)) if "arm" in side else pd.DataFrame()
        if not len(rows):
            return None
        reason = controls.failed(rows, self.loss).get(side["arm"])
        return f"{side['arm']} is no control: {reason}" if reason else None

    def missing_controls(self, side: Side, at: Point) -> list[str]:
        """Returns the fair controls of the config without a finite run at a point, or that are no controls there.

        Nothing for a side that is one arm: a claim against the fairest control is about all that its figure asks for.
        """
        if side.get("arm") != ANY_FAIR:
            return []
        rows = self.at(_point_of(side, at))
        present = set(rows.arm[rows.status == "ok"]) - set(controls.failed(rows, self.loss))
        return [arm for arm in fair_arms() if arm in self.config.arms and arm not in present]

    def runs(self, side: Side, at: Point, arm: str) -> pd.DataFrame:
        """Returns the last rows of an arm's finite runs at the point of a side."""
        rows = self.at(_point_of(side, at))
        return rows[(rows.arm == arm) & (rows.status == "ok")]

    def lost(self, side: Side, at: Point, metric: str) -> list[str]:
        """Returns a text for each arm of a side that lost runs: "1 of 4 runs of learned diverged", or lack the metric.

        A `metric` of the side's own comes before that of the arguments.
        """
        rows = self.at(_point_of(side, at)) if "arm" in side else self.last.iloc[:0]
        name, texts = side.get("metric", metric), []
        for arm in self.arms(side, at):
            runs = rows[rows.arm == arm].drop_duplicates("run")
            diverged = runs.status == "diverged"
            empty = ~diverged & ~np.isfinite(runs[name]) if name in runs else ~diverged & False
            texts += [
                f"{count} of {len(runs)} runs of {arm} {what}"
                for count, what in ((diverged.sum(), "diverged"), (empty.sum(), f"end without {name}"))
                if count
            ]
        return texts

    def label(self, side: Side, other_side: Side, arm: str) -> str:
        """Returns the arm of a side and the settings that tell it from the other side.

        If the arms differ, settings that equal the figure's config are left out.
        """
        same_arm = side.get("arm") == other_side.get("arm")
        settings = {
            key: value for key, value in side.items() if key not in ("arm", "value") and other_side.get(key) != value
        }
        texts = [
            f"{key}={format_value(value)}"
            for key, value in settings.items()
            if same_arm or value != self._base.get(key)
        ]
        return " ".join(filter(None, [arm, *texts]))

    def rate_at_edge(self, side: Side, at: Point) -> str | None:
        """Names an arm of a side that chose the lowest or highest rate that was tried, or returns None."""
        for arm in self.arms(side, at):
            runs = self.runs(side, at, arm)
            if (chosen := at_edge(runs, self.config)).any():
                run, more = runs[chosen].iloc[0], ("", "")
                if np.isfinite(router := run.get("train/router_rate", np.nan)):
                    more = f", and {router:g} as the router's rate", " or tune.router_multipliers"
                scale = run["train/rate_scale"]
                text = f"{arm} chose {scale:g} times its rates{more[0]}, the edge of what was tried"
                return f"{text}: widen tune.multipliers{more[1]}"
        return None

    def history(self, side: Side, at: Point, metric: str, arm: str = "") -> pd.DataFrame:
        """Returns the metric of an arm's runs, a row for each step and a column for each seed; empty without values.

        `arm` is that of the side, unless the side has several. A `metric` of the side's own comes before that of the
        arguments.
        """
        runs, name = self.runs(side, at, arm or side["arm"]), side.get("metric", metric)
        if not len(runs) or name not in self._table:
            return pd.DataFrame()
        rows = self._table.iloc[np.concatenate([self._indices_of_run[run] for run in runs.run])]
        rows = rows.drop_duplicates(["run", "step"])  # a run has rows at every point that asks for it
        # A seed that ends without a number is left out: else `dropna` below would end all seeds at its last number.
        last = rows.sort_values("step").drop_duplicates("seed", keep="last")
        finished = last.seed[np.isfinite(last[name])]
        history = rows[rows.seed.isin(finished)].pivot(index="step", columns="seed", values=name).dropna()
        return history if history.size else pd.DataFrame()

    def final_values(self, side: Side, at: Point, metric: str) -> pd.Series:
        """Returns the metric of a side's arm at the last evaluation, by seed; empty without values."""
        history = self.history(side, at, metric)
        return history.iloc[-1] if len(history) else pd.Series(dtype=float)


def at_edge(rows: pd.DataFrame, config: ConfigDict) -> pd.Series:
    """Marks the runs whose tuned rates are at the edge of the grid; none if the grid has one value."""
    tuned = rows.rates == "tuned" if "rates" in rows else pd.Series(config.rates == "tuned", rows.index)
    edge = pd.Series(False, rows.index)
    key = "router.learning_rate"
    rates = {arm: rate for arm in rows.arm.unique() if arm in ARMS and (rate := changes_of(arm, config).get(key))}
    rate = rows.arm.map(rates).fillna(rows.get(key, config.router.learning_rate))
    grids = (
        ("train/rate_scale", config.tune.multipliers, 1.0),
        ("train/router_rate", config.tune.router_multipliers, rate),
    )
    for column, grid, base in grids:
        if len(grid) > 1 and column in rows:
            factor = rows[column] / base
            edge |= np.isclose(factor, min(grid)) | np.isclose(factor, max(grid))
    return tuned & edge


def _fair(rows: pd.DataFrame) -> list[str]:
    """Returns the fair controls that changed at a point what they were meant to change."""
    failed = controls.failed(rows, "test/loss")
    return [arm for arm in fair_arms() if arm not in failed]


def _point_of(side: Side, at: Point) -> dict[str, Any]:
    """Returns a point with the swept keys that the side fixes itself."""
    return {**at, **{key: value for key, value in side.items() if key not in ("arm", "metric", "value")}}


def ends(history: pd.DataFrame, horizon: float, logs: bool) -> pd.DataFrame:
    """Returns by seed the last value, `now`, and an extrapolated value, `later`; in logarithms if `logs`.

    `later` is the value at `horizon` times the steps; NaN if the second half of training has a single evaluation.
    """
    if not len(history):
        return pd.DataFrame({"now": [], "later": []}, dtype=float)
    values = history.to_numpy(float)
    values = np.log(np.maximum(values, statistics.TINY)) if logs else values
    later = statistics.extrapolate(history.index.to_numpy(float), values, horizon)
    return pd.DataFrame({"now": values[-1], "later": later}, index=history.columns)


def paired(rows: pd.DataFrame, worse: str, better: str, metric: str, logs: bool = True) -> pd.Series:
    """Returns log(worse / better), or the difference, by seed at one point; seeds with a diverged run are left out."""
    if metric not in rows:
        return pd.Series(dtype=float)
    good = rows[rows.status == "ok"]  # a pivot table of all arms takes twice as long
    sides = [good.loc[good.arm == arm].groupby("seed")[metric].mean().dropna() for arm in (worse, better)]
    first, second = (side.loc[sides[0].index.intersection(sides[1].index)] for side in sides)
    return pd.Series(statistics.log_ratio(first.to_numpy(), second.to_numpy()), first.index) if logs else first - second


def fair_gap(
    rows: pd.DataFrame, metric: str = "test/loss", logs: bool = True, arm: str = REFERENCE
) -> statistics.Least | None:
    """Returns log(control / arm), or the difference, of the fairest control at one point; None without a control.

    Its interval accounts for the choice among controls (`statistics.versus_best`).
    """
    controls = [control for control in _fair(rows) if control != arm]
    gaps = {control: values for control in controls if len(values := paired(rows, control, arm, metric, logs))}
    return statistics.versus_best(gaps) if gaps else None
