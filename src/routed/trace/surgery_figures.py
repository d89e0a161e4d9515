"""Figures of a surgery: the lost nats with every router replaced, and with one router replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from routed.analysis.plots import STYLE
from routed.analysis.plots.frame import SHADES, legend
from routed.trace.figures import Drawn, name_layers
from routed.trace.replacements import EVERY, TRAINED
from routed.trace.surgery import ALL, SurgeryResult
from routed.trace.surgery_results import NOISE

PLAIN, REPAIRED, REFERENCE = "black", SHADES[0], "#777777"


def draw(result: SurgeryResult, worth: pd.DataFrame) -> list[Drawn]:
    """Returns every figure that the surgery has the numbers for."""
    measured = worth[(worth.reason == "") & (worth.router != "")]
    with matplotlib.rc_context(STYLE):
        return [
            *_every_layer(result, measured[measured.place == ALL]),
            *_single_layers(result, measured[measured.place != ALL]),
        ]


def _every_layer(result: SurgeryResult, rows: pd.DataFrame) -> Iterator[Drawn]:
    names = [name for name in EVERY if name in set(rows.router)][::-1]
    if not names:
        return
    figure = Figure(figsize=(6.4, 0.36 * len(names) + 1.1))
    panel = figure.subplots()
    repaired_label = f"router repaired for {result.repair_steps} steps, against the trained one repaired"
    styles: list[tuple[pd.DataFrame, dict[str, Any]]] = [
        (rows[rows.repaired == 0], {"color": PLAIN, "marker": "o", "label": "as it is put in"}),
        (rows[rows.repaired > 0], {"color": REPAIRED, "marker": "s", "label": repaired_label}),
    ]
    for some, style in styles:
        if len(some):
            shift = 0 if not result.repair_steps else 0.12 if style["color"] == PLAIN else -0.12
            heights = [names.index(name) + shift for name in some.router]
            panel.errorbar(some.lost, heights, xerr=_bars(some), ms=4, lw=0, elinewidth=1.2, capsize=2, **style)
    panel.axvline(0, color=REFERENCE, lw=1, ls=":")
    panel.set_yticks(range(len(names)), [EVERY[name].label for name in names])
    panel.set_ylim(-0.6, len(names) - 0.4)
    panel.set_xlabel("loss above the model's own (nats a token)")
    caption = (
        "Loss above the model's own with a router of each kind in every layer, with 95 % intervals over rows of text."
        " Dotted: no loss."
    )
    if result.repair_steps:
        legend(figure, panel)
        caption += " The repaired trained router is compared with the model as it is."
    yield Drawn("all routers replaced", figure, caption)


def _single_layers(result: SurgeryResult, rows: pd.DataFrame) -> Iterator[Drawn]:
    names = [name for name in EVERY if name not in (TRAINED, NOISE) and name in set(rows.router)]
    if len(result.layers) < 2 or not names:
        return
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.1 * columns, 2.2 * lines + 0.5))
    panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    noise = rows[rows.router == NOISE]
    for panel, name in zip(panels, names, strict=False):
        replaced = rows[rows.router == name]
        for some, style in (
            (noise, {"color": REFERENCE, "marker": "x", "ls": ":", "label": "noise, as sharp as trained"}),
            (replaced[replaced.repaired == 0], {"color": PLAIN, "marker": "o", "label": "as it is put in"}),
            (
                replaced[replaced.repaired > 0],
                {"color": REPAIRED, "marker": "s", "label": "repaired, against the trained one repaired"},
            ),
        ):
            if len(some):
                ticks = [result.layers.index(layer) for layer in some.place]
                panel.errorbar(ticks, some.lost, _bars(some), ms=3, lw=1.2, capsize=2, **style)
        panel.set_title(EVERY[name].label, fontsize=9)
        panel.axhline(0, color=REFERENCE, lw=0.6)
        name_layers(panel, result.layers)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    for panel in panels[: len(names) : columns]:
        panel.set_ylabel("loss above the\nmodel's own (nats)")
    legend(figure, *panels[: len(names)])
    yield Drawn(
        "one router replaced",
        figure,
        "Loss above the model's own with the router of one layer replaced and the others as trained, with 95 %"
        " intervals over rows of text. Grey: noise in its place, the router's worth.",
    )


def _bars(rows: pd.DataFrame) -> np.ndarray:
    return np.nan_to_num(np.maximum([rows.lost - rows.low, rows.high - rows.lost], 0))
