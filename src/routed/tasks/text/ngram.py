"""What counts of the last few tokens predict: the loss that a trained decoder must beat before its routers mean anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

#: Tokens of the longest context that is counted, and one.
ORDER = 5

#: Training tokens that are counted, at most; of a longer text, as many in each of its PIECES, as books stand one behind
#: the other.
COUNTED, PIECES = 1 << 24, 256


def ngram_loss(
    text: Sequence[Integer[np.ndarray, " _"]],
    inputs: Int[np.ndarray, "B L"],
    targets: Int[np.ndarray, "B L"],
    vocabulary: int,
    order: int = ORDER,
    counted: Bool[np.ndarray, "B L"] | None = None,
) -> float:
    """Nats per target (of those that are `counted`) of an interpolated model of `text`, which sees the inputs of a row up to the target, as a decoder does.

    Witten-Bell: p(w|c) = (n(c w) + t(c) p(w|c')) / (n(c) + t(c)), t(c) the number of different tokens after c, and c'
    the context without its first token; p(w) is smoothed with the uniform distribution in turn (Chen and Goodman 1999,
    2.5). A context that never came says nothing, nor one longer than what was read.
    """
    streams = [part.astype(np.int64) for one in text for part in _spread(one, COUNTED // len(text))]
    rows = np.concatenate([inputs, targets[:, -1:]], 1).astype(np.int64)
    probability = np.full(targets.shape, 1 / vocabulary)
    grams, asked, below = streams, rows, vocabulary
    for length in range(1, order + 1):
        if length > 1:  # [i]: the tokens from i - length + 1 to i as one number, all of which are `below`
            if below * vocabulary >= 2**63:
                grams, asked, below = _ranked(grams, asked)
            below *= vocabulary
            grams = [one[:-1] * vocabulary + stream[length - 1 :] for one, stream in zip(grams, streams, strict=True)]
            asked = asked[:, :-1] * vocabulary + rows[:, length - 1 :]
        start = max(length - 2, 0)  # the first target with so long a context
        # Targets are tokens from 1 on, so of single tokens the first is none.
        probability[:, start:] = _mixed(
            np.concatenate(grams), asked[:, length == 1 :], probability[:, start:], vocabulary
        )
    return float(-np.log(probability if counted is None else probability[counted]).mean())


def _spread(text: Integer[np.ndarray, " N"], size: int) -> list[Integer[np.ndarray, " M"]]:
    """The text, or, if it is longer than `size`, the first part of each of its PIECES, of `size` together."""
    if len(text) <= size:
        return [text]
    return [piece[: size // PIECES] for piece in np.array_split(text, PIECES)]


def _ranked(
    grams: list[Int[np.ndarray, " _"]], asked: Int[np.ndarray, "B M"]
) -> tuple[list[Int[np.ndarray, " _"]], Int[np.ndarray, "B M"], int]:
    """Smaller numbers for the grams of the text and for those that are asked for, of which all that never came have one; and what they are below."""
    known, ranks = np.unique(np.concatenate(grams), return_inverse=True)
    place = _find(known, asked)
    ends = np.cumsum([len(one) for one in grams])[:-1]
    return np.split(ranks, ends), np.where(known[place] == asked, place, len(known)), len(known) + 1


def _mixed(
    grams: Int[np.ndarray, " N"], asked: Int[np.ndarray, "B M"], shorter: Float[np.ndarray, "B M"], vocabulary: int
) -> Float[np.ndarray, "B M"]:
    """p of the grams that are asked for, from all grams of the text and the p of the shorter context."""
    known, times = np.unique(grams, return_counts=True)
    contexts, first = np.unique(known // vocabulary, return_index=True)
    total, kinds = np.add.reduceat(times, first), np.diff(first, append=len(known))
    gram, context = _find(known, asked), _find(contexts, asked // vocabulary)
    count = np.where(known[gram] == asked, times[gram], 0)
    mixed = (count + kinds[context] * shorter) / (total + kinds)[context]
    return np.where(contexts[context] == asked // vocabulary, mixed, shorter)


def _find(known: Int[np.ndarray, " N"], values: Int[np.ndarray, "B M"]) -> Int[np.ndarray, "B M"]:
    return np.searchsorted(known, values).clip(max=len(known) - 1)
