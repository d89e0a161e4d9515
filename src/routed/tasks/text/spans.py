"""Span corruption of T5 (Raffel et al. 2020, 3.1.4): spans of a row are cut out, a sentinel marks each gap.

Every row of a batch loses the same number of tokens in the same number of spans, so shapes are fixed and rows are full.
"""

from __future__ import annotations

import bisect

import numpy as np
from jaxtyping import Bool, Int, Integer
from ml_collections import ConfigDict

from routed.contracts import UserError

PAD, END, UNKNOWN = 0, 1, 2


def counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Returns the number of tokens that are removed from a row of `length`, and the number of spans.

    round(length density) and round(tokens / mean_span), as in `random_spans_noise_mask` of T5; at least one of each,
    with gaps between spans.
    """
    noise = min(max(round(length * density), 1), length - 1)
    return noise, min(max(round(noise / mean_span), 1), noise, length - noise)


def lengths(data: ConfigDict) -> tuple[int, int]:
    """Returns the length of a row before corruption and of its target: the encoder gets exactly `data.input_length`.

    input = row - noise + spans + 1, target = noise + spans + 1 (the 1 is the end of sequence), for the longest such
    row, as in `random_spans_helper` of T5: 512 gives 568 and 114.

    Raises:
      UserError: no row has this length after corruption.
    """

    def corrupted(row: int) -> tuple[int, int]:
        noise, spans = counts(row, data.noise_density, data.mean_span)
        return row - noise + spans + 1, noise + spans + 1

    # The first row whose input is too long; a longer row never has a shorter input.
    row = 2 + bisect.bisect_right(range(2, 1 << 50), data.input_length, key=lambda row: corrupted(row)[0])
    inputs, target = corrupted(row - 1) if row > 2 else (0, 0)
    if inputs != data.input_length:
        raise UserError(
            f"data.input_length={data.input_length}: no row becomes exactly that long with data.noise_density="
            f"{data.noise_density} and data.mean_span={data.mean_span}; set it to {corrupted(row)[0]}"
        )
    return row - 1, target


def noise_mask(
    rng: np.random.Generator, batch: int, length: int, density: float, mean_span: float
) -> Bool[np.ndarray, "B R"]:
    """Draws a mask that is True for removed tokens. Spans and gaps are random segmentations; a gap comes first."""
    noise, spans = counts(length, density, mean_span)
    gaps, cuts = _segments(rng, batch, length - noise, spans), _segments(rng, batch, noise, spans)
    ends = np.stack([gaps, cuts], axis=-1).reshape(batch, 2 * spans).cumsum(-1)
    starts = np.zeros((batch, length + 1), int)
    np.put_along_axis(starts, ends, 1, axis=-1)
    return starts[:, :length].cumsum(-1) % 2 == 1


def corrupt(
    rows: Integer[np.ndarray, "B R"], noise: Bool[np.ndarray, "B R"], vocabulary: int
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B M"]]:
    """Returns inputs (gaps and a sentinel for each span) and targets (spans and a sentinel for each gap), with END.

    The i-th sentinel of a row is `vocabulary` - 1 - i. All rows must have the same number of removed tokens and spans.
    """
    return _replace(rows, noise, vocabulary), _replace(rows, ~noise, vocabulary)


def _replace(rows: np.ndarray, hidden: np.ndarray, vocabulary: int) -> np.ndarray:
    """Replaces every run of hidden tokens by a sentinel and adds END."""
    first = hidden.copy()
    first[:, 1:] &= ~hidden[:, :-1]
    sentinels = vocabulary - first.cumsum(-1)
    visible = np.where(first, sentinels, rows)[~hidden | first].reshape(len(rows), -1)
    return np.pad(visible, ((0, 0), (0, 1)), constant_values=END).astype(np.int32)


def _segments(rng: np.random.Generator, batch: int, total: int, parts: int) -> Int[np.ndarray, "B S"]:
    """Divides `total` into `parts` of at least 1, all ways equally likely: cuts at parts - 1 of total - 1 positions."""
    cuts = np.argsort(rng.random((batch, total - 1)), axis=-1)[:, : parts - 1] + 1
    edges = np.pad(np.sort(cuts, axis=-1), ((0, 0), (1, 1)))
    edges[:, -1] = total
    return np.diff(edges, axis=-1)
