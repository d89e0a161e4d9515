"""Shares of the gap from frozen to learned over a grid of two swept keys (kind `shares`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routed.analysis import controls, shapley, statistics
from routed.analysis.paired_values import paired
from routed.analysis.plots import Axis, Chart, Data, Panel, Plot
from routed.analysis.plots.pictures import Scheme
from routed.analysis.plots.scales import label_of
from routed.analysis.wording import shown_share
from routed.engine.rows import format_value
from routed.plan.arms import REFERENCE, UNTRAINED

#: Titles of the panels.
FIRST, MEAN = "sharpness, if it goes first", "sharpness, mean over both orders"
KMEANS = "k-means of the inputs in learning's place"
LOSS = "test/loss"
#: Pixels of a cell, which holds a share and, below it, its interval.
CELL = (74, 40)
SCHEME = Scheme("blues", (0, 1), "share of\nlog(frozen / learned)", ticks={0.0: "≤ 0 %", 0.5: "50 %", 1.0: "≥ 100 %"})

#: Title of a panel -> (y, x) -> share.
Grids = dict[str, dict[tuple[Any, Any], statistics.Estimate]]


def shares_at(rows: pd.DataFrame) -> dict[str, statistics.Estimate]:
    """Returns by title the shares of log(frozen / learned) at one point; NaN where the gap may be 0 or below.

    Sharpness has a share on the path where it goes first, log(frozen / frozen_sharp), and as mean over both orders
    (`shapley`). K-means has log(frozen / frozen_kmeans): above 100 % its loss is below the learned one. A share
    without its arms, or of a failed control, is left out.
    """
    logs = shapley.logs_of(rows, LOSS)
    orders = shapley.orders_of(logs)
    first = [order for order in orders if order[0] == shapley.SHARPNESS]
    shares = {}
    for title, chosen in ((FIRST, first), (MEAN, orders if len(orders) > 1 else [])):
        if chosen:
            gap = logs[frozenset()] - logs[frozenset(chosen[0])]
            shares[title] = _share(shapley.parts_of(logs, chosen)[shapley.SHARPNESS], gap)
    pairs = [paired(rows, UNTRAINED, arm, LOSS) for arm in ("frozen_kmeans", REFERENCE)]
    both = pd.concat(pairs, axis=1).dropna().to_numpy()
    if len(both) and "frozen_kmeans" not in controls.failed(rows, LOSS):
        shares[KMEANS] = _share(both[:, 0], both[:, 1])
    return shares


def _share(part: np.ndarray, gap: np.ndarray) -> statistics.Estimate:
    return shapley.share_of(part, gap) if gap.mean() > 0 else statistics.estimate([])


def _grids(spec: dict[str, Any], data: Data) -> Grids:
    """Returns the shares of each panel by the values of both keys."""
    grids: Grids = {FIRST: {}, MEAN: {}, KMEANS: {}}
    for at, rows in data.at_point(data.last, spec).groupby([spec["y"], spec["x"]]):
        for title, share in shares_at(rows).items():
            grids[title][at] = share
    return {title: cells for title, cells in grids.items() if cells}


def shares(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns a panel for each kind of share, with a cell for each point of the keys `x` and `y`."""
    if not {spec["x"], spec["y"]} <= {*data.swept}:
        return None
    panels = [_panel(title, cells, spec, data) for title, cells in _grids(spec, data).items()]
    return Chart(panels, columns=3) if panels else None


def _panel(title: str, cells: dict[tuple[Any, Any], statistics.Estimate], spec: dict[str, Any], data: Data) -> Panel:
    """Returns a panel with the shares as text and colour."""
    xs, ys = (data.values(spec[axis]) for axis in "xy")
    x_axis, y_axis = (
        Axis(
            label_of(spec[axis]),
            (-0.5, len(values) - 0.5),
            ticks={float(index): format_value(value) for index, value in enumerate(values)},
            grid=False,
        )
        for axis, values in (("x", xs), ("y", ys))
    )
    panel = Panel(x_axis, y_axis, title, width=CELL[0] * len(xs), height=CELL[1] * len(ys))
    filled = []
    for (y, x), share in cells.items():
        column, row = float(xs.index(x)), float(ys.index(y))
        if np.isnan(share.mean):
            panel.text("no sure gap", column, row, align="center", baseline="middle", fontSize=9)
            continue
        fields = {
            "label": share_text(share).replace(" [", "\n["),
            "at": _point_text(spec, (y, x)),
            "text": share_text(share),
            "n": share.n,
            "note": title,
        }
        filled.append((column, row, share.mean, fields))
    panel.cells(SCHEME, filled)
    return panel


def share_text(share: statistics.Estimate) -> str:
    """Returns a share in percent with its interval."""
    return shown_share(dict(zip(("share", "share_low", "share_high"), share[:3], strict=True)))


def _point_text(spec: dict[str, Any], at: tuple[Any, Any]) -> str:
    """Returns the values of both keys as text."""
    return ", ".join(f"{label_of(spec[axis])} {format_value(value)}" for axis, value in zip("yx", at, strict=True))


def caption(spec: dict[str, Any], data: Data) -> str:
    """Returns the explanation of a chart, and the least and the largest share of each panel."""
    ranges = []
    for title, cells in _grids(spec, data).items():
        sure = {at: share for at, share in cells.items() if np.isfinite(share.mean)}
        if sure:
            least, most = (pick(sure, key=lambda at: sure[at].mean) for pick in (min, max))
            low, high = (f"{share_text(sure[at])} ({_point_text(spec, at)})" for at in (least, most))
            ranges.append(f"{title}: {low} to {high}, {len(sure)} of {len(cells)} points.")
    return " ".join([EXPLANATION, *(text[0].upper() + text[1:] for text in ranges)])


EXPLANATION = (
    "Share of log(frozen / learned) of the top-1 test loss, means over seeds with 95 % bootstrap intervals"
    " (fewer than five seeds: Fieller's). Sharpness is log(frozen / frozen_sharp) if it goes first, or the mean over"
    " both orders in which sharpness and the initial partition can go. K-means is log(frozen / frozen_kmeans): above"
    " 100 % its loss is below that of the learned router. A point whose gap may be 0 has no share."
)

SHARES_PLOT = Plot(shares, caption, required={"x": "swept key on the x axis", "y": "swept key on the y axis"})
