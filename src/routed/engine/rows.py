"""The rows of runs: one per evaluation, in a table whose order does not depend on when a run was computed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from routed.contracts import UserError
from routed.plan.run import Run
from routed.training.problem import ProblemPart

#: Columns before the metrics; the swept keys stand between `run` and `arm`.
LEADING = ("run", "arm", "seed", "step", "status")


def rows_of(run: Run, history: dict[str, np.ndarray], swept: list[str], problem: ProblemPart) -> list[dict[str, Any]]:
    """Returns one row per point and evaluation. A run with a loss that is not finite is `diverged`.

    Raises:
      UserError: a frozen router moved, which would void the comparison.
    """
    losses = history[problem.loss]
    finite = np.isfinite(losses).all() and np.isfinite(history["train/loss"][1:]).all()
    frozen = "router.frozen" in problem.models[run.config.model].reads and run.config.router.frozen
    # Of finite runs only: NaN weights equal nothing, themselves included, so they would seem to have moved.
    moved = history.get("router/frozen_changed", history["router/params_changed"] if frozen else np.zeros(1))
    if finite and moved.max() > 0:
        raise UserError(
            f"run {run.key} ({run.arm}, seed {run.seed}): the frozen router moved; this is a bug, please report it"
        )
    status = "tuning" if run.tuning else "ok" if finite else "diverged"
    columns = {name: values.astype(float).tolist() for name, values in sorted(history.items()) if values.ndim == 1}
    rows = []
    for point in _points(run, swept):
        for index in range(len(losses)):
            metrics = {name: values[index] for name, values in columns.items()}
            step = index * run.config.eval_every
            rows.append(
                {"run": run.key, **point, "arm": run.arm, "seed": run.seed, "step": step, "status": status, **metrics}
            )
    return rows


def _points(run: Run, swept: list[str]) -> list[dict[str, Any]]:
    """The values of the swept keys at each point of a run, without duplicates."""
    points = [{key: plain_value(flat[key]) for key in swept} for flat in run.flat_configs]
    return list({json.dumps(point, sort_keys=True): point for point in points}.values())


def swept_columns(table: pd.DataFrame) -> list[str]:
    """The columns of swept keys: those between `run` and `arm`."""
    columns = list(table.columns)
    return columns[1 : columns.index("arm")] if "arm" in columns else []


def fill_points(table: pd.DataFrame, runs: Iterable[Run]) -> pd.DataFrame:
    """Adds the rows of finished runs at every point of the plan: a run that reads no swept key has many points."""
    swept = swept_columns(table)
    if not len(table) or not swept:
        return table
    existing = set(table[["run", *swept]].drop_duplicates().itertuples(index=False, name=None))
    finished, missing = set(table.run), []
    for run in runs:
        if run.key in finished:
            points = [(run.key, *point.values()) for point in _points(run, swept)]
            missing += [point for point in points if point not in existing]
    if not missing:
        return table
    new_points = pd.DataFrame(missing, columns=["run", *swept])
    rows = table[table.run.isin(new_points.run)].drop_duplicates(["run", "step"]).drop(columns=swept)
    return ordered(pd.concat([table, new_points.merge(rows, on="run")], ignore_index=True))


def ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Removes duplicate rows, and sorts rows and columns in an order that does not depend on the order of runs."""
    rows, columns = order_of(table, table.columns)
    return table.loc[rows, columns].reset_index(drop=True)


def order_of(leading: pd.DataFrame, columns: Iterable[str]) -> tuple[pd.Index, list[str]]:
    """The order of `ordered`: of the rows, from the columns up to `step`; and of the columns."""
    swept = sorted(swept_columns(leading))
    first, order = ["run", *swept, *LEADING[1:]], [*swept, "arm", "seed", "run", "step"]
    rows = leading[order].drop_duplicates(["run", *swept, "step"]).sort_values(order).index  # copies no metric
    return rows, first + sorted(set(columns) - set(first))


def last_evaluations(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every run that is not a tuning run."""
    if not len(table):
        return table
    table = table[table.status != "tuning"]
    return table.loc[table.groupby(["run", *swept_columns(table)], dropna=False).step.idxmax()].reset_index(drop=True)


def at_base(rows: pd.DataFrame, keys: Iterable[str], base: dict[str, Any]) -> pd.DataFrame:
    """The rows at one point of the swept `keys`: at each key's value in the flat config `base`, or else its largest."""
    for key in keys:
        if len(rows):
            values, base_value = set(rows[key]), plain_value(base[key])
            rows = rows[rows[key] == (base_value if base_value in values else max(values))]
    return rows


def format_value(value: Any) -> str:
    """A setting's value for a reader; an empty text or list is "(none)"."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value) or "(none)"


def plain_value(value: Any) -> Any:
    """A setting's value for a column or the command line: a tuple becomes a text."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else value
