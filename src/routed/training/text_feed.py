"""What the host feeds to language models: the rows of every step, and what all runs share. `form` is what a row becomes."""

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
from routed.routers import ROUTERS
from routed.tasks import text
from routed.tasks.text import CLASSIFIED, SPANS, Corpus, Form, bigram, stream
from routed.tasks.text.spans import END

#: The seed of the batches in which token ids are counted, and how many.
COUNTING, COUNTED = 2**31 - 1, 64


@functools.lru_cache(maxsize=4)
def _corpus(form: Form, key: str) -> Corpus:
    return form.load(ConfigDict(json.loads(key)).data)


def corpus(form: Form, config: ConfigDict) -> Corpus:
    """The corpus of a config, loaded once in a process."""
    return _corpus(form, _key(config))


def _key(config: ConfigDict) -> str:
    return json.dumps({"data": dict(config.data)}, sort_keys=True, default=list)


def held_out(form: Form, config: ConfigDict) -> dict[str, TextBatch]:
    """The rows that a run is evaluated on: `validation`, and `test` of a form that is tested."""
    if not form.tested:
        return {"validation": stream.validation(corpus(form, config), config)}
    return dict(zip(("validation", "test"), stream.held_out(form, corpus(form, config), config), strict=True))


def shared_arrays(form: Form, config: ConfigDict) -> dict[str, Any]:
    """What all runs of a config share: rows to evaluate on, what others lose on them (`references`), experts by token id."""
    shared: dict[str, Any] = held_out(form, config) | {"references": _references(form, _key(config))}
    router = ROUTERS[config.router.name] if "router" in config else None
    if router is not None and router.from_counts is not None:
        shared["table"] = router.from_counts(_counts(form, config), config.experts.count, config.selection.k)
    return shared


@functools.lru_cache(maxsize=4)
def _references(form: Form, key: str) -> dict[str, np.float32]:
    """Losses on the validation rows: of counts, and what the source says that can be reached."""
    config = ConfigDict(json.loads(key) | {"batch_size": 64})
    there, rows = _corpus(form, key), held_out(form, config)["validation"]
    if form is CLASSIFIED:  # as often as each class is in training
        counts = np.bincount(there.train[0][:, 0], minlength=len(config.data.labels))
        return {"prior": np.float32(-np.log(counts / counts.sum())[np.asarray(rows.targets)].mean())}
    if form is not SPANS:
        texts = [one[:, :-1].reshape(-1) for one in there.train]
        weights = counted_of(config, rows.inputs)
        counted = None if weights is None else np.asarray(weights, bool)
        loss = text.ngram_loss(
            texts, np.asarray(rows.inputs), np.asarray(rows.targets), there.vocabulary, counted=counted
        )
        return {"ngram": np.float32(loss)}
    found = {"bigram": bigram.bigram_loss(there, config)}
    if (floors := text.SOURCES[config.data.name].floors) is not None:
        found |= floors(config.data, rows)
    return {name: np.float32(loss) for name, loss in found.items()}


def _counts(form: Form, config: ConfigDict) -> np.ndarray:
    """How often routers meet each token id, in some batches of a seed of its own."""
    one = feed(form, config, COUNTING)
    return sum(
        np.bincount(np.asarray(one(step, 1).inputs).reshape(-1), minlength=config.data.vocabulary)
        for step in range(COUNTED)
    )  # type: ignore[return-value]


def feed(form: Form, config: ConfigDict, seed: int, rows: slice = slice(None)) -> Callable[[int, int], TextBatch]:
    """(first, steps) -> `rows` of the batches of these steps, [steps, ...]; the same whoever asks and however often."""
    source = config.seed if "order" in config.held and seed != COUNTING else seed
    make = stream.batch_function(form, corpus(form, config), config, source, rows)

    def batches(first: int, steps: int) -> TextBatch:
        made = [make(step) for step in range(first, first + steps)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *made)

    return batches


def feed_shape(form: Form, config: ConfigDict, steps: int) -> TextBatch:
    """Shapes of the batches of `steps` steps."""
    inputs, targets = form.lengths(config.data)
    shapes = (config.batch_size, inputs), (config.batch_size, targets), (config.batch_size,)
    return TextBatch(*(jax.ShapeDtypeStruct((steps, *s), np.int32) for s in shapes))  # type: ignore[arg-type]


def counted_of(config: Any, inputs: Int[Array | np.ndarray, "B L"]) -> Float[Array | np.ndarray, "B L"] | None:
    """1 for each target that counts, 0 for those that another document's end would predict (`data.packing`); None where all count."""
    if "packing" not in config.data or config.data.packing != text.DOCUMENTS:
        return None
    return (inputs != END).astype(jnp.float32)
