"""The least loss that a reader of dialects can reach under span corruption: exact for every row, not an estimate."""

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
    """A corrupted row, as words: what is left before each gap, and what is cut out there.

    A row ends with what is cut out.
    """

    left: list[list[int]]
    out: list[list[int]]


def floors(data: ConfigDict, batch: TextBatch) -> dict[str, float]:
    """Nats per target token, sentinels and end included, for who knows all dialects, but not which one a row is of.

    `floor` reads the whole input, and so learns the dialect; `floor_blind` sees of each gap the word before and the
    word behind. -log p(row) / p(input), and p(input) is the sum of p(row) over all that may have been cut out, and over
    the lengths of the cuts, whose divisions are equally likely. The dialect is summed over in both: once a row, or
    (blind) once a gap.
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
    """The words of a row from its tokens: sentinels part what is left, and begin what is cut out."""

    def parts(ids: np.ndarray) -> list[list[int]]:
        row_words = ids[:-1] - tokenizers.RESERVED - FIRST  # the last token ends the row
        return [part.tolist() for part in np.split(row_words, np.flatnonzero(row_words >= data.words))]

    first, *rest = parts(inputs)
    return Cut([first, *(part[1:] for part in rest[:-1])], [part[1:] for part in parts(targets)[1:]])


def _ends(row: Cut) -> list[tuple[int, int | None]]:
    """The words before and behind each gap; none behind the last, with which a row ends."""
    behind = [*(part[0] for part in row.left[1:]), None]
    return [(part[-1], word) for part, word in zip(row.left, behind, strict=True)]


def _paths(row: Cut) -> list[list[int]]:
    """What was cut out of each gap, with the words at its ends."""
    parts = zip(_ends(row), row.out, strict=True)
    return [[before, *out, *([] if behind is None else [behind])] for (before, behind), out in parts]


def _chance(tables: Float[np.ndarray, "C V V"], path: list[int]) -> Float[np.ndarray, " C"]:
    """Of words that follow each other, given the first, in every dialect."""
    return tables[:, path[:-1], path[1:]].prod(1)


def _ways(powers: Float[np.ndarray, "P C V V"], before: int, behind: int | None) -> Float[np.ndarray, "N C"]:
    """The chance of the word behind n = 0, 1, ...

    unknown ones, table^(n + 1); at least one is cut out, and after the last gap is nothing.
    """
    chances = np.ones(powers.shape[:2])[1:] if behind is None else powers[1:, :, before, behind].copy()
    chances[0] = 0
    return chances


def _sum(gaps: Float[np.ndarray, "K N C"]) -> Float[np.ndarray, " C"]:
    """The product of gaps, over all divisions of N - 1 words among them: the last coefficient of a product of polynomials."""
    total = np.zeros_like(gaps[0])
    total[0] = 1
    for gap in gaps:
        total = np.stack([(total[: n + 1] * gap[n::-1]).sum(0) for n in range(len(gap))])
    return total[-1]
