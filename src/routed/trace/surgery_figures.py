"""Figures of a surgery beside those of replaced routers: kept experts, lengths of repairs, regret."""

from __future__ import annotations

import numpy as np
import pandas as pd

from routed.analysis.plots import Axis, Chart, Panel, Point, Series
from routed.analysis.plots.frame import COLOURS, SHAPES
from routed.analysis.statistics import Estimate
from routed.trace.figures import Drawn, layer_axis, value_ends
from routed.trace.kinds import EVERY, TRAINED
from routed.trace.regret_results import ROUTERS
from routed.trace.subsets import CHOICES, SHARES, name_of
from routed.trace.surgery_jobs import ALL, SurgeryResult


def estimates_of(rows: pd.DataFrame) -> list[Estimate]:
    """Returns the lost nats of a table's rows with their intervals."""
    return [Estimate(row.lost, row.low, row.high, 0) for row in rows.itertuples()]


def kept_experts(worth: pd.DataFrame) -> Drawn | None:
    """Returns the loss over the share of the experts that stay, by how these were chosen."""
    ticks = {float(np.log2(share)): f"{share:g}" for share in (*SHARES, 100)}
    ends = (min(ticks) - 0.3, max(ticks) + 0.3)
    x = Axis("experts kept in every layer (%)", ends, ticks=ticks, all_labels=True)
    panel = Panel(x, Axis("loss above the model's own\n(nats a token)"), width=320, height=230)
    for number, (choice, (_, meaning, _)) in enumerate(CHOICES.items()):
        series = Series(f"those {meaning}", COLOURS[number], SHAPES[number], dashed=number > 0)
        shares = {name_of(choice, share): share for share in SHARES}
        rows = worth[(worth.place == ALL) & (worth.reason == "") & worth.router.isin(shares)]
        where = [float(np.log2(shares[name])) + 0.04 * (number - 1) for name in rows.router]
        panel.means(series, map(Point, where, estimates_of(rows)), joined=True)
    if not panel.rows:
        return None
    panel.means(Series("all experts"), [Point(float(np.log2(100)), Estimate(0.0, np.nan, np.nan, 0))])
    panel.rule("y", 0, faint=True)
    panel.y.domain = value_ends([panel], zero=False)
    panel.y.cover(0.0, 0.0)
    caption = (
        "Loss above the model's own when the trained routers choose among a share of the experts of every layer, with"
        " 95 % intervals over rows of text; the experts were chosen on other text. Random ones are means of draws."
    )
    return Drawn("how many experts this text needs", Chart([panel]), caption)


def repair_curves(worth: pd.DataFrame) -> Drawn | None:
    """Returns the loss of each replaced router over the steps of its repair."""
    rows = worth[(worth.place == ALL) & (worth.reason == "") & (worth.router != "")]
    names = [name for name in EVERY if name != TRAINED and name in set(rows[rows.repaired > 0].router)]
    if not names:
        return None
    x, y = Axis("steps of the repair (0: none)"), Axis("loss above that of trained\nrouters (nats a token)")
    panel = Panel(x, y, width=360, height=230)
    for number, name in enumerate(names):
        some = rows[rows.router == name].sort_values("repaired")
        series = Series(EVERY[name].label, COLOURS[number % len(COLOURS)], SHAPES[number % len(SHAPES)])
        panel.means(series, map(Point, some.repaired.astype(float), estimates_of(some)), joined=True)
    panel.rule("y", 0, faint=True)
    panel.y.domain = value_ends([panel], zero=False)
    panel.y.cover(0.0, 0.0)
    longest = float(rows.repaired.max())
    panel.x.domain = (-0.04 * longest, 1.04 * longest)
    panel.x.ticks = {float(step): str(step) for step in sorted(rows.repaired.unique())}
    caption = (
        "Loss above that of the trained routers, after the same steps of repair on other text; means of draws, with"
        " 95 % intervals over rows of text. Every length is a repair of its own."
    )
    return Drawn("what a repair of the routers alone wins back", Chart([panel]), caption)


def regrets(result: SurgeryResult, regret: pd.DataFrame) -> Drawn | None:
    """Returns the regret of each router over layers."""
    layers = tuple(dict.fromkeys(regret.layer))
    if not layers:
        return None
    panel = Panel(layer_axis(layers), Axis("regret against the best choice\n(nats a token)"), width=360, height=230)
    shift = 0.1 if len(layers) < 12 else 0.0
    for number, (name, label) in enumerate(ROUTERS.items()):
        some = regret[regret.router == name]
        where = [layers.index(layer) + shift * (number - 2.5) for layer in some.layer]
        points = [Estimate(row.regret, row.low, row.high, 0) for row in some.itertuples()]
        series = Series(label, COLOURS[number], SHAPES[number], dashed=number > 0)
        panel.means(series, map(Point, where, points, some.layer), joined=True)
    panel.y.domain = value_ends([panel], zero=True)
    caption = (
        "Loss of a token's next token with the choice of each router in one layer, above that with the best choice that"
        " was tried, with 95 % intervals over groups of rows. No router can reach 0: the best choice knows the next"
        " token."
    )
    return Drawn("regret of one choice", Chart([panel]), caption)
