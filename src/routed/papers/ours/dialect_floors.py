"""The least reachable loss on dialects under span corruption: exact for every row, not an estimate."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from routed.contracts import TextBatch
from routed.papers.ours.dialects import FIRST, names, tables
from routed.tasks.text import spans, tokenizers
from routed.tasks.text.documents import choose


class Cut(NamedTuple):
    """A corrupted row as words: the words left before each gap, and the words cut out of the gap.

    A row ends with a gap.
    """

    left: list[list[int]]
    out: list[list[int]]


def floors(data: ConfigDict, batch: TextBatch) -> dict[str, float]:
    """Computes the least nats per target token of a model that knows all dialects, but not the dialect of a row.

    Target tokens include sentinels and the end. `floor` reads the whole input, and so infers the dialect; `floor_blind`
    reads only the words before and behind each gap. The loss is -log p(row) / p(input). p(input) sums p(row) over all
    possible cuts and their lengths, whose divisions are equally likely. Both sum over dialects: once for a row, or
    (blind) once for a gap.
    """
    chosen = tables(data)[[names(data).index(name) for name in choose(data, names(data))]]
    most, _ = spans.counts(spans.lengths(data)[0], data.noise_density, data.mean_span)
    powers = np.stack([np.linalg.matrix_power(chosen, n) for n in range(most + 2)])
    floor, blind = [], []
    for row in zip(np.asarray(batch.inputs), np.asarray(batch.targets), strict=True):
        row_words = cut(data, *row)
        likelihood = np.prod([_chance(chosen, part) for part in row_words.left], axis=0)
        paths = np.stack([_chance(chosen, path) for path in _paths(row_words)])
        gaps = np.stack([_ways(powers, *ends) for ends in _ends(row_words)])
        floor.append(np.log((likelihood * _sum(gaps)).sum() / (likelihood * paths.prod(0)).sum()))
        blind.append(np.log(_sum(gaps.mean(-1, keepdims=True)).item() / paths.mean(-1).prod()))
    length = batch.targets.shape[1]
    return {"floor": float(np.mean(floor)) / length, "floor_blind": float(np.mean(blind)) / length}


def cut(data: ConfigDict, inputs: Int[np.ndarray, " L"], targets: Int[np.ndarray, " M"]) -> Cut:
    """Returns the words of a row from its tokens: sentinels separate the words left, and precede the words cut out."""

    def parts(ids: np.ndarray) -> list[list[int]]:
        row_words = ids[:-1] - tokenizers.RESERVED - FIRST  # the last token ends the row
        return [part.tolist() for part in np.split(row_words, np.flatnonzero(row_words >= data.words))]

    first, *rest = parts(inputs)
    return Cut([first, *(part[1:] for part in rest[:-1])], [part[1:] for part in parts(targets)[1:]])


def _ends(row: Cut) -> list[tuple[int, int | None]]:
    """Returns the words before and behind each gap; the last gap ends the row and has no word behind."""
    behind = [*(part[0] for part in row.left[1:]), None]
    return [(part[-1], word) for part, word in zip(row.left, behind, strict=True)]


def _paths(row: Cut) -> list[list[int]]:
    """Returns the words cut out of each gap, with the words at both ends of the gap."""
    parts = zip(_ends(row), row.out, strict=True)
    return [[before, *out, *([] if behind is None else [behind])] for (before, behind), out in parts]


def _chance(tables: Float[np.ndarray, "C V V"], path: list[int]) -> Float[np.ndarray, " C"]:
    """Computes the probability of a path of words, given the first word, in every dialect."""
    return tables[:, path[:-1], path[1:]].prod(1)


def _ways(powers: Float[np.ndarray, "P C V V"], before: int, behind: int | None) -> Float[np.ndarray, "N C"]:
    """Computes the probability of the word behind n = 0, 1, ... unknown words: table^(n + 1).

    A gap has at least one word, so n = 0 has probability 0. The last gap has no word behind: probability 1.
    """
    chances = np.ones(powers.shape[:2])[1:] if behind is None else powers[1:, :, before, behind].copy()
    chances[0] = 0
    return chances


def _sum(gaps: Float[np.ndarray, "K N C"]) -> Float[np.ndarray, " C"]:
    """Sums the product of gaps over all divisions of N - 1 words: the last coefficient of a product of polynomials."""
    total = np.zeros_like(gaps[0])
    total[0] = 1
    for gap in gaps:
        total = np.stack([(total[: n + 1] * gap[n::-1]).sum(0) for n in range(len(gap))])
    return total[-1]
