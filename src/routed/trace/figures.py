"""Figures of a trace: numbers over layers beside chance and a hash, experts by label, pairs of both, churn."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from markupsafe import Markup
from scipy.cluster import hierarchy

from routed.analysis import plots, wording
from routed.analysis.plots import Axis, Chart, Panel, Point, Series
from routed.analysis.plots.frame import COLOURS
from routed.analysis.plots.pictures import Scheme
from routed.analysis.plots.scales import padded
from routed.analysis.statistics import Estimate
from routed.trace import information
from routed.trace.analysis import Analysis
from routed.trace.evidence import short_names
from routed.trace.numbers import NUMBERS

#: Labels of a map, the most frequent ones; layers that have a map; experts of a map of pairs.
LABELS, MAPS, EXPERTS = 24, 3, 128
#: Maps of ratios end here, in octaves.
OCTAVES = 3.0
#: Ticks of maps of ratios: log2 -> ratio.
RATIOS = {-3.0: "1/8", -2.0: "1/4", -1.0: "1/2", 0.0: "1", 1.0: "2", 2.0: "4", 3.0: "8"}
#: Numbers over layers, in this order; numbers with a dot once for each code.
DRAWN = (
    *("load_max", "dead", "dropped_1.25", "entropy_token", "confidence", "table", "mi", "given"),
    *("pairs", "next", "alike"),
)
#: Looks of the lines of a number.
MODEL = Series("this model")
CHANCE = Series("chance", "#777777", "cross", dashed=True)
HASH = Series("hash of the token id", "#E69F00", "square", dashed=True)


class Drawn(NamedTuple):
    """A figure with its name and caption."""

    name: str
    figure: Chart
    caption: str


def draw(analysis: Analysis, without: Collection[str] = ()) -> list[Drawn]:
    """Returns every figure that the trace has the numbers for, without those that stand beside findings."""
    figures = [*_numbers(analysis, without)]
    parts = (_labels, _expert_pairs, _layer_pairs, *(() if "churn" in without else (_churn,)))
    return figures + [figure for part in parts for figure in part(analysis)]


def beside(analysis: Analysis, numbers: Collection[str]) -> list[Drawn]:
    """Returns the figures beside a finding: its numbers over layers, small and without a legend."""
    drawn = []
    for number in numbers:
        if number == "churn":
            drawn += [*_churn(analysis)]
        else:
            panel = _number(analysis, number)
            panel.width, panel.height = 250, 110
            drawn.append(Drawn(f"beside {number}", Chart([panel], legend=False), ""))
    return drawn


def embedded(figures: Iterable[Drawn]) -> list[dict[str, Any]]:
    """Returns figures for a template: name, caption, and the chart as inline SVG."""
    return [
        {"name": name, "caption": caption, "svg": Markup(wording.unique_ids(plots.svg(figure), name))}
        for name, figure, caption in figures
    ]


def layer_axis(layers: Sequence[str], reverse: bool = False, grid: bool = True) -> Axis:
    """Returns an axis of layers with at most eight ticks: short names, or numbers."""
    step = -(-len(layers) // 8)
    labels = {float(i): name if len(name) < 11 else str(i) for i, name in enumerate(short_names(layers))}
    ticks = {index: label for index, label in labels.items() if not index % step}
    return Axis("layer", (-0.5, len(layers) - 0.5), ticks=ticks, reverse=reverse, grid=grid)


def points_of(rows: pd.DataFrame, layers: tuple[str, ...], values: pd.Series | None = None) -> list[Point]:
    """Returns the values of a table at their layers, with intervals; or other `values`, without."""
    estimates = [*zip(rows.value, rows.low, rows.high, strict=True)]
    if values is not None:
        estimates = [(value, np.nan, np.nan) for value in values]
    return [
        Point(float(layers.index(layer)), Estimate(*estimate, 0), layer)
        for layer, estimate in zip(rows.layer, estimates, strict=True)
    ]


def value_ends(panels: list[Panel], zero: bool) -> tuple[float, float]:
    """Returns the ends of a shared axis of values, which begins at 0 where `zero` holds."""
    ends = [end for panel in panels for estimate in panel.estimates for end in estimate[:3] if np.isfinite(end)]
    low, high = padded(min(ends, default=0), max(ends, default=1))
    return (0.0, high) if zero else (low, high)


def _numbers(analysis: Analysis, without: Collection[str]) -> Iterator[Drawn]:
    """Yields the numbers over layers that no finding shows."""
    every = [name for name in analysis.table.number.unique() if name not in without]
    names = [name for base in DRAWN for name in every if name == base or name.startswith(f"{base}.")]
    if names:
        caption = (
            "Further numbers by layer with 95 % intervals over sequences (black), by chance (grey; the table says what"
            " chance is), and of a balanced hash of the token id that nobody trained (orange, where it has the number)."
        )
        yield Drawn("layers", Chart([_number(analysis, name) for name in names], columns=min(3, len(names))), caption)


def _number(analysis: Analysis, name: str) -> Panel:
    """Returns the panel of one number over layers."""
    rows, layers = analysis.table[analysis.table.number == name], analysis.trace.layers
    base, _, code = name.partition(".")
    labels = {
        "table": f"choices that a table by {code} names (share)",
        "mi": f"I(expert; {code}) (nats)",
        "given": f"I(expert; {code} | token id) (nats)",
    }
    label = labels.get(base) or NUMBERS[name]
    panel = Panel(layer_axis(layers), Axis("\n".join(textwrap.wrap(label, 26))), width=210, height=150)
    panel.means(CHANCE, points_of(rows, layers, rows.chance), joined=True)
    if rows.hash.notna().any():
        panel.means(HASH, points_of(rows, layers, rows.hash), joined=True)
    panel.means(MODEL, points_of(rows, layers), joined=True)
    panel.y.domain = value_ends([panel], zero=bool((rows.value >= 0).all()) and name != "load_max")
    return panel


def _ratios(panel: Panel, values: np.ndarray, title: str) -> None:
    """Adds a map of ratios on a scale of log2, blue above 1, with values cut at the ends of the scale."""
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log2(values), -OCTAVES, OCTAVES)
    panel.image(logs, Scheme("redblue", (-OCTAVES, OCTAVES), title, ticks=RATIOS))


def _labels(analysis: Analysis) -> Iterator[Drawn]:
    """Yields a map of experts by label for each kind of label."""
    for label, maps in analysis.maps.items():
        names = analysis.tokens.names[label]
        if len(names) < 2:
            continue
        nats = analysis.table[analysis.table.number == f"mi.{label}"].value.to_numpy()
        layers = sorted({0, int(nats.argmax()), len(nats) - 1})[:MAPS]
        frequent = np.argsort(-maps[0].sum(1), kind="stable")[:LABELS]
        panels = []
        for layer in layers:
            counts = maps[layer].astype(float)
            load = counts.sum(0) / counts.sum()
            share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
            ratio = np.where(load > 0, share / np.maximum(load, 1e-12), 1.0)[frequent]
            order = np.lexsort((-ratio.max(0), ratio.argmax(0)))
            shown = [names[index] if len(names[index]) <= 18 else names[index][:17] + "…" for index in frequent]
            ticks = {float(i): name for i, name in enumerate(shown)}
            y = Axis("", (-0.5, len(frequent) - 0.5), ticks=ticks, reverse=True, grid=False, all_labels=True)
            label_x, ends = "experts, in the order of the label that uses them most", (-0.5, counts.shape[1] - 0.5)
            x = Axis(label_x, ends, ticks={}, grid=False)
            title = f"layer {short_names(analysis.trace.layers)[layer]}: I(expert; {label}) = {nats[layer]:.2g} nats"
            panel = Panel(x, y, title, width=520, height=14 * len(frequent) + 10)
            _ratios(panel, ratio[:, order], f"use by the {label}\nover use by all")
            panels.append(panel)
        rest = len(names) - len(frequent)
        more = f" {rest} less frequent values are not shown." if rest else ""
        caption = (
            f"Share of an expert in the choices of each {label}, over its share in all (first layer, last layer, and"
            f" the layer that tells most). A router that does not follow {label} is white.{more}"
        )
        yield Drawn(f"experts by {label}", Chart(panels, columns=1), caption)


def _expert_pairs(analysis: Analysis) -> Iterator[Drawn]:
    """Yields a map of pairs of experts that serve one token."""
    rows = analysis.table[analysis.table.number == "pairs"]
    if analysis.pairs is None or not len(rows) or analysis.trace.experts < 3:
        return
    beyond = (rows.value - rows.chance).to_numpy()
    layer = int(np.where(analysis.pairs.any((1, 2)), beyond, -np.inf).argmax())
    both = (analysis.pairs[layer] + analysis.pairs[layer].T).astype(float)
    used = np.flatnonzero(both.sum(0))
    most = used[np.argsort(-both.sum(0)[used], kind="stable")[:EXPERTS]]
    expected = information.independent_pairs(np.maximum(both.sum(0), 1e-9)) * both.sum()
    ratio = (both / np.maximum(expected, 1e-9))[np.ix_(most, most)]
    far = np.clip(-np.log2(np.maximum(ratio, 1e-3)), -OCTAVES, OCTAVES)[np.triu_indices(len(most), 1)]
    tree = hierarchy.linkage(far - far.min(), "average") if len(most) > 2 else None
    order = np.arange(len(most)) if tree is None else hierarchy.leaves_list(tree)
    ratio = ratio[np.ix_(order, order)]
    np.fill_diagonal(ratio, np.nan)
    ends = (-0.5, len(most) - 0.5)
    x, y = Axis("expert", ends, ticks={}, grid=False), Axis("expert", ends, ticks={}, grid=False, reverse=True)
    panel = Panel(x, y, f"layer {short_names(analysis.trace.layers)[layer]}", width=300, height=300)
    _ratios(panel, ratio, "pairs over those of\nindependent experts")
    caption = (
        "How often two experts serve one token, over how often they would by their loads alone, on the layer where"
        " that tells most; experts that go together stand together."
    )
    yield Drawn("pairs of experts", Chart([panel]), caption)


def _layer_pairs(analysis: Analysis) -> Iterator[Drawn]:
    """Yields maps of pairs of layers."""
    if analysis.between is None or len(analysis.trace.layers) < 3:
        return
    between = analysis.between
    maps: list[tuple[np.ndarray, str]] = [
        (between.shares, "information of first experts,\nshare of the smaller entropy"),
        (np.maximum(between.equal - between.chance, 0), "equal first choices under the best\npermutation, less chance"),
    ]
    caption = (
        "Agreement of a token's first experts in two layers: information, over the smaller of their entropies (1: one"
        " decides the other); and the share of tokens with the same expert, if experts are renumbered for it, less that"
        " of independent choices."
    )
    if analysis.routers is not None:
        shares, chance = analysis.routers
        label = "equal choices of its router and another\nlayer's, on its features, less chance"
        maps.append((np.maximum(shares - chance[:, None], 0), label))
        caption += (
            " Last: both routers read the features of the layer on the left, on the tokens whose features were kept,"
            " less the share of routers drawn anew."
        )
    panels = []
    for values, label in maps:
        off_diagonal = values.copy()
        np.fill_diagonal(off_diagonal, np.nan)
        x, y = (layer_axis(analysis.trace.layers, reverse, grid=False) for reverse in (False, True))
        top = float(np.nanmax(off_diagonal)) or 1.0
        panel = Panel(x, y, f"{label}\n(0 to {top:.2g})", width=220, height=220)
        panel.image(off_diagonal, Scheme("cividis", (0, top)))
        panels.append(panel)
    yield Drawn("pairs of layers", Chart(panels, columns=len(panels)), caption)


def _churn(analysis: Analysis) -> Iterator[Drawn]:
    """Yields the churn of choices between checkpoints."""
    if not len(analysis.churn):
        return
    layers = analysis.trace.layers
    panel = Panel(layer_axis(layers), Axis(NUMBERS["churn"]), width=360, height=210)
    for i, ((before, after), rows) in enumerate(analysis.churn.groupby(["before", "after"], sort=False)):
        series = Series(f"{before} to {after}", COLOURS[i % len(COLOURS)])
        panel.means(series, points_of(rows, layers), joined=True)
        where = [float(layers.index(name)) for name in rows.layer]
        panel.line(where, list(rows.chance), colour=series.colour, dash=(2, 3))
        renumbered = Series(f"{series.label}, renumbered", series.colour, "cross")
        panel.means(renumbered, points_of(rows, layers, 1 - rows.alike))
    panel.y.domain = value_ends([panel], zero=True)
    panel.y.domain = (0.0, max(panel.y.domain[1], 1.05 * float(analysis.churn.chance.max())))
    caption = (
        "Share of a token's experts that changed between checkpoints, with 95 % intervals over sequences; dotted: the"
        " share that differs between unrelated tokens. Crosses: the share that differs if experts are renumbered for"
        " the fewest changes."
    )
    yield Drawn("churn", Chart([panel]), caption)
