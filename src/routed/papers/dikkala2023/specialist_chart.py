"""The share of runs in which every cluster gets a specialist (kind `success`)."""

from __future__ import annotations

from typing import Any

from routed.analysis import statistics
from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Point, Series
from routed.analysis.plots.frame import COLOURS, SHAPES
from routed.analysis.plots.scales import dodge, padded
from routed.engine.rows import format_value


def success(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the share of runs that succeed against experts per cluster: a panel for each separation, a line for
    each number of clusters.

    `metric` is 1 in a run that succeeded; `predicted(clusters, experts)` is its probability, drawn dotted.
    """
    if spec["metric"] not in data.last or {"data.clusters", "data.separation"} - set(data.swept):
        return None
    rows = data.at_point(data.last, spec | {"y": "data.clusters", "by": "data.separation"})
    rows = rows[(rows.arm == spec["arm"]) & (rows.status == "ok")]
    panels: list[Panel] = []
    for separation, group in rows.groupby("data.separation"):
        ratios = {ratio: float(ratio) for ratio in sorted((group[spec["x"]] / group["data.clusters"]).unique())}
        axis = Axis("experts per cluster", padded(min(ratios), max(ratios)))
        y = Axis(data.axes[spec["metric"]].label, (-0.05, 1.05))
        panel = Panel(axis, y, f"separation {format_value(separation)}", width=200, height=210)
        dodged = dodge(axis, ratios, sorted(group["data.clusters"].unique()))
        for i, (clusters, runs) in enumerate(group.groupby("data.clusters")):
            shares = {
                count: statistics.proportion(some[spec["metric"]].dropna()) for count, some in runs.groupby(spec["x"])
            }
            series = Series(f"{clusters} clusters", COLOURS[i % len(COLOURS)], SHAPES[i % len(SHAPES)])
            points = [
                Point(dodged[clusters][count / clusters], share, f"{count / clusters:g}")
                for count, share in shares.items()
            ]
            panel.means(series, points, joined=True)
            ratio = [count / clusters for count in shares]
            predicted = [spec["predicted"](clusters, count) for count in shares]
            panel.line(ratio, predicted, colour=series.colour, dash=(2, 3), width=1.2)
        panels.append(panel)
    return Chart(panels, columns=3) if panels else None


SUCCESS_PLOT = Plot(
    success,
    "Share of runs with 95 % intervals (Wilson's); dotted: the probability predicted by the theorem.",
    required={
        "x": "swept number of experts",
        "metric": "column that is 1 in a run that succeeded",
        "arm": "arm that is drawn",
        "predicted": "function of clusters and experts: the probability",
    },
    axes=lambda spec, data: [spec["x"], "data.clusters", "data.separation"],
)
