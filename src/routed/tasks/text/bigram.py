"""What counts alone can predict: the loss that every trained model must beat before its router means anything."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from routed.tasks.text.corpus import Corpus
from routed.tasks.text.spans import PAD
from routed.tasks.text.stream import SPANS, batch_function, validation

#: Training rows that are counted.
ROWS = 20_000


def bigram_loss(corpus: Corpus, config: ConfigDict, seed: int = 0) -> float:
    """Nats per target token of `validation`, sentinels and end included, for a bigram model of targets.

    It sees the token before (PAD at the start), not the encoder. Witten-Bell: p(w|v) = (c(v w) + t(v) p(w)) / (c(v) +
    t(v)) with t(v) the number of different tokens after v, and p(w) in turn smoothed with the uniform distribution
    (Chen and Goodman 1999, 2.5).
    """
    size = corpus.vocabulary
    make = batch_function(SPANS, corpus, config, seed, slice(None))
    steps = -(-ROWS // config.batch_size)
    counted = _pairs(np.concatenate([make(step).targets for step in range(steps)]), size)
    before, token = np.divmod(_pairs(np.asarray(validation(corpus, config).targets), size), size)

    unigram = np.bincount(counted % size, minlength=size)
    kinds = np.count_nonzero(unigram)
    unigram = (unigram + kinds / size) / (unigram.sum() + kinds)

    pairs, times = np.unique(counted, return_counts=True)
    total, different = np.bincount(counted // size, minlength=size), np.bincount(pairs // size, minlength=size)
    place = np.searchsorted(pairs, before * size + token).clip(max=len(pairs) - 1)
    counts = np.where(pairs[place] == before * size + token, times[place], 0)
    known = np.maximum(total + different, 1)[before]
    mixed = (counts + different[before] * unigram[token]) / known
    return float(-np.log(np.where(total[before] > 0, mixed, unigram[token])).mean())


def _pairs(targets: Int[np.ndarray, "B M"], vocabulary: int) -> Int[np.ndarray, " N"]:
    """(token before, token) as one number, for every target token."""
    before = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)
    return (before.astype(np.int64) * vocabulary + targets).ravel()
