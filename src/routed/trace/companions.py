"""Routers of another model that reads the same text, as stand-ins: another seed of the same training, for example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from routed.trace.arrays import as_array
from routed.trace.hooks import listening, routers_of
from routed.trace.model_inputs import check_ids
from routed.trace.replacements import Companion, Linear, Router, Site
from routed.trace.similarity import matched
from routed.trace.sites import linear_weights


class _Reading:
    """A model that reads the token ids of a batch once, whichever of its routers asks."""

    def __init__(self, model: Any, modules: Mapping[str, Any], length: int) -> None:
        self.model, self.modules, self.length = model, modules, length
        self.ids: Any = None
        self.outputs: Mapping[str, Any] = {}

    def features(self, name: str, ids: Any) -> Any:
        """Returns the features [T, D] of a router on rows of `length` token ids, flat [T]."""
        import torch

        if self.ids is None or self.ids.shape != ids.shape or not torch.equal(self.ids, ids):
            with torch.no_grad(), listening(self.modules) as outputs:
                self.model(input_ids=ids.reshape(-1, self.length).to(self.model.device), use_cache=False)
            self.ids, self.outputs = ids.clone(), dict(outputs)
        return self.outputs[name].features.reshape(len(ids), -1).float().to(ids.device)


def companions_of(
    model: Any,
    modules: Mapping[str, Any],
    stranger: Any,
    rows: Sequence[np.ndarray],
    *,
    batch_size: int,
    routers: str = "",
    k: int = 0,
) -> dict[str, Companion]:
    """Returns the companion of each router of `model`: the router of that name in `stranger`, on the same rows.

    Its experts are renumbered so that its choices agree with those of the own router on most of the rows' tokens.
    Routers without a linear map of the same number of experts in `stranger` are left out.
    """
    import torch

    check_ids(stranger, rows)
    theirs = routers_of(stranger, routers, k)
    weights = linear_weights(theirs)
    reading = _Reading(stranger.eval(), theirs, len(rows[0]))
    tables: dict[str, np.ndarray] = {}
    with torch.no_grad(), listening(modules) as outputs:
        for begin in range(0, len(rows), batch_size):
            ids = torch.as_tensor(np.stack(rows[begin : begin + batch_size])).to(model.device)
            model(input_ids=ids, use_cache=False)
            for name, output in outputs.items():
                if (linear := weights.get(name)) is None or linear.kernel.shape[1] != output.scores.shape[-1]:
                    continue
                scores = as_array(reading.features(name, ids.reshape(-1))) @ linear.kernel
                scores = scores if linear.offset is None else scores + linear.offset
                first = as_array(output.scores.reshape(scores.shape)).argmax(1)
                table = tables.setdefault(name, np.zeros([scores.shape[1]] * 2, np.int64))
                np.add.at(table, (first, scores.argmax(1)), 1)
    return {name: _renumbered(reading, name, weights[name], matched(table)[1]) for name, table in tables.items()}


def _renumbered(reading: _Reading, name: str, weights: Linear | None, order: np.ndarray) -> Companion:
    assert weights is not None  # a table was made from them
    kernel, offset, bias = weights
    features: Callable[[Any], Any] = lambda ids: reading.features(name, ids)  # noqa: E731
    return Companion(
        features, Linear(kernel[:, order], *(None if part is None else part[order] for part in (offset, bias)))
    )


def of_companion(site: Site, random: np.random.Generator) -> Router | str:
    """Returns the router of the other model, on the features that it has there."""
    if site.companion is None:
        return "the other model has no router of that name with as many experts (--router_from)"
    features, (kernel, offset, bias) = site.companion

    def scores(params: Mapping[str, Any], batch: Any) -> Any:
        given = features(batch.ids) @ params["kernel"]
        return given + params["offset"] if "offset" in params else given

    return Router(scores, {"kernel": kernel} | ({} if offset is None else {"offset": offset}), bias=bias)
