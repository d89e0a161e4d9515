"""A bigram model of counts: every trained model must have a lower loss before its router is worth a look."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from routed.tasks.text.corpus import Corpus
from routed.tasks.text.spans import PAD
from routed.tasks.text.stream import SPANS, batch_function, validation

#: Number of training rows that the model counts.
ROWS = 20_000


def bigram_loss(corpus: Corpus, config: ConfigDict, seed: int = 0) -> float:
    """Computes nats per target token of `validation`, sentinels and end included, for a bigram model of targets.

    The model sees the token before (PAD at the start), not the encoder. Witten-Bell: p(w|v) = (c(v w) + t(v) p(w)) /
    (c(v) + t(v)) with t(v) the number of different tokens after v, and p(w) in turn smoothed with the uniform
    distribution (Chen and Goodman 1999, 2.5).
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
    index = np.searchsorted(pairs, before * size + token).clip(max=len(pairs) - 1)
    counts = np.where(pairs[index] == before * size + token, times[index], 0)
    denominator = np.maximum(total + different, 1)[before]
    mixed = (counts + different[before] * unigram[token]) / denominator
    return float(-np.log(np.where(total[before] > 0, mixed, unigram[token])).mean())


def _pairs(targets: Int[np.ndarray, "B M"], vocabulary: int) -> Int[np.ndarray, " N"]:
    """Encodes (token before, token) as one number, for every target token."""
    before = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)
    return (before.astype(np.int64) * vocabulary + targets).ravel()
