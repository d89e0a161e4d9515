"""The values that a claim compares: one arm at one point, paired by seed, now and if training went on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import controls, statistics
from routed.engine.rows import at_base, last, plain, shown
from routed.plan.arms import REFERENCE, fair_arms
from routed.plan.config import problem_of
from routed.settings.tree import flatten

#: The name that stands for all fair controls in a side of a claim.
ANY_FAIR = "fairest"


class Rows:
    """The last rows of each run, and the evaluations before them."""

    def __init__(self, table: pd.DataFrame, config: ConfigDict, swept: list[str]):
        self.last, self.config, self.swept = last(table), config, swept
        self._table, self._base = table, flatten(config)
        self._points: dict[tuple, pd.DataFrame] = {}
        self._places: Mapping[str, np.ndarray] = table.groupby("run").indices if len(table) else {}

    def at(self, filters: Mapping[str, Any]) -> pd.DataFrame:
        """Last rows at one point: swept keys without a filter are settled, so that no claim pools points."""
        point = tuple(sorted(filters.items()))
        if point not in self._points:  # the claims of a figure ask for few points, and many times for each
            self._points[point] = self._find(filters)
        return self._points[point]

    def _find(self, filters: Mapping[str, Any]) -> pd.DataFrame:
        rows = self.last
        for key, value in filters.items():
            if key not in rows:
                return rows.iloc[:0]
            same = np.isclose(rows[key], value, rtol=1e-9) if isinstance(value, float) else rows[key] == plain(value)
            rows = rows[same]
        return at_base(rows, [key for key in self.swept if key not in filters], self._base)

    def arms(self, side: Mapping[str, Any], at: Mapping[str, Any]) -> list[str]:
        """The arms of a side that have finite runs at a point: its own, or every fair control that did control.

        None of a constant.
        """
        if "value" in side:
            return []
        rows = self.at(_place(side, at))
        present = set(rows[rows.status == "ok"].arm)
        return [arm for arm in (_fair(rows) if side["arm"] == ANY_FAIR else [side["arm"]]) if arm in present]

    def missed(self, side: Mapping[str, Any], at: Mapping[str, Any]) -> str | None:
        """Why the arm of a side is no control at a point, or None."""
        rows = self.at(_place(side, at)) if "arm" in side else pd.DataFrame()
        if not len(rows):
            return None
        why = controls.missed(rows, problem_of(self.config).loss).get(side["arm"])
        return f"{side['arm']} is no control: {why}" if why else None

    def runs(self, side: Mapping[str, Any], at: Mapping[str, Any], arm: str) -> pd.DataFrame:
        """The last rows of an arm's finite runs at the point of a side."""
        rows = self.at(_place(side, at))
        return rows[(rows.arm == arm) & (rows.status == "ok")]

    def diverged(self, side: Mapping[str, Any], at: Mapping[str, Any]) -> list[str]:
        """What each arm of a side lost: "1 of 4 runs of learned diverged"."""
        rows = self.at(_place(side, at)) if "arm" in side else self.last.iloc[:0]
        runs = {arm: rows[rows.arm == arm].drop_duplicates("run").status == "diverged" for arm in self.arms(side, at)}
        return [f"{lost.sum()} of {len(lost)} runs of {arm} diverged" for arm, lost in runs.items() if lost.any()]

    def words(self, side: Mapping[str, Any], other: Mapping[str, Any], arm: str) -> str:
        """The arm of a side and what tells it from the other side; of different arms nothing that the figure's config says already."""
        alike = side.get("arm") == other.get("arm")
        own = {key: value for key, value in side.items() if key not in ("arm", "value") and other.get(key) != value}
        told = [f"{key}={shown(value)}" for key, value in own.items() if alike or value != self._base.get(key)]
        return " ".join(filter(None, [arm, *told]))

    def edge(self, side: Mapping[str, Any], at: Mapping[str, Any]) -> str | None:
        """Which arm of a side chose the lowest or highest rate that was tried, beyond which a better one may lie; or None."""
        for arm in self.arms(side, at):
            runs = self.runs(side, at, arm)
            if (chosen := at_edge(runs, self.config)).any():
                scale = runs["train/rate_scale"][chosen].iloc[0]
                return f"{arm} chose {scale:g} times its rates, the edge of what was tried: widen tune.multipliers"
        return None

    def history(self, side: Mapping[str, Any], at: Mapping[str, Any], metric: str, arm: str) -> pd.DataFrame:
        """The metric of an arm's runs [evaluations, seeds] with steps and seeds as labels; empty where there is none."""
        runs, name = self.runs(side, at, arm), side.get("metric", metric)
        if not len(runs) or name not in self._table:
            return pd.DataFrame()
        rows = self._table.iloc[np.concatenate([self._places[run] for run in runs.run])]
        rows = rows.drop_duplicates(["run", "step"])  # a run has rows at every point that asks for it
        ended = rows.sort_values("step").drop_duplicates("seed", keep="last").dropna(subset=name).seed
        rows = rows[
            rows.seed.isin(ended)
        ]  # a seed that ends without a number does not take the others back to where it had one
        found = rows.pivot(index="step", columns="seed", values=name).dropna()
        return found if found.size else pd.DataFrame()


def at_edge(rows: pd.DataFrame, config: ConfigDict) -> pd.Series:
    """Which runs have tuned rates at the edge of the grid; none of a grid of one."""
    grid = config.tune.multipliers
    if len(grid) < 2 or "train/rate_scale" not in rows:
        return pd.Series(False, rows.index)
    tuned = rows.rates == "tuned" if "rates" in rows else pd.Series(config.rates == "tuned", rows.index)
    return tuned & rows["train/rate_scale"].map(lambda scale: any(np.isclose(scale, (min(grid), max(grid)))))


def _fair(rows: pd.DataFrame) -> list[str]:
    """The fair controls that did what they say at a point."""
    missed = controls.missed(rows, "test/loss")
    return [arm for arm in fair_arms() if arm not in missed]


def _place(side: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    """The swept keys of a point, with those that the side fixes itself."""
    return {**at, **{key: value for key, value in side.items() if key not in ("arm", "metric", "value")}}


def ends(history: pd.DataFrame, horizon: float, logs: bool) -> pd.DataFrame:
    """By seed: the value `now`, and `later` at `horizon` times the steps; in logarithms if asked.

    Later is NaN where nothing is known of the tail.
    """
    if not len(history):
        return pd.DataFrame({"now": [], "later": []}, dtype=float)
    values = history.to_numpy(float)
    values = np.log(np.maximum(values, statistics.TINY)) if logs else values
    later = statistics.extrapolate(history.index.to_numpy(float), values, horizon)
    return pd.DataFrame({"now": values[-1], "later": later}, index=history.columns)


def paired(rows: pd.DataFrame, worse: str, better: str, metric: str, logs: bool = True) -> pd.Series:
    """log(worse / better), or their difference, by seed at one point, of the seeds in which neither arm diverged."""
    if metric not in rows:
        return pd.Series(dtype=float)
    good = rows[rows.status == "ok"].pivot_table(index="seed", columns="arm", values=metric)
    if worse not in good or better not in good:
        return pd.Series(dtype=float)
    both = good[[worse, better]].dropna()
    if not logs:
        return both[worse] - both[better]
    return pd.Series(statistics.log_ratio(both[worse].to_numpy(), both[better].to_numpy()), both.index)


def fair_gap(rows: pd.DataFrame, metric: str = "test/loss", logs: bool = True) -> statistics.Least | None:
    """log(control / learned), or their difference, at one point for the fairest control, with an interval that knows of the others; None without one."""
    gaps = {arm: values for arm in _fair(rows) if len(values := paired(rows, arm, REFERENCE, metric, logs))}
    return statistics.least(gaps) if gaps else None
