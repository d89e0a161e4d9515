"""Routing of one row of text, token by token (kind `sample`)."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from routed.analysis.plots.chart import Chart
from routed.analysis.plots.frame import Data
from routed.analysis.plots.kind import Plot
from routed.analysis.plots.panels import Axis, Panel
from routed.analysis.plots.pictures import Scheme
from routed.plan.arms import ARMS

#: Name of the array that `engine.execution.maps_of` keeps of a run.
SAMPLE = "sample"
SCHEME = Scheme("cividis", (0, 1), "routing probability")


def sample(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns probabilities of experts for each token of the first validation row: a row of panels for each arm, a
    panel for each layer.
    """
    rows, name = data.at(spec.get("at", {})), f"{spec['stack']}/{SAMPLE}"
    runs = rows.drop_duplicates(["arm", "run"]).sort_values("seed")
    arrays = {
        arm: data.heatmaps[f"{run}/{name}"].astype(float)
        for arm, run in zip(runs.arm, runs.run, strict=True)
        if f"{run}/{name}" in data.heatmaps
    }
    arrays = {arm: arrays[arm] for arm in ARMS if arm in arrays}
    if not arrays:
        return None
    panels = []
    for arm, layers in arrays.items():
        for layer, probs in enumerate(layers):
            tokens, experts = probs.shape
            entropy = abs((probs * np.log(np.maximum(probs, 1e-9))).sum(1).mean())
            x = Axis("position of the token", (-0.5, tokens - 0.5), ticks=quarters(tokens), grid=False)
            y = Axis(
                f"{textwrap.fill(ARMS[arm].label, 18)}\nexpert",
                (-0.5, experts - 0.5),
                ticks=quarters(experts),
                reverse=True,
                grid=False,
            )
            title = f"sparse layer {layer + 1}:\nentropy {entropy:.2f} nats"
            panel = Panel(x, y, title, width=max(150, 3 * tokens), height=max(80, 7 * experts))
            panel.image(probs.T, SCHEME)
            panels.append(panel)
    return Chart(panels, columns=len(next(iter(arrays.values()))))


def quarters(count: int) -> dict[float, str]:
    """Returns ticks at the first and last of positions counted from 1, and between them in four about equal parts."""
    step = max(1, count // 4)
    numbers = sorted({1, *range(step, count - step // 2, step), count})
    return {number - 1.0: f"{number}" for number in numbers}


SAMPLE_PLOT = Plot(
    sample,
    "Routing probabilities of each expert (rows) for the first tokens (columns, at most 64) of the first"
    " validation row, base seed, after"
    " training; above each panel the mean entropy of these tokens, at most the logarithm of the number of experts.",
    required={"stack": "stack whose routers are shown: encoder or decoder"},
    alone=True,
)
