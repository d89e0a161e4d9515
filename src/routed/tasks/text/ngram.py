"""Models of counts: a trained model must have a lower loss before its routers are worth a look."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Integer
from ml_collections import ConfigDict

from routed.tasks.text.corpus import Corpus
from routed.tasks.text.spans import PAD
from routed.tasks.text.stream import SPANS, batch_function, validation

#: Order of the model: tokens of the longest context, plus one.
ORDER = 5

#: Most training tokens that the model counts; a longer text gives as many from each of its PIECES, since it may be a
#: row of books.
COUNTED, PIECES = 1 << 24, 256


def ngram_loss(
    text: Sequence[Integer[np.ndarray, " _"]],
    inputs: Int[np.ndarray, "B L"],
    targets: Int[np.ndarray, "B L"],
    vocabulary: int,
    order: int = ORDER,
    counted: Bool[np.ndarray, "B L"] | None = None,
) -> float:
    """Computes nats per target of an interpolated model of `text`, which sees the row up to the target, like a decoder.

    `counted`: the targets that count (default: all).

    Witten-Bell: p(w|c) = (n(c w) + t(c) p(w|c')) / (n(c) + t(c)), t(c) the number of different tokens after c, and c'
    the context without its first token; p(w) is smoothed with the uniform distribution in turn (Chen and Goodman 1999,
    2.5). An unseen context is skipped, and so is a context longer than the row so far.
    """
    streams = [part.astype(np.int64) for stream in text for part in _spread(stream, COUNTED // len(text))]
    rows = np.concatenate([inputs, targets[:, -1:]], 1).astype(np.int64)
    probability = np.full(targets.shape, 1 / vocabulary)
    grams, asked, below = streams, rows, vocabulary
    for length in range(1, order + 1):
        if length > 1:  # [i]: the tokens from i - length + 1 to i as one number, all of which are `below`
            if below * vocabulary >= 2**63:
                grams, asked, below = _ranked(grams, asked)
            below *= vocabulary
            grams = [gram[:-1] * vocabulary + stream[length - 1 :] for gram, stream in zip(grams, streams, strict=True)]
            asked = asked[:, :-1] * vocabulary + rows[:, length - 1 :]
        start = max(length - 2, 0)  # the first target with so long a context
        # Targets are the tokens from 1 on: the first single token is not a target.
        probability[:, start:] = _mixed(
            np.concatenate(grams), asked[:, length == 1 :], probability[:, start:], vocabulary
        )
    return float(-np.log(probability if counted is None else probability[counted]).mean())


def _spread(text: Integer[np.ndarray, " N"], size: int) -> list[Integer[np.ndarray, " M"]]:
    """Returns the text; of a text longer than `size` the first part of each of its PIECES, `size` tokens together."""
    if len(text) <= size:
        return [text]
    return [piece[: size // PIECES] for piece in np.array_split(text, PIECES)]


def _ranked(
    grams: list[Int[np.ndarray, " _"]], asked: Int[np.ndarray, "B M"]
) -> tuple[list[Int[np.ndarray, " _"]], Int[np.ndarray, "B M"], int]:
    """Renumbers grams of the text and of the question by rank; unseen grams share a number.

    Returns both and the number that all ranks are below.
    """
    unique, ranks = np.unique(np.concatenate(grams), return_inverse=True)
    index = _find(unique, asked)
    ends = np.cumsum([len(gram) for gram in grams])[:-1]
    return np.split(ranks, ends), np.where(unique[index] == asked, index, len(unique)), len(unique) + 1


def _mixed(
    grams: Int[np.ndarray, " N"], asked: Int[np.ndarray, "*M"], shorter: Float[np.ndarray, "*M"], vocabulary: int
) -> Float[np.ndarray, "*M"]:
    """Computes p of the asked grams from all grams of the text and from p given the shorter context."""
    unique, times = np.unique(grams, return_counts=True)
    contexts, first = np.unique(unique // vocabulary, return_index=True)
    total, kinds = np.add.reduceat(times, first), np.diff(first, append=len(unique))
    gram, context = _find(unique, asked), _find(contexts, asked // vocabulary)
    count = np.where(unique[gram] == asked, times[gram], 0)
    mixed = (count + kinds[context] * shorter) / (total + kinds)[context]
    return np.where(contexts[context] == asked // vocabulary, mixed, shorter)


def _find(ordered: Int[np.ndarray, " N"], values: Int[np.ndarray, "*M"]) -> Int[np.ndarray, "*M"]:
    """Returns an index for each value, which is right if the value occurs."""
    return np.searchsorted(ordered, values).clip(max=len(ordered) - 1)


#: Number of training rows that the model counts.
ROWS = 20_000


def bigram_loss(corpus: Corpus, config: ConfigDict, seed: int = 0) -> float:
    """Computes nats per target token of `validation`, sentinels and end included, for a bigram model of targets.

    The model sees the token before (PAD at the start), not the encoder; it is smoothed as in `ngram_loss`.
    """
    size = corpus.vocabulary
    make = batch_function(SPANS, corpus, config, seed, slice(None))
    steps = -(-ROWS // config.batch_size)
    counted = _pairs(np.concatenate([make(step).targets for step in range(steps)]), size)
    asked = _pairs(np.asarray(validation(corpus, config).targets), size)
    of_token = _mixed(counted % size, asked % size, np.full(asked.shape, 1 / size), size)
    return float(-np.log(_mixed(counted, asked, of_token, size)).mean())


def _pairs(targets: Int[np.ndarray, "B M"], vocabulary: int) -> Int[np.ndarray, " N"]:
    """Encodes (token before, token) as one number, for every target token."""
    before = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)
    return (before.astype(np.int64) * vocabulary + targets).ravel()
