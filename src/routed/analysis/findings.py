"""Findings: the statistics, verdicts and tables that follow from rows alone, be these of a workdir or published."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import changed, diagnosis, points, shapley, statistics, verdicts
from routed.analysis.paired_values import Rows
from routed.analysis.plots.frame import Data
from routed.plan import experiment
from routed.plan.config import problem_of
from routed.plan.experiment import Figure
from routed.settings.tree import flatten


def frame(
    asked: Figure, config: ConfigDict, table: pd.DataFrame, swept: list[str], heatmaps: Mapping[str, np.ndarray] = {}
) -> Data:
    """Returns the rows of a figure as its charts and tables read them."""
    problem, own_keys = problem_of(config), {key for point in asked.sweep(config) for key in point}
    loss = problem.compared or problem.loss
    data = Data(table, swept, flatten(config), heatmaps, problem.columns(config), loss, own_keys)
    data.column = Rows(table, config, swept, problem).column
    return data


def of_rows(module: types.ModuleType, config: ConfigDict, table: pd.DataFrame, data: Data) -> dict[str, Any]:
    """Returns the verdicts on the claims of a figure, the summary of its rows, the gap decomposed, and losses by arm.

    Claims of papers under changed settings, `changes`, are the user's (`changed.filed`). `table` has the summary,
    `by_arm` the losses. The gap and its `shares` are of the point `gap_at`.
    """
    asked = experiment.figure_of(module, config)
    changes = changed.changes_of(module, config, table)
    records = verdicts.judge(points.claims_of(asked, config, table, data.swept), table, config, data.swept)
    summary, point = statistics.summarise(data.last, data.swept, data.axes), data.at_point(data.last, {})
    methods = {name: at for spec in asked.plots(config) for name, at in spec.get("methods", {}).items()}
    return {
        "claims": [changed.filed(record, changes) for record in records],
        "changes": changes,
        "table": summary,
        "gap": diagnosis.gap(point).to_dict("records"),
        "shares": shapley.shares(point).to_dict("records"),
        "gap_at": ", ".join(f"{key} = {point[key].iloc[0]}" for key in data.swept) or "the only point",
        "by_arm": points.by_arm(summary, data, methods),
    }


def of_table(module: types.ModuleType, config: ConfigDict, table: pd.DataFrame, swept: list[str]) -> dict[str, Any]:
    """Returns `of_rows` of an experiment's rows."""
    asked = experiment.figure_of(module, config)
    return of_rows(module, config, table, frame(asked, config, table, swept))
