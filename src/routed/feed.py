"""What the host gives to language models: the rows of every step, and what all runs share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from routed.data import text
from routed.words import TextBatch

#: The seed of the batches in which token ids are counted, and how many.
COUNTING, COUNTED = 2**31 - 1, 64


@functools.lru_cache(maxsize=4)
def _corpus(key: str) -> text.Corpus:
    return text.load(ConfigDict(json.loads(key)))


def corpus(config: ConfigDict) -> text.Corpus:
    """The corpus of a config, loaded once in a process."""
    return _corpus(json.dumps({"data": dict(config.data)}, sort_keys=True, default=list))


def given(config: ConfigDict) -> dict[str, Any]:
    """What all runs of a config share: validation rows, the loss of a bigram model on them, experts by token id."""
    loaded = corpus(config)
    shared: dict[str, Any] = {
        "validation": text.validation(loaded, config),
        "bigram": np.float32(_bigram(json.dumps({"data": dict(config.data)}, sort_keys=True, default=list))),
    }
    if config.router.name == "hash_id":
        shared["table"] = balanced_table(_counts(config), config.experts.count, config.selection.k)
    return shared


@functools.lru_cache(maxsize=4)
def _bigram(key: str) -> float:
    config = ConfigDict(json.loads(key) | {"batch_size": 64})
    return text.bigram_loss(_corpus(key), config)


def _counts(config: ConfigDict) -> np.ndarray:
    """How often routers meet each token id, in some batches of a seed of its own."""
    inputs = feed(config, COUNTING)(0, COUNTED).inputs
    return np.bincount(np.asarray(inputs).reshape(-1), minlength=config.data.vocabulary)


def balanced_table(counts: np.ndarray, experts: int, k: int) -> np.ndarray:
    """Experts of each token id [V, k], float32: from the most frequent id on, the k experts with least load so far.

    The balanced hash of Roller et al. (2021), which shares out occurrences, not ids.
    """
    table, load = np.zeros((len(counts), k), np.float32), np.zeros(experts)
    for token in np.argsort(-counts, kind="stable"):
        chosen = np.argsort(load, kind="stable")[:k]
        table[token] = chosen
        load[chosen] += counts[token] + 1e-3  # ids that never occur are dealt round
    return table


def feed(config: ConfigDict, seed: int, rows: slice = slice(None)) -> Callable[[int, int], TextBatch]:
    """(first, steps) -> `rows` of the batches of these steps, [steps, ...]; the same whoever asks and however often."""
    source = config.seed if "order" in config.held and seed != COUNTING else seed
    make = text.batch_function(corpus(config), config, source, rows)

    def batches(first: int, steps: int) -> TextBatch:
        made = [make(step) for step in range(first, first + steps)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *made)

    return batches


def feed_shape(config: ConfigDict, steps: int) -> TextBatch:
    """Shapes of the batches of `steps` steps."""
    _, target = text.lengths(config.data)
    shapes = (config.batch_size, config.data.input_length), (config.batch_size, target), (config.batch_size,)
    return TextBatch(*(jax.ShapeDtypeStruct((steps, *s), np.int32) for s in shapes))  # type: ignore[arg-type]
