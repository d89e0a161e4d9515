"""What the host feeds to language models: the rows of every step, and what all runs share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from routed.contracts import TextBatch
from routed.routers import ROUTERS
from routed.tasks import text
from routed.tasks.text import Corpus, bigram, spans, stream

#: The seed of the batches in which token ids are counted, and how many.
COUNTING, COUNTED = 2**31 - 1, 64


@functools.lru_cache(maxsize=4)
def _corpus(key: str) -> Corpus:
    return text.load(ConfigDict(json.loads(key)).data)


def corpus(config: ConfigDict) -> Corpus:
    """The corpus of a config, loaded once in a process."""
    return _corpus(json.dumps({"data": dict(config.data)}, sort_keys=True, default=list))


def shared_arrays(config: ConfigDict) -> dict[str, Any]:
    """What all runs of a config share: validation rows, what others lose on them (`references`), experts by token id."""
    shared: dict[str, Any] = {
        "validation": stream.validation(corpus(config), config),
        "references": _references(json.dumps({"data": dict(config.data)}, sort_keys=True, default=list)),
    }
    router = ROUTERS[config.router.name] if "router" in config else None
    if router is not None and router.from_counts is not None:
        shared["table"] = router.from_counts(_counts(config), config.experts.count, config.selection.k)
    return shared


@functools.lru_cache(maxsize=4)
def _references(key: str) -> dict[str, np.float32]:
    """Losses on the validation rows: a bigram model's, and what the source says that can be reached."""
    config = ConfigDict(json.loads(key) | {"batch_size": 64})
    found = {"bigram": bigram.bigram_loss(_corpus(key), config)}
    if (floors := text.SOURCES[config.data.name].floors) is not None:
        found |= floors(config.data, stream.validation(_corpus(key), config))
    return {name: np.float32(loss) for name, loss in found.items()}


def _counts(config: ConfigDict) -> np.ndarray:
    """How often routers meet each token id, in some batches of a seed of its own."""
    one = feed(config, COUNTING)
    return sum(
        np.bincount(np.asarray(one(step, 1).inputs).reshape(-1), minlength=config.data.vocabulary)
        for step in range(COUNTED)
    )  # type: ignore[return-value]


def feed(config: ConfigDict, seed: int, rows: slice = slice(None)) -> Callable[[int, int], TextBatch]:
    """(first, steps) -> `rows` of the batches of these steps, [steps, ...]; the same whoever asks and however often."""
    source = config.seed if "order" in config.held and seed != COUNTING else seed
    make = stream.batch_function(corpus(config), config, source, rows)

    def batches(first: int, steps: int) -> TextBatch:
        made = [make(step) for step in range(first, first + steps)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *made)

    return batches


def feed_shape(config: ConfigDict, steps: int) -> TextBatch:
    """Shapes of the batches of `steps` steps."""
    _, target = spans.lengths(config.data)
    shapes = (config.batch_size, config.data.input_length), (config.batch_size, target), (config.batch_size,)
    return TextBatch(*(jax.ShapeDtypeStruct((steps, *s), np.int32) for s in shapes))  # type: ignore[arg-type]
