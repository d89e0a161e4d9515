"""Routing at every evaluation of the base seed, by cluster, or by language and layer, for the maps over training."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy

from routed.analysis.plots.frame import Data
from routed.metrics.load import DEAD_SHARE
from routed.plan.arms import ARMS, shown

#: Numbers of all maps of a page, at most: two bytes each, and a third more as text.
MOST = 400_000

#: Stacks of an encoder-decoder, by the names of their arrays; the one without is of samples.
STACKS = ("encoder", "decoder")


class History(NamedTuple):
    """One router over training: mean probabilities [evaluations, rows, experts], and shares of the assignments
    [evaluations, experts].

    `rows` names clusters or languages. `load` is that of the mean probabilities where choices were not kept (`exact`
    is False).
    """

    label: str
    row: str
    rows: list[str]
    steps: list[int]
    values: np.ndarray
    load: np.ndarray
    exact: bool
    course: pd.DataFrame


def histories(data: Data, spec: Mapping[str, Any] = {}) -> Iterator[History]:
    """Yields the routers of a figure's arms that have maps, layer by layer, without runs that diverged at once."""
    rows = data.at_point(data.last, {**spec, "x": None})
    rows = rows[rows.seed == (data.base["seed"] if (rows.seed == data.base["seed"]).any() else rows.seed.min())]
    for arm in shown(spec.get("arms")):
        for run in rows[rows.arm == arm].run:
            metrics = data.table[data.table.run == run].drop_duplicates("step").sort_values("step")
            for history in _of_run(run, ARMS[arm].label, metrics, data):
                if np.isfinite(history.values).all():
                    yield history


def _of_run(run: str, label: str, metrics: pd.DataFrame, data: Data) -> Iterator[History]:
    steps = metrics.step.tolist()
    if run in data.heatmaps:
        values = data.heatmaps[run].astype(float)
        exact = f"{run}/load" in data.heatmaps
        load = data.heatmaps[f"{run}/load"].astype(float) if exact else values.mean(1)
        names = [str(row + 1) for row in range(values.shape[1])]
        yield History(label, "cluster", names, steps, values, load, exact, metrics)
    for stack in STACKS:
        if f"{run}/{stack}/maps" not in data.heatmaps:
            continue
        maps, loads = (data.heatmaps[f"{run}/{stack}/{name}"].astype(float) for name in ("maps", "load"))
        names = [column.rpartition("/")[2] for column in metrics if column.startswith("eval/loss/")]
        # The columns of layers that only models at other points have are empty in a run.
        columns = [
            column
            for column in metrics
            if column.startswith("router/load_max/" + stack) and metrics[column].notna().any()
        ]
        for layer, column in enumerate(sorted(columns, key=lambda name: int(name.rpartition("_")[2]))):
            end = column.rpartition("/")[2]
            renamed = {f"router/{name}/{end}": f"router/{name}" for name in ("dead", "churn", "load_max")}
            course = metrics.drop(columns=[*renamed.values()], errors="ignore").rename(columns=renamed)
            title = f"{label}, {stack} layer {int(end.rpartition('_')[2]) + 1}"
            yield History(title, "language", names, steps, maps[:, layer], loads[:, layer], True, course)


def as_json(routers: list[History]) -> dict[str, Any] | None:
    """Returns the histories for a page: probabilities as 16-bit numbers in base64, evaluations thinned evenly."""
    if not routers:
        return None
    total = sum(history.values.size for history in routers)
    return {"row": routers[0].row, "entries": [_entry(history, total) for history in routers]}


def _entry(history: History, total: int) -> dict[str, Any]:
    count, experts = len(history.values), history.load.shape[1]
    moments = np.unique(np.linspace(0, count - 1, max(2, min(count, count * MOST // total))).round().astype(int))
    values = history.values[moments]
    numbers = np.round(np.clip(values, 0, 1) * 65535).astype("<u2")
    course = history.course
    counted = "router/dead" in course and course["router/dead"].notna().any()  # else there were too few tokens
    return {
        "label": history.label,
        "rows": history.rows,
        "experts": [*range(1, experts + 1)],
        "steps": [history.steps[i] for i in moments],
        "shape": list(values.shape),
        "order": [indices.tolist() for indices in diagonal(history.values[-1])],
        "values": base64.b64encode(numbers.tobytes()).decode(),
        "load": np.round(history.load[moments] * experts, 4).tolist(),
        "exact": bool(history.exact and counted),
        "course": _course(history.course),
    }


def dead_at(load: np.ndarray) -> np.ndarray:
    """Returns True for dead experts, by their shares of the assignments, in single precision as `router/dead` is."""
    return load.astype(np.float32) < np.float32(DEAD_SHARE / len(load))


def diagonal(final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns orders of rows and experts that put the best match on the diagonal, the surest rows first."""
    rows, columns = scipy.optimize.linear_sum_assignment(-final)
    best = np.argsort(-final[rows, columns], kind="stable")
    rows, columns = rows[best], columns[best]
    rest = lambda size, used: np.concatenate([used, np.setdiff1d(np.arange(size), used)])  # noqa: E731
    return rest(final.shape[0], rows), rest(final.shape[1], columns)


def _course(metrics: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns churn and dead experts at every evaluation that has them."""
    names: Mapping[str, str] = {"router/churn": "churn", "router/dead": "dead experts"}
    return [
        {"name": label, "step": int(step), "v": float(f"{value:.4g}"), "t": f"{value:.1%}"}
        for column, label in names.items()
        if column in metrics
        for step, value in zip(metrics.step, metrics[column], strict=True)
        if np.isfinite(value)
    ]
