"""What every figure shares: the rows it draws, axes and their words, a line with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.figure import Figure

from routed import stats
from routed.arms import LABELS
from routed.results import last, settle

matplotlib.use("Agg")

#: metric -> (axis label, logarithmic?).
AXES = {
    "test/loss": ("top-1 test loss (1 = trivial)", True),
    "test/accuracy": ("test accuracy", False),
    "test/loss_soft": ("soft test loss (1 = trivial)", True),
    "test/excess": ("excess over Bayes (1 = trivial)", True),
    "train/loss": ("training loss, as trained (1 = trivial)", True),
    "router/sparsity": ("sparsity: effective experts per cluster", True),
    "router/sparsity_shuffled": ("the same, shuffled router", True),
    "router/sparsity_by_atom": ("the same, one atom fixed", True),
    "router/experts_used": ("experts used over all samples", True),
    "router/signal_share": ("share of squared norm on\nthe informative dimensions", False),
    "router/norm_ratio": ("norm ratio E|w|² / (E|w|)²", False),
    "router/norm_mean": ("mean norm of a router row", False),
    "router/homogeneity": ("homogeneity of experts (1 = one cluster each)", False),
    "router/dead": ("share of dead experts", False),
    "router/churn": ("churn in the last evaluation interval", False),
    "eval/loss": ("validation loss (nats per token)", False),
    "eval/accuracy": ("validation token accuracy", False),
    "router/load_max": ("largest load (1 = balanced)", False),
    "router/dropped": ("share of assignments dropped", False),
    "router/entropy_token": ("entropy of a token's gate (nats)", False),
    "router/mi_language": ("I(expert; language) (nats)", False),
    "router/mi_language_given_token": ("I(expert; language | token id) (nats)", False),
    "router/churn_router": ("churn by the router in the last interval", False),
    "router/churn_features": ("churn by its features in the last interval", False),
    "router/all_covered": ("share of runs in which\nevery cluster has specialists", False),
    "router/covered": ("share of clusters with specialists", False),
    "router/spurious_ratio": ("norm on the spurious dimensions\nover norm on the others", True),
    "router/spurious_norm": ("norm on the spurious dimensions", True),
    "router/dispatch_entropy": ("dispatch entropy H(cluster | expert),\ntest samples (nats)", False),
    "train/dispatch_entropy": ("dispatch entropy H(cluster | expert),\ntraining samples (nats)", False),
    "train/steps": ("steps until the run stopped", False),
    "router/group_hit": ("share of experts that serve the cluster\ntheir initial filters favour", False),
    "signals/expert_feature": ("largest product of an expert\nwith a feature", False),
    "signals/expert_second": ("second largest product of an expert\nwith a feature", False),
    "signals/expert_centre": ("largest product of an expert\nwith a centre", False),
    "signals/router_feature": ("largest product of a router row\nwith a feature", False),
    "signals/router_centre": ("largest product of a router row\nwith a centre", False),
    "theory/lemma51": ("change of routing over its bound\n(Lemma 5.1)", False),
    "theory/lemma_c4": ("1 + chance of a hopeless expert\n(Lemma C.4)", False),
    "theory/row_sum": ("|sum of router rows| over\nthe norm of all (Lemma E.1)", False),
    "theory/gradient_step": ("distance from a descent step on the inertia", True),
    "theory/lloyd_step": ("distance from an iteration of k-means", True),
    "theory/cosine": ("|cos(w, z)|", False),
    "theory/norm": ("|w|", False),
    "theory/target_error": ("|u ∓ v| / |v|", True),
    "theory/claim1": ("margin of Claim 1", False),
    "theory/claim2": ("margin of Claim 2", False),
    "theory/claim3": ("margin of Claim 3", False),
    "theory/lemma2_parabola": ("margin of Lemma 2, parabola", False),
    "theory/lemma2_logarithm": ("margin of Lemma 2, logarithm", False),
    "train/experts": ("experts computed per training token", True),
}
#: The same for tasks of classes, and for language models, whose losses have no trivial scale.
CLASS_AXES = AXES | {
    "train/loss": ("training loss (nats per sample)", True),
    "test/loss": ("test loss (nats per sample)", True),
}
TEXT_AXES = AXES | {"train/loss": ("training loss (nats per token)", False)}
KEYS = {
    "data.samples": "training samples",
    "data.separation": "separation c",
    "data.positions": "tokens of a sample",
    "data.clusters": "clusters",
    "experts.depth": "layers of an expert",
    "data.dim": "dimensions",
    "data.noise": "sigma",
    "experts.count": "experts",
    "optimizer.weight_decay": "weight decay",
    "transformer.dim": "width of the trunk",
}
#: Log axes end here: an oracle with constant experts reaches 1e-8 and would flatten everything else.
FLOOR = 1e-3
#: Lines that are no arms.
SHADES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "routed",
    "figure.constrained_layout.use": True, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "figure.dpi": 110,
}  # fmt: skip


class Data:
    """The rows of a workdir as figures need them; `base` is the flat config that points depart from."""

    def __init__(self, table: pd.DataFrame, swept: list[str], base: dict[str, Any], heatmaps: dict[str, np.ndarray]):
        self.table = table[table.status != "tuning"]
        self.swept, self.base, self.heatmaps, self.last = swept, base, heatmaps, last(table)
        self.axes = TEXT_AXES if "eval/loss" in table else CLASS_AXES if "test/accuracy" in table else AXES

    def settle(self, rows: pd.DataFrame, spec: dict[str, Any]) -> pd.DataFrame:
        """The rows at one point: a swept key that `spec` does not draw has its value in `at`, its base value, or else its largest.

        A key that goes with what is drawn, with one value at each place, is left alone.
        """
        for key, value in spec.get("at", {}).items():
            rows = rows[rows[key] == value]
        drawn = [spec[axis] for axis in ("x", "y") if spec.get(axis) in self.swept]
        others = [key for key in self.swept if key not in drawn]
        if drawn and len(rows):
            values = rows.groupby(drawn)[others].nunique()
            others = [key for key in others if (values[key] > 1).any()]
        return settle(rows, others, self.base)

    def at(self, point: dict[str, Any], rows: pd.DataFrame | None = None) -> pd.DataFrame:
        """The last rows (or those of `rows`) at exactly this point: a swept key that it does not name has its base value."""
        rows = self.last if rows is None else rows
        for key in self.swept:
            rows = rows[rows[key] == point.get(key, self.base[key])]
        return rows


def mean(values: pd.Series, log: bool) -> stats.Estimate:
    values = values.dropna()
    if not log:
        return stats.estimate(values)
    one = stats.estimate(np.log(values.clip(lower=stats.TINY)))
    return stats.Estimate(float(np.exp(one.mean)), float(np.exp(one.low)), float(np.exp(one.high)), one.n)


def marker_of(arm: str) -> str:
    """The marker of an arm in every figure; there are fewer markers than arms."""
    return MARKERS[list(LABELS).index(arm) % len(MARKERS)]


def line(panel, arm: str, points: Sequence[tuple[float | int, stats.Estimate]], shift: float = 0.0) -> None:
    if not points:
        return
    label, colour = LABELS[arm]
    x = np.array([p[0] for p in points]) + shift
    y = np.array([p[1].mean for p in points])
    low, high = (np.array([p[1][i] for p in points]) for i in (1, 2))
    bars = np.nan_to_num(np.stack([y - low, high - y]))
    panel.errorbar(
        x,
        y,
        bars,
        color=colour,
        marker=marker_of(arm),
        ms=4,
        capsize=2,
        lw=1.2,
        label=label,
        ls="--" if arm.startswith("frozen") else "-",
    )


def logarithmic(panel, axis: str = "y") -> None:
    """A log axis (x or y) with readable numbers: powers of ten over decades, plain numbers over less."""
    panel.set(**{f"{axis}scale": "log"})
    low, high = panel.get_ylim() if axis == "y" else panel.get_xlim()
    if low < FLOOR < high:
        panel.set(**{f"{axis}lim": (FLOOR, high)})
        low = FLOOR
    if high / low < 100:
        marks = panel.yaxis if axis == "y" else panel.xaxis
        marks.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low > 4 else (1, 1.5, 2, 3, 4, 5, 7)))
        marks.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        marks.set_minor_formatter(ticker.NullFormatter())


def legend(figure: Figure, panel) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4 if len(handles) == 4 else 3, fontsize=8)
