"""Statistics of a model's routers on other text, from which replacements are made, and routers of another model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging as log

from routed.trace.checks import as_array
from routed.trace.hooks import RouterModule, check_heard, choice_bias, listening, routers_of, weights_of
from routed.trace.model_inputs import batches, check_ids
from routed.trace.replacements import Companion, Linear, Site
from routed.trace.similarity import matched

#: Tokens of other text whose scores and features are kept.
MOST_TOKENS = 4096


def linear_weights(modules: Mapping[str, RouterModule]) -> dict[str, Linear | None]:
    """Returns the weights of each router; None for a router that is not a linear map."""
    by_name: dict[str, Linear | None] = {}
    for name, router in modules.items():
        weights, bias = weights_of(router.module), choice_bias(router)
        by_name[name] = weights and Linear(*weights, None if bias is None else as_array(bias).reshape(-1))
    return by_name


def sites_of(
    model: Any,
    modules: Mapping[str, RouterModule],
    rows: Sequence[np.ndarray],
    batch_size: int,
    checkpoint: Mapping[str, Linear | None],
) -> dict[str, Site]:
    """Returns the site of every router, from one pass over rows of other text, and another checkpoint's weights."""
    import torch

    log.info("reading %d rows of other text", len(rows))
    ids = np.concatenate(rows)
    codes = np.unique(ids)
    row_of = np.full(len(model.get_input_embeddings().weight), len(codes), np.int64)
    row_of[codes] = np.arange(len(codes))
    sampled = np.sort(np.random.default_rng(0).permutation(len(ids))[:MOST_TOKENS])
    counts = dict[str, np.ndarray]()  # choices [N + 1, E] by row of the token id
    first_experts, scores, features = ({name: list[np.ndarray]() for name in modules} for _ in range(3))
    with torch.no_grad(), listening(modules) as outputs:
        for begin, some in batches(model, rows, batch_size):
            model(input_ids=some, use_cache=False)
            check_heard(modules, outputs)
            here = sampled[(sampled >= begin) & (sampled < begin + some.numel())] - begin
            for name, output in outputs.items():
                empty = np.zeros((len(codes) + 1, output.scores.shape[-1]), np.int32)
                rows_of_ids = row_of[as_array(some).reshape(-1)][:, None]
                np.add.at(counts.setdefault(name, empty), (rows_of_ids, as_array(output.experts)), 1)
                first_experts[name].append(as_array(output.experts[here])[:, 0])
                scores[name].append(as_array(output.scores[here]).astype(np.float32))
                features[name].append(as_array(output.features[here]).astype(np.float32))
    weights, names, sites = linear_weights(modules), list(modules), {}
    weights |= {name: None for name, output in outputs.items() if output.linear is None}
    for name, after in zip(names, names[1:] + names[:1], strict=True):
        counts[name][-1] = counts[name].sum(0)
        sites[name] = Site(
            experts=counts[name].shape[1],
            k=outputs[name].experts.shape[-1],
            ids=ids[sampled],
            scores=np.concatenate(scores[name]),
            features=np.concatenate(features[name]),
            counts=counts[name],
            row_of=row_of,
            trained=weights[name],
            next_layer=weights[after] if after != name else None,
            checkpoint=checkpoint.get(name),
            first_experts=np.concatenate(first_experts[name]),
        )
    return sites


class _Reading:
    """A model that reads the token ids of a batch once, whichever of its routers asks."""

    def __init__(self, model: Any, modules: Mapping[str, RouterModule], length: int) -> None:
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
    modules: Mapping[str, RouterModule],
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
    weights = {name: linear for name, linear in linear_weights(theirs).items() if linear is not None}
    reading = _Reading(stranger.eval(), theirs, len(rows[0]))
    tables: dict[str, np.ndarray] = {}
    with torch.no_grad(), listening(modules) as outputs:
        for _, ids in batches(model, rows, batch_size):
            model(input_ids=ids, use_cache=False)
            for name, output in outputs.items():
                if name not in weights or weights[name].kernel.shape[1] != output.scores.shape[-1]:
                    continue
                reading.features(name, ids.reshape(-1))
                first_experts = (as_array(part.experts)[:, 0] for part in (output, reading.outputs[name]))
                table = tables.setdefault(name, np.zeros([output.scores.shape[-1]] * 2, np.int64))
                np.add.at(table, tuple(first_experts), 1)
    return {
        name: Companion(functools.partial(reading.features, name), weights[name].renumbered(matched(table)[1]))
        for name, table in tables.items()
    }
