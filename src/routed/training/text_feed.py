"""Rows that the host feeds to language models: those of every step, and those held out. `form` is the form of a row."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts import TextBatch
from routed.tasks import text
from routed.tasks.text import Corpus, Form, stream
from routed.tasks.text.spans import END

#: The seed of the batches in which token ids are counted, which shares no stream with a run.
COUNTING = 2**31 - 1


@functools.lru_cache(maxsize=4)
def _corpus(form: Form, key: str) -> Corpus:
    return form.load(ConfigDict(json.loads(key)).data)


def corpus(form: Form, config: ConfigDict) -> Corpus:
    """Returns the corpus of a config, loaded once in a process."""
    return _corpus(form, key_of(config))


def key_of(config: ConfigDict) -> str:
    """Returns the settings of the data as a text, the key of caches."""
    return json.dumps({"data": dict(config.data)}, sort_keys=True, default=list)


def held_out(form: Form, config: ConfigDict) -> dict[str, TextBatch]:
    """Returns the rows that a run is evaluated on: `validation`, and `test` of a form that is tested."""
    if not form.tested:
        return {"validation": stream.validation(corpus(form, config), config)}
    return dict(zip(("validation", "test"), stream.held_out(form, corpus(form, config), config), strict=True))


def feed(form: Form, config: ConfigDict, seed: int, rows: slice = slice(None)) -> Callable[[int, int], TextBatch]:
    """Returns (first, steps) -> `rows` of the batches of these steps, [steps, ...]; a pure function."""
    source = config.seed if "order" in config.shared_streams and seed != COUNTING else seed
    make = stream.batch_function(form, corpus(form, config), config, source, rows)

    def batches(first: int, steps: int) -> TextBatch:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *(make(step) for step in range(first, first + steps)))

    return batches


def feed_shape(form: Form, config: ConfigDict, steps: int) -> TextBatch:
    """Returns the shapes of the batches of `steps` steps."""
    inputs, targets = form.lengths(config.data)
    shapes = (config.batch_size, inputs), (config.batch_size, targets), (config.batch_size,)
    return TextBatch(*(jax.ShapeDtypeStruct((steps, *s), np.int32) for s in shapes))  # type: ignore[arg-type]


def counted_of(
    form: Form, config: Any, inputs: Int[Array | np.ndarray, "B L"]
) -> Float[Array | np.ndarray, "B L"] | None:
    """Returns 1 for each target that counts; None: all count.

    0 for the first target behind a document's end (`data.packing`), which no token of its document predicts.
    """
    if not form.packed or config.data.packing != text.DOCUMENTS:
        return None
    return (inputs != END).astype(jnp.float32)
