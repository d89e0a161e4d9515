"""Figures from rows. A figure is asked for by a dict with a `kind`; KINDS maps it to the function that draws it."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment

from routed import diagnosis, stats
from routed.arms import LABELS
from routed.claims import Rows
from routed.results import last, settle, shown

matplotlib.use("Agg")

#: metric -> (axis label, logarithmic?).
AXES = {
    "test/loss": ("top-1 test loss (1 = trivial)", True),
    "test/loss_soft": ("soft test loss (1 = trivial)", True),
    "test/excess": ("excess over Bayes (1 = trivial)", True),
    "train/loss": ("training loss, as trained (1 = trivial)", True),
    "router/sparsity": ("sparsity: effective experts per cluster", True),
    "router/sparsity_shuffled": ("the same, shuffled router", True),
    "router/signal_share": ("share of squared norm on\nthe informative dimensions", False),
    "router/norm_ratio": ("norm ratio E|w|² / (E|w|)²", False),
    "router/norm_mean": ("mean norm of a router row", False),
}
KEYS = {
    "data.samples": "training samples",
    "data.separation": "separation c",
    "experts.count": "experts",
    "optimizer.weight_decay": "weight decay",
}
#: Log axes end here: an oracle with constant experts reaches 1e-8 and would flatten everything else.
FLOOR = 1e-3
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "routed",
    "figure.constrained_layout.use": True, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "figure.dpi": 110,
}  # fmt: skip


def draw(spec: dict[str, Any], data: Data) -> Figure | None:
    """The figure that `spec` asks for, or None when its rows are missing."""
    with matplotlib.rc_context(STYLE):
        return KINDS[spec["kind"]](spec, data)


def svg(figure: Figure) -> str:
    """The figure as SVG; the same rows give the same text."""
    return _rendered(figure, format="svg", metadata={"Date": None}).decode()


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    return _rendered(figure, format="png", dpi=150)


def _rendered(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, **options)
    return buffer.getvalue()


class Data:
    """The rows of a workdir as figures need them; `base` is the flat config that points depart from."""

    def __init__(self, table: pd.DataFrame, swept: list[str], base: dict[str, Any], heatmaps: dict[str, np.ndarray]):
        self.table = table[table.status != "tuning"]
        self.swept, self.base, self.heatmaps, self.last = swept, base, heatmaps, last(table)

    def settle(self, rows: pd.DataFrame, spec: dict[str, Any]) -> pd.DataFrame:
        """The rows at one point: a swept key that `spec` does not draw has its base value, or else its largest."""
        return settle(rows, [key for key in self.swept if key not in (spec.get("x"), spec.get("y"))], self.base)


def curves(spec: dict[str, Any], data: Data) -> Figure | None:
    """Metrics against a swept key, a line an arm: geometric (log axis) or arithmetic means with 95 % t intervals."""
    if spec["x"] not in data.swept:
        return None
    rows = data.settle(data.last, spec)
    xs = sorted(rows[spec["x"]].unique())
    figure = _panels(spec, rows.assign(place=rows[spec["x"]].map(xs.index)), "place", spread=0.06 if len(xs) < 8 else 0)
    for panel in figure.axes:
        panel.set_xticks(range(len(xs)), [shown(x) for x in xs])
        panel.set_xlabel(KEYS.get(spec["x"], spec["x"]))
    return figure


def training(spec: dict[str, Any], data: Data) -> Figure | None:
    """Metrics against optimiser steps at the figure's point, a line an arm: is everything converged?"""
    figure = _panels(spec, data.settle(data.table, spec), "step", spread=0)
    for panel in figure.axes:
        panel.set_xlabel("optimiser steps")
    return figure


def _panels(spec: dict[str, Any], rows: pd.DataFrame, x: str, spread: float) -> Figure:
    """A panel a metric, a line an arm; `spread` sets the arms apart so that their intervals do not hide each other."""
    arms = [arm for arm in LABELS if arm in set(rows.arm) and arm in spec.get("arms", LABELS)]
    metrics = [m for m in spec["metrics"] if m in rows and rows[rows.arm.isin(arms)][m].notna().any()]
    figure = Figure(figsize=(3.7 * len(metrics) + 0.2, 3.9))
    same = len({AXES[m][1] for m in metrics}) == 1 and x != "step"
    panels = figure.subplots(1, len(metrics), squeeze=False, sharey=same)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        label, log = AXES[metric]
        for i, arm in enumerate(arms):
            points = [(at, _mean(group[metric], log)) for at, group in rows[rows.arm == arm].groupby(x)]
            _line(panel, arm, [p for p in points if np.isfinite(p[1].mean)], shift=spread * (i - (len(arms) - 1) / 2))
        panel.set_ylabel(label)
        panel.yaxis.set_tick_params(labelleft=True)
        if log:
            _logarithmic(panel)
    _legend(figure, panels[0])
    return figure


def gap(spec: dict[str, Any], data: Data) -> Figure | None:
    """The gap between frozen and learned, decomposed, at every value of `x`: log ratios with 95 % intervals."""
    if spec["x"] not in data.swept:
        return None
    rows = data.settle(data.last, spec)
    found = {x: part for x, group in rows.groupby(spec["x"]) if len(part := diagnosis.gap(group))}
    if not found:
        return None
    parts = [part for part in next(iter(found.values())).part if "oracle" not in part]  # may be e^15: see the table
    colours = ["#E69F00", "#009E73", "#0072B2", "#000000", "#999999", "#CC79A7", "#56B4E9"]
    figure = Figure(figsize=(7.6, 4.2))
    panel = figure.subplots()
    width = 0.8 / len(parts)
    for i, part in enumerate(parts):
        for j, table in enumerate(found.values()):
            row = table[table.part == part].iloc[0]
            place = j - 0.4 + (i + 0.5) * width
            panel.bar(place, row["mean"], width * 0.9, color=colours[i], label=part if not j else None)
            if np.isfinite(row.low):
                panel.errorbar(
                    place,
                    row["mean"],
                    [[row["mean"] - row.low], [row.high - row["mean"]]],
                    color="#444444",
                    capsize=2,
                    lw=1,
                )
    panel.axhline(0, color="black", lw=0.8)
    panel.set_xticks(range(len(found)), [shown(x) for x in found])
    panel.set_xlabel(KEYS.get(spec["x"], spec["x"]))
    panel.set_ylabel("log ratio of losses (nats; above 0: second is better)")
    panel.grid(axis="x", visible=False)
    _legend(figure, panel)
    return figure


def phase(spec: dict[str, Any], data: Data) -> Figure | None:
    """Two maps over (x, y): paired log(frozen / learned) and log(fairest frozen / learned), with the zero contour.

    Blue: learned is better. A star marks cells whose 95 % interval excludes 0.
    """
    if spec["x"] not in data.swept or spec["y"] not in data.swept:
        return None
    rows = data.settle(data.last, spec)
    xs, ys = sorted(rows[spec["x"]].unique()), sorted(rows[spec["y"]].unique())
    figure = Figure(figsize=(8.6, 3.9))
    panels = figure.subplots(1, 2, sharey=True)
    maps = []
    for against in ("frozen", "fairest"):
        cells = [[_cell(rows[(rows[spec["x"]] == x) & (rows[spec["y"]] == y)], against) for x in xs] for y in ys]
        maps.append(cells)
    bound = max(
        (abs(c[0].mean) for cells in maps for line in cells for c in line if np.isfinite(c[0].mean)), default=1.0
    )
    for panel, cells, title in zip(panels, maps, ("against frozen", "against the fairest frozen control"), strict=True):
        means = np.array([[c[0].mean for c in line] for line in cells])
        image = panel.imshow(means, origin="lower", aspect="auto", cmap="RdBu", vmin=-bound, vmax=bound)
        if min(means.shape) > 1 and np.nanmin(means) < 0 < np.nanmax(means):
            panel.contour(means, levels=[0], colors="black", linewidths=1.5)
        for (i, j), mean in np.ndenumerate(means):
            one, arm = cells[i][j]
            star = "*" if one.low > 0 or one.high < 0 else ""
            name = f"\n{arm.removeprefix('frozen_')}" if arm and arm != "frozen" else ""
            panel.text(
                j,
                i,
                f"{mean:+.2f}{star}{name}",
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if abs(mean) > 0.6 * bound else "black",
            )
        panel.set_xticks(range(len(xs)), [shown(x) for x in xs])
        panel.set_yticks(range(len(ys)), [shown(y) for y in ys])
        panel.set_xlabel(KEYS.get(spec["x"], spec["x"]))
        panel.set_title(title, fontsize=9)
        panel.grid(visible=False)
    panels[0].set_ylabel(KEYS.get(spec["y"], spec["y"]))
    figure.colorbar(image, ax=list(panels), label="log(frozen / learned) top-1 loss\n(blue: learned is better)")
    return figure


def forest(spec: dict[str, Any], data: Data) -> Figure | None:
    """One line a point: log(frozen / learned) and log(fairest frozen / learned), with 95 % intervals."""
    points = data.last[data.swept].drop_duplicates().sort_values(data.swept)
    base = points.mode().iloc[0]
    points = points.iloc[(points != base).any(axis=1).argsort(kind="stable")]  # the protocol first
    figure = Figure(figsize=(7.2, 0.42 * len(points) + 1.2))
    panel = figure.subplots()
    names = []
    for place, (_, point) in enumerate(points.iterrows()):
        rows = data.last[(data.last[data.swept] == point).all(axis=1)]
        changed = [f"{KEYS.get(key, key)} = {shown(point[key])}" for key in data.swept if point[key] != base[key]]
        names.append(", ".join(changed) or "the protocol")
        for against, colour, marker, offset in (("frozen", "#D55E00", "o", 0.12), ("fairest", "#0072B2", "s", -0.12)):
            one, _ = _cell(rows, against)
            bars = [[one.mean - one.low], [one.high - one.mean]] if np.isfinite(one.low) else None
            label = (
                {"frozen": "against frozen", "fairest": "against the fairest frozen control"}[against]
                if not place
                else None
            )
            panel.errorbar(
                one.mean, place + offset, xerr=bars, color=colour, marker=marker, capsize=2, ls="", label=label
            )
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlabel("log(frozen / learned) top-1 loss (right of 0: learned is better)")
    _legend(figure, panel)
    return figure


def routing(spec: dict[str, Any], data: Data) -> Figure | None:
    """Mean routing probability of each expert for each cluster, at several moments of training, for the base seed.

    Clusters and experts are put into the order of the best one-to-one match at the end, so a specialised router is a
    diagonal.
    """
    rows = data.settle(data.last, spec | {"x": None})
    shown = [
        (arm, data.heatmaps[run]) for arm in spec["arms"] for run in rows[rows.arm == arm].run if run in data.heatmaps
    ]
    if not shown:
        return None
    count = len(shown[0][1])
    moments = sorted({0, 1, count // 2, count - 1} & set(range(count)))
    every = int(data.table.step.max() // (count - 1)) if count > 1 else 0
    figure = Figure(figsize=(2.05 * len(moments) + 0.9, 2.2 * len(shown) + 0.4))
    panels = figure.subplots(len(shown), len(moments), squeeze=False, sharex=True, sharey=True)
    for line, (arm, maps) in zip(panels, shown, strict=True):
        maps = maps.astype(float)
        order = _diagonal(maps[-1])
        for panel, moment in zip(line, moments, strict=True):
            image = panel.imshow(
                maps[moment][np.ix_(*order)], vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest"
            )
            if panel in panels[0]:
                panel.set_title(f"step {moment * every}", fontsize=8)
            panel.grid(visible=False)
        line[0].set_ylabel("\n".join(textwrap.wrap(LABELS[arm][0], 20)) + "\ncluster")
    for panel in panels[-1]:
        panel.set_xlabel("expert")
    figure.colorbar(image, ax=panels, label="mean routing probability")
    return figure


def _diagonal(final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orders of clusters and experts that put the best match on the diagonal, the surest clusters first."""
    rows, columns = linear_sum_assignment(-final)
    best = np.argsort(-final[rows, columns], kind="stable")
    rows, columns = rows[best], columns[best]
    rest = lambda size, used: np.concatenate([used, np.setdiff1d(np.arange(size), used)])  # noqa: E731
    return rest(final.shape[0], rows), rest(final.shape[1], columns)


def _cell(rows: pd.DataFrame, against: str) -> tuple[stats.Estimate, str | None]:
    arm = Rows.fairest(rows) if against == "fairest" else against
    return stats.estimate(diagnosis.paired(rows, arm, "learned", "test/loss") if arm else []), arm


def _mean(values: pd.Series, log: bool) -> stats.Estimate:
    values = values.dropna()
    if not log:
        return stats.estimate(values)
    one = stats.estimate(np.log(values.clip(lower=stats.TINY)))
    return stats.Estimate(float(np.exp(one.mean)), float(np.exp(one.low)), float(np.exp(one.high)), one.n)


def _line(panel, arm: str, points: Sequence[tuple[float | int, stats.Estimate]], shift: float = 0.0) -> None:
    if not points:
        return
    label, colour = LABELS[arm]
    x = np.array([p[0] for p in points]) + shift
    y = np.array([p[1].mean for p in points])
    low, high = (np.array([p[1][i] for p in points]) for i in (1, 2))
    bars = np.nan_to_num(np.stack([y - low, high - y]))
    marker = MARKERS[list(LABELS).index(arm)]
    panel.errorbar(
        x,
        y,
        bars,
        color=colour,
        marker=marker,
        ms=4,
        capsize=2,
        lw=1.2,
        label=label,
        ls="--" if arm.startswith("frozen") else "-",
    )


def _logarithmic(panel) -> None:
    """A log axis with readable numbers: powers of ten over decades, plain numbers over less."""
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    if low < FLOOR < high:
        panel.set_ylim(FLOOR, high)
        low = FLOOR
    if high / low < 100:
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())


def _legend(figure: Figure, panel) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)


KINDS = {"curves": curves, "training": training, "gap": gap, "phase": phase, "forest": forest, "routing": routing}
