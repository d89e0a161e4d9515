"""Statistics of a model's routers on other text, from which replacements are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging as log

from routed.trace.arrays import as_array
from routed.trace.hooks import RouterModule, check_heard, choice_bias, listening, weights_of
from routed.trace.replacements import Linear, Site

#: Tokens of other text whose scores and features are kept.
MOST_TOKENS = 4096


class _Statistics(NamedTuple):
    """Statistics of one router: choices [N + 1, E] by row of the token id, scores and features of sampled tokens."""

    counts: np.ndarray
    scores: list[np.ndarray]
    features: list[np.ndarray]


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
    statistics: dict[str, _Statistics] = {}
    with torch.no_grad(), listening(modules) as outputs:
        for begin in range(0, len(rows), batch_size):
            some = np.stack(rows[begin : begin + batch_size])
            model(input_ids=torch.as_tensor(some).to(model.device), use_cache=False)
            check_heard(modules, outputs)
            first = begin * some.shape[1]
            here = sampled[(sampled >= first) & (sampled < first + some.size)] - first
            for name, output in outputs.items():
                experts = output.scores.shape[-1]
                empty = _Statistics(np.zeros((len(codes) + 1, experts), np.int32), [], [])
                counts, scores, features = statistics.setdefault(name, empty)
                np.add.at(counts, (row_of[some.reshape(-1)][:, None], as_array(output.experts)), 1)
                scores.append(as_array(output.scores[here]).astype(np.float32))
                features.append(as_array(output.features[here]).astype(np.float32))
    weights, names, sites = linear_weights(modules), list(modules), {}
    weights |= {name: None for name, output in outputs.items() if output.linear is None}
    for name, after in zip(names, names[1:] + names[:1], strict=True):
        counts, scores, features = statistics[name]
        counts[-1] = counts.sum(0)
        sites[name] = Site(
            experts=counts.shape[1],
            k=outputs[name].experts.shape[-1],
            ids=ids[sampled],
            scores=np.concatenate(scores),
            features=np.concatenate(features),
            counts=counts,
            row_of=row_of,
            trained=weights[name],
            next_layer=weights[after] if after != name else None,
            checkpoint=checkpoint.get(name),
        )
    return sites
