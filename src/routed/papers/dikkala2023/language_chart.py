"""Differences of loss by language (kind `languages`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from routed.analysis.plots import Axis, Chart, Data, Panel, Plot, Point, Series
from routed.analysis.plots.paired import difference
from routed.analysis.plots.scales import set_value_axes
from routed.contracts import Column
from routed.plan.arms import ARMS, REFERENCE


def languages(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the paired difference of validation loss from the learned arm in each language, the largest first."""
    rows = data.at_point(data.last, spec)
    columns = [name for name in rows if name.startswith("eval/loss/") and rows[name].notna().any()]
    gaps = {name.rsplit("/", 1)[1]: difference(rows, spec["arm"], name) for name in columns}
    gaps = dict(sorted(gaps.items(), key=lambda item: -item[1].mean))
    if not any(np.isfinite(gap.mean) for gap in gaps.values()):
        return None
    ticks = {float(index): language for index, language in enumerate(gaps)}
    panel = Panel(
        Axis("language", (-0.5, len(gaps) - 0.5), ticks=ticks, all_labels=True),
        Axis(),
        width=max(220, 24 * len(gaps)),
        height=200,
    )
    arm = ARMS[spec["arm"]]
    panel.means(Series(arm.label, arm.colour), [Point(float(index), gap) for index, gap in enumerate(gaps.values())])
    panel.rule("y", 0)
    chart = Chart([panel], legend=False)
    set_value_axes(chart, [panel], Column(""), f"nats per token: {arm.label} minus {ARMS[REFERENCE].label}, paired")
    return chart


LANGUAGES_PLOT = Plot(
    languages,
    "Mean difference of validation loss from the learned router, paired by seed, with 95 % t intervals; above 0"
    " the learned router is better.",
    required={"arm": "arm that is compared with the learned one"},
)
