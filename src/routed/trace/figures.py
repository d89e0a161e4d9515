"""Figures of a trace: every number over layers beside chance and a hash, experts by label, pairs of experts and of layers, churn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.cluster import hierarchy

from routed.analysis.plots import STYLE
from routed.analysis.plots.frame import SHADES, legend
from routed.metrics import information
from routed.trace.analysis import Analysis
from routed.trace.numbers import COLUMNS

#: Labels of a map, the most frequent ones; layers that have a map; experts of a map of pairs.
LABELS, MAPS, EXPERTS = 24, 3, 128
#: Maps of ratios end here, in octaves.
OCTAVES = 3.0
#: Numbers over layers, in this order; those with a dot once for each code.
DRAWN = (
    "load_max",
    "dead",
    "dropped_1.25",
    "entropy_token",
    "confidence",
    "table",
    "mi",
    "given",
    "pairs",
    "next",
    "alike",
)


class Drawn(NamedTuple):
    """A figure with its name and caption."""

    name: str
    figure: Figure
    caption: str


def draw(found: Analysis) -> list[Drawn]:
    """Every figure that the trace has the numbers for."""
    with matplotlib.rc_context(STYLE):
        return [*_layers(found), *_maps(found), *_pairs(found), *_between(found), *_churn(found)]


def _layers(found: Analysis) -> Iterator[Drawn]:
    names = [name for one in DRAWN for name in found.table.number.unique() if name == one or name.startswith(f"{one}.")]
    names = [
        name
        for name in names
        if name.partition(".")[0] not in ("table", "mi", "given") or name.split(".", 1)[1] in found.tokens.counts
    ]
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.1 * columns, 2.3 * lines + 0.5))
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for panel, name in zip(panels, names, strict=False):
        _line(panel, found, name)
    for panel in list(figure.axes)[len(names) :]:
        panel.set_visible(False)
    legend(figure, *figure.axes[: len(names)])
    yield Drawn(
        "layers", figure,
        "Numbers by layer with 95 % intervals over sequences (black), by chance (grey; what chance is stands in the table), and of a"
        " balanced hash of the token id that nobody trained (orange, where it has the number).",
    )  # fmt: skip


def _line(panel, found: Analysis, name: str) -> None:
    rows = found.table[found.table.number == name]
    places = [found.trace.layers.index(layer) for layer in rows.layer]
    bars = np.nan_to_num(np.maximum([rows.value - rows.low, rows.high - rows.value], 0))
    panel.errorbar(places, rows.value, bars, color="black", marker="o", ms=3, lw=1.2, capsize=2, label="this model")
    panel.plot(places, rows.chance, color="#777777", marker="x", ms=3.5, lw=1, ls=":", label="chance")
    if rows.hash.notna().any():
        panel.plot(places, rows.hash, color=SHADES[1], marker="s", ms=3, lw=1, ls="--", label="hash of the token id")
    base, _, code = name.partition(".")
    column = COLUMNS.get(base) or COLUMNS[name.partition("_")[0]]
    words = {
        "table": f"choices that a table by {code} names (share)",
        "mi": f"I(expert; {code}) (nats)",
        "given": f"I(expert; {code} | token id) (nats)",
    }
    told = words.get(base, column.label.replace("\n", " ") + (" at capacity 1.25" if name == "dropped_1.25" else ""))
    panel.set_ylabel("\n".join(textwrap.wrap(told, 24)), fontsize=8)
    if (rows.value >= 0).all() and name not in ("load_max",):
        panel.set_ylim(bottom=0)
    name_layers(panel, found.trace.layers)


def name_layers(panel, layers: tuple[str, ...], axis: str = "x") -> None:
    """Ticks of an axis of layers: short names, or numbers, at most eight."""
    step = -(-len(layers) // 8)
    places, shown = (
        range(0, len(layers), step),
        [name if len(name) < 9 else str(i) for i, name in enumerate(layers)][::step],
    )
    (panel.set_xticks if axis == "x" else panel.set_yticks)(places, shown)
    (panel.set_xlabel if axis == "x" else panel.set_ylabel)("layer")
    if axis == "x":
        panel.set_xlim(-0.5, len(layers) - 0.5)


def _ratio(panel, values: np.ndarray):
    """A map of log2 ratios, blue above 1; what lies beyond its ends has their colour."""
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log2(values), -OCTAVES, OCTAVES)
    panel.grid(visible=False)
    return panel.imshow(logs, cmap="RdBu", vmin=-OCTAVES, vmax=OCTAVES, aspect="auto", interpolation="nearest")


def _maps(found: Analysis) -> Iterator[Drawn]:
    for label, maps in found.maps.items():
        if len(found.tokens.names[label]) < 2:
            continue
        told = found.table[found.table.number == f"mi.{label}"].value.to_numpy()
        layers = sorted({0, int(told.argmax()), len(told) - 1})[:MAPS]
        shown = np.argsort(-maps[0].sum(1), kind="stable")[:LABELS]
        figure = Figure(figsize=(9.3, len(layers) * (0.2 * len(shown) + 0.75) + 0.2))
        panels = figure.subplots(len(layers), 1, squeeze=False)[:, 0]
        for panel, layer in zip(panels, layers, strict=True):
            counts = maps[layer].astype(float)
            load = counts.sum(0) / counts.sum()
            share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
            ratio = np.where(load > 0, share / np.maximum(load, 1e-12), 1.0)[shown]
            order = np.lexsort((-ratio.max(0), ratio.argmax(0)))
            image = _ratio(panel, ratio[:, order])
            panel.set_yticks(range(len(shown)), [_cut(found.tokens.names[label][i]) for i in shown], fontsize=7)
            panel.set_title(
                f"layer {found.trace.layers[layer]}: I(expert; {label}) = {told[layer]:.2g} nats", fontsize=9
            )
            panel.set_xticks([])
        panels[-1].set_xlabel("experts, in the order of the label that uses them most")
        bar = figure.colorbar(image, ax=list(panels), label=f"use by the {label} over use by all", extend="both")
        bar.set_ticks([-3, -2, -1, 0, 1, 2, 3], labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
        rest = len(found.tokens.names[label]) - len(shown)
        more = f" {rest} less frequent values are not shown." if rest else ""
        yield Drawn(
            f"experts by {label}", figure,
            f"Share of an expert in the choices of each {label}, over its share in all (first layer, last, and the one that tells most)."
            f" A router that does not follow {label} is white.{more}",
        )  # fmt: skip


def _cut(text: str, most: int = 18) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _pairs(found: Analysis) -> Iterator[Drawn]:
    rows = found.table[found.table.number == "pairs"]
    if found.pairs is None or not len(rows) or found.trace.experts < 3:
        return
    layer = int((rows.value - rows.chance).to_numpy().argmax())
    both = (found.pairs[layer] + found.pairs[layer].T).astype(float)
    used = np.flatnonzero(both.sum(0))
    most = used[np.argsort(-both.sum(0)[used], kind="stable")[:EXPERTS]]
    expected = information.independent_pairs(np.maximum(both.sum(0), 1e-9)) * both.sum()
    ratio = (both / np.maximum(expected, 1e-9))[np.ix_(most, most)]
    far = np.clip(-np.log2(np.maximum(ratio, 1e-3)), -OCTAVES, OCTAVES)[np.triu_indices(len(most), 1)]
    order = (
        hierarchy.leaves_list(hierarchy.linkage(far - far.min(), "average")) if len(most) > 2 else np.arange(len(most))
    )
    ratio = ratio[np.ix_(order, order)]
    np.fill_diagonal(ratio, np.nan)
    figure = Figure(figsize=(5.2, 4.2))
    panel = figure.subplots()
    image = _ratio(panel, ratio)
    panel.set(xticks=[], yticks=[], xlabel="expert", ylabel="expert")
    panel.set_title(f"layer {found.trace.layers[layer]}", fontsize=9)
    bar = figure.colorbar(image, ax=panel, label="pairs over those of independent experts", extend="both")
    bar.set_ticks([-3, -2, -1, 0, 1, 2, 3], labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    yield Drawn(
        "pairs of experts", figure,
        "How often two experts serve one token, over how often they would by their loads alone, on the layer where that tells most;"
        " experts that go together stand together.",
    )  # fmt: skip


def _between(found: Analysis) -> Iterator[Drawn]:
    if found.between is None or len(found.trace.layers) < 3:
        return
    seen, maps = found.between, list[tuple[np.ndarray, str]]()
    maps.append((seen.shares, "information of first experts,\nshare of the smaller entropy"))
    maps.append(
        (np.maximum(seen.equal - seen.chance, 0), "equal first choices under the best\npermutation, less chance")
    )
    caption = (
        "What a token's first expert in one layer tells of that in another: information, over the smaller of their entropies (1: one decides"
        " the other); and the share of tokens with the same one, if experts are renumbered for it, less that of independent choices."
    )
    if found.routers is not None:
        shares, chance = found.routers
        maps.append(
            (
                np.maximum(shares - chance[:, None], 0),
                "equal choices of its router and another\nlayer's, on its features, less chance",
            )
        )
        caption += (
            " Last: both routers read the features of the layer on the left, on the tokens whose features were kept, less what routers"
            " drawn anew share."
        )
    figure = Figure(figsize=(3.4 * len(maps), 2.9))
    for panel, (values, label) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        shown = values.copy()
        np.fill_diagonal(shown, np.nan)  # itself
        image = panel.imshow(shown, cmap="cividis", vmin=0, interpolation="nearest")
        panel.grid(visible=False)
        for axis in ("x", "y"):
            name_layers(panel, found.trace.layers, axis)
        figure.colorbar(image, ax=panel, shrink=0.8).set_label(label, fontsize=8)
    yield Drawn("pairs of layers", figure, caption)


def _churn(found: Analysis) -> Iterator[Drawn]:
    if not len(found.churn):
        return
    figure = Figure(figsize=(5.4, 3.0))
    panel = figure.subplots()
    for i, ((before, after), rows) in enumerate(found.churn.groupby(["before", "after"], sort=False)):
        _churn_line(panel, rows, f"{before} to {after}", SHADES[i % len(SHADES)])
    panel.set_ylim(bottom=0)
    panel.set_ylabel(COLUMNS["churn"].label)
    name_layers(panel, found.trace.layers)
    legend(figure, panel)
    yield Drawn(
        "churn", figure,
        "Share of a token's experts that changed between checkpoints, with 95 % intervals over sequences; dotted: the share that differs"
        " between unrelated tokens. Crosses: the share that differs if experts are renumbered for the fewest changes.",
    )  # fmt: skip


def _churn_line(panel, rows: pd.DataFrame, name: str, colour: str) -> None:
    places = range(len(rows))
    bars = np.nan_to_num(np.maximum([rows.value - rows.low, rows.high - rows.value], 0))
    panel.errorbar(places, rows.value, bars, color=colour, marker="o", ms=3, lw=1.2, capsize=2, label=name)
    panel.plot(places, rows.chance, color=colour, lw=1, ls=":")
    panel.plot(places, 1 - rows.alike, color=colour, marker="x", ms=4, lw=0)
