"""The rows of runs: one per evaluation, in a table whose order does not depend on when a run was computed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from routed.contracts import UserError
from routed.plan.config import problem_of
from routed.plan.runs import Run

#: Columns before the metrics; the swept keys stand between `run` and `arm`.
LEADING = ("run", "arm", "seed", "step", "status")


def rows_of(run: Run, history: dict[str, np.ndarray], swept: list[str]) -> list[dict[str, Any]]:
    """One row per place and evaluation. A run whose losses are not all finite is `diverged`; a tuning run is `tuning`.

    Raises:
      UserError: a frozen router moved, which would void the comparison.
    """
    losses = history[problem_of(run.config).loss]
    finite = np.isfinite(losses).all() and np.isfinite(history["train/loss"][1:]).all()
    frozen = "router" in run.config and "frozen" in run.config.router and run.config.router.frozen
    # Only of finite runs: NaN weights equal nothing, themselves included, so they would seem to have moved.
    if frozen and finite and history["router/moved"].max() > 0:
        raise UserError(
            f"run {run.key} ({run.arm}, seed {run.seed}): the frozen router moved; this is a bug, please report it"
        )
    status = "tuning" if run.tuning else "ok" if finite else "diverged"
    columns = {name: values.astype(float).tolist() for name, values in sorted(history.items()) if values.ndim == 1}
    rows = []
    for place in _places(run, swept):
        for index in range(len(losses)):
            metrics = {name: values[index] for name, values in columns.items()}
            step = index * run.config.eval_every
            rows.append(
                {"run": run.key, **place, "arm": run.arm, "seed": run.seed, "step": step, "status": status, **metrics}
            )
    return rows


def _places(run: Run, swept: list[str]) -> list[dict[str, Any]]:
    """The values of the swept keys at each point that a run has rows at, each once."""
    places = [{key: plain(place[key]) for key in swept} for place in run.places]
    return list({json.dumps(place, sort_keys=True): place for place in places}.values())


def swept_columns(table: pd.DataFrame) -> list[str]:
    """The columns of swept keys: those between `run` and `arm`."""
    columns = list(table.columns)
    return columns[1 : columns.index("arm")] if "arm" in columns else []


def fill_places(table: pd.DataFrame, runs: Iterable[Run]) -> pd.DataFrame:
    """The table with the rows of finished runs at every point that asks for them: a run that reads no swept key has many."""
    swept = swept_columns(table)
    if not len(table) or not swept:
        return table
    there = set(table[["run", *swept]].drop_duplicates().itertuples(index=False, name=None))
    finished, missing = set(table.run), []
    for run in runs:
        if run.key in finished:
            places = [(run.key, *place.values()) for place in _places(run, swept)]
            missing += [place for place in places if place not in there]
    if not missing:
        return table
    wanted = pd.DataFrame(missing, columns=["run", *swept])
    known = table[table.run.isin(wanted.run)].drop_duplicates(["run", "step"]).drop(columns=swept)
    return ordered(pd.concat([table, wanted.merge(known, on="run")], ignore_index=True))


def ordered(table: pd.DataFrame) -> pd.DataFrame:
    """The rows, each once, in an order that does not depend on when they were computed; so are the columns."""
    rows, columns = order_of(table, table.columns)
    return table.loc[rows, columns].reset_index(drop=True)


def order_of(leading: pd.DataFrame, columns: Iterable[str]) -> tuple[pd.Index, list[str]]:
    """That order of the rows, from the columns up to `step`, and of the columns."""
    swept = sorted(swept_columns(leading))
    first, order = ["run", *swept, *LEADING[1:]], [*swept, "arm", "seed", "run", "step"]
    rows = leading[order].drop_duplicates(["run", *swept, "step"]).sort_values(order).index  # copies no metric
    return rows, first + sorted(set(columns) - set(first))


def last(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every run that is not a tuning run."""
    if not len(table):
        return table
    table = table[table.status != "tuning"]
    return table.loc[table.groupby(["run", *swept_columns(table)], dropna=False).step.idxmax()].reset_index(drop=True)


def at_base(rows: pd.DataFrame, keys: Iterable[str], base: dict[str, Any]) -> pd.DataFrame:
    """The rows at one point of the swept `keys`: each has its value in the flat config `base`, or else its largest."""
    for key in keys:
        if len(rows):
            values, own = set(rows[key]), plain(base[key])
            rows = rows[rows[key] == (own if own in values else max(values))]
    return rows


def shown(value: Any) -> str:
    """A setting's value as a reader wants it; of an empty text or list, a word."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value) or "(none)"


def plain(value: Any) -> Any:
    """A setting as a value of a column, and as it is written on the command line: tuples as text."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else value
