"""Arrays that all runs of a text config share: held-out rows, reference losses, and a table of experts by token id."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from routed.routers import ROUTERS
from routed.training.text_feed import COUNTING, corpus, feed, held_out, key_of
from routed.training.text_problem import TextKind

#: Batches in which token ids are counted.
COUNTED = 64


def shared_arrays(kind: TextKind, config: ConfigDict) -> dict[str, Any]:
    """Returns the held-out rows, their `references`, and the `table` of a router by token id."""
    shared: dict[str, Any] = held_out(kind.form, config) | {"references": _references(kind, key_of(config))}
    router = ROUTERS[config.router.name] if kind.models[config.model].routed else None
    if router is not None and router.from_counts is not None:
        shared["table"] = router.from_counts(_counts(kind, config), config.experts.count, config.selection.k)
    return shared


@functools.lru_cache(maxsize=4)
def _references(kind: TextKind, key: str) -> dict[str, np.float32]:
    """Returns losses on the validation rows that need no network, in float32."""
    config = ConfigDict(json.loads(key) | {"batch_size": 64})
    losses = kind.references(corpus(kind.form, config), config, held_out(kind.form, config)["validation"])
    return {name: np.float32(loss) for name, loss in losses.items()}


def _counts(kind: TextKind, config: ConfigDict) -> np.ndarray:
    """Counts each token id in some batches of a seed of their own."""
    batches = feed(kind.form, config, COUNTING)
    return sum(
        np.bincount(np.asarray(batches(step, 1).inputs).reshape(-1), minlength=config.data.vocabulary)
        for step in range(COUNTED)
    )  # type: ignore[return-value]
