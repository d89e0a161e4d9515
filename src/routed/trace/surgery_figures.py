"""Figures of a surgery: the lost nats with every router replaced, and with one router replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from routed.analysis.plots import Axis, Chart, Panel, Point, Series
from routed.analysis.statistics import Estimate
from routed.trace.figures import Drawn, layer_axis, value_ends
from routed.trace.replacements import EVERY, TRAINED
from routed.trace.surgery import ALL, SurgeryResult
from routed.trace.surgery_results import NOISE

#: Looks of routers as they are put in, after repair, and of noise.
PLAIN = Series("as it is put in")
REPAIRED = Series("repaired, against the trained one repaired", "#0072B2", "square")
REFERENCE = Series("noise, as sharp as trained", "#777777", "cross", dashed=True)


def draw(result: SurgeryResult, worth: pd.DataFrame) -> list[Drawn]:
    """Returns every figure that the surgery has the numbers for."""
    measured = worth[(worth.reason == "") & (worth.router != "")]
    whole, single = measured[measured.place == ALL], measured[measured.place != ALL]
    return [*_every_layer(result, whole), *_single_layers(result, single)]


def _every_layer(result: SurgeryResult, rows: pd.DataFrame) -> Iterator[Drawn]:
    names = [name for name in EVERY if name in set(rows.router)]
    if not names:
        return
    ticks = {float(index): EVERY[name].label for index, name in enumerate(names)}
    y = Axis("", (-0.6, len(names) - 0.4), ticks=ticks, reverse=True, all_labels=True)
    panel = Panel(
        Axis("loss above the model's own (nats a token)"), y, horizontal=True, width=360, height=26 * len(names)
    )
    repaired = REPAIRED._replace(
        label=f"router repaired for {result.repair_steps} steps, against the trained one repaired"
    )
    for some, series, shift in ((rows[rows.repaired == 0], PLAIN, -0.12), (rows[rows.repaired > 0], repaired, 0.12)):
        panel.means(
            series,
            [
                Point(names.index(row.router) + shift * bool(result.repair_steps), _loss(row))
                for row in some.itertuples()
            ],
        )
    panel.rule("x", 0, dash=(2, 3))
    panel.x.domain = value_ends([panel], zero=False)
    panel.x.cover(0.0, 0.0)
    caption = (
        "Loss above the model's own with a router of each kind in every layer, with 95 % intervals over rows of text;"
        " dotted: no loss."
    )
    if result.repair_steps:
        caption += " The repaired trained router is compared with the model as it is."
    yield Drawn("all routers replaced", Chart([panel], legend=bool(result.repair_steps)), caption)


def _single_layers(result: SurgeryResult, rows: pd.DataFrame) -> Iterator[Drawn]:
    names = [name for name in EVERY if name not in (TRAINED, NOISE) and name in set(rows.router)]
    if len(result.layers) < 2 or not names:
        return
    noise, panels = rows[rows.router == NOISE], []
    for name in names:
        replaced = rows[rows.router == name]
        label = "loss above the\nmodel's own (nats)"
        panel = Panel(layer_axis(result.layers), Axis(label), EVERY[name].label, width=210, height=150)
        for some, series in (
            (noise, REFERENCE),
            (replaced[replaced.repaired == 0], PLAIN),
            (replaced[replaced.repaired > 0], REPAIRED),
        ):
            points = [Point(float(result.layers.index(row.place)), _loss(row), row.place) for row in some.itertuples()]
            panel.means(series, points, joined=True)
        panel.rule("y", 0, faint=True)
        panels.append(panel)
    ends = value_ends(panels, zero=False)
    for panel in panels:
        panel.y.domain = ends
    caption = (
        "Loss above the model's own with the router of one layer replaced and the others as trained, with 95 %"
        " intervals over rows of"
        " text. Grey: noise in its place, the router's worth."
    )
    yield Drawn("one router replaced", Chart(panels, columns=min(3, len(panels))), caption)


def _loss(row) -> Estimate:
    return Estimate(row.lost, row.low, row.high, 0)
