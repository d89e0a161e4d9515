"""What the routers of a language model make of one row of text, token by token."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from routed.analysis.plots.frame import Data
from routed.plan.arms import ARMS

#: The array of a run that `engine.execution.maps_of` keeps for this.
SAMPLE = "sample"


def sample(spec: dict[str, Any], data: Data) -> Figure | None:
    """Probabilities of experts for each token of the first validation row, base seed, after training: a row of panels an arm, a panel a layer.

    `stack` is the stack whose routers are shown. Titles have the mean entropy of a panel's tokens in nats.
    """
    rows, name = data.at(spec.get("at", {})), f"{spec['stack']}/{SAMPLE}"
    by_arm = rows.drop_duplicates(["arm", "run"]).sort_values("seed")
    found = {
        arm: data.heatmaps[f"{run}/{name}"].astype(float)
        for arm, run in zip(by_arm.arm, by_arm.run, strict=True)
        if f"{run}/{name}" in data.heatmaps
    }
    found = {arm: found[arm] for arm in ARMS if arm in found}
    if not found:
        return None
    layers, tokens, experts = next(iter(found.values())).shape
    width, height = max(1.8, 0.035 * tokens), max(0.9, 0.08 * experts)
    figure = Figure(figsize=(layers * (width + 0.3) + 1.1, len(found) * (height + 0.45) + 0.5))
    panels = figure.subplots(len(found), layers, squeeze=False, sharex=True, sharey=True)
    for line, (arm, layers_of) in zip(panels, found.items(), strict=True):
        for place, (panel, probs) in enumerate(zip(line, layers_of, strict=True)):
            image = panel.imshow(probs.T, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
            entropy = abs((probs * np.log(np.maximum(probs, 1e-9))).sum(1).mean())
            panel.set_title(f"sparse layer {place + 1}: entropy {entropy:.2f} nats", fontsize=7.5)
            for mark, count in ((panel.set_xticks, tokens), (panel.set_yticks, experts)):
                numbers = quarters(count)
                mark([number - 1 for number in numbers], [f"{number}" for number in numbers])
            panel.grid(visible=False)
        line[0].set_ylabel(f"{textwrap.fill(ARMS[arm].label, 18)}\nexpert", fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("place of the token in the row")
    figure.colorbar(image, ax=panels, label="routing probability", fraction=0.03)
    return figure


def quarters(count: int) -> list[int]:
    """The first, the last, and what lies between them in four about equal parts, of places counted from 1."""
    every = max(1, count // 4)
    return sorted({1, *range(every, count - every // 2, every), count})
