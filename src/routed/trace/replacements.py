"""Routers that replace a trained router, as data: a label, and a function from a site to new scores for each batch.

The model's own rule turns the scores into choices (`hooks_replace.replacing`). Torch is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from sklearn.cluster import KMeans

from routed.routers.scores import sharpness_for
from routed.trace.similarity import matched

Tensor = Any  # of torch
Params = Mapping[str, Tensor]


class Batch(NamedTuple):
    """Input of a replacement: the trained router's scores [T, E], features [T, D], ids [T], number of the batch."""

    scores: Tensor
    features: Tensor
    ids: Tensor
    number: int


class Linear(NamedTuple):
    """Weights of a linear router: kernel [D, E], offset [E] or None, bias [E] of the choice alone or None."""

    kernel: np.ndarray
    offset: np.ndarray | None
    bias: np.ndarray | None

    def renumbered(self, source: np.ndarray) -> Linear:
        """Returns the router whose expert e has the weights of expert source[e]."""
        offset, bias = (None if part is None else part[source] for part in (self.offset, self.bias))
        return Linear(self.kernel[:, source], offset, bias)


class Companion(NamedTuple):
    """A router of another model: its features [T, D] of token ids [T], and its weights, numbered as the site's."""

    features: Callable[[Tensor], Tensor]
    weights: Linear


class Site(NamedTuple):
    """A router to replace, with `k` of `experts` experts per token, and statistics of it on other text.

    `ids` [F], `scores` [F, E] and `features` [F, D] are of some tokens of that text. `counts` [N + 1, E] are choices
    of each expert by token id, on all of that text; the last row is their sum. `row_of` [V] is the row of an id: the
    last if the text lacks it. `trained` are the router's weights (None: it is no linear map), `next_layer` those of
    the next layer's router (for the last layer the first's), `checkpoint` those in another checkpoint, and `companion`
    is the router of that place in another model that reads the same text. `first_experts` [F] are those of the largest
    weights.
    """

    experts: int
    k: int
    ids: np.ndarray
    scores: np.ndarray
    features: np.ndarray
    counts: np.ndarray
    row_of: np.ndarray
    trained: Linear | None
    next_layer: Linear | None = None
    checkpoint: Linear | None = None
    companion: Companion | None = None
    first_experts: np.ndarray = np.zeros(0, np.int64)


class Router(NamedTuple):
    """A replacement for one site: `scores(parameters, batch)`, and the parameters at the start, which a repair trains.

    `k` is its number of experts per token (0: the model's); `bias` [E] is added to the scores for the choice alone.
    """

    scores: Callable[[Params, Batch], Tensor]
    start: Mapping[str, np.ndarray] = {}
    k: int = 0
    bias: np.ndarray | None = None


class Replacement(NamedTuple):
    """A kind of router: `make(site, random)` returns the router of a site, or the reason why there is none.

    `label` and `description` stand on the page. A `drawn` one depends on the seed; one that does not learn has no
    parameters to repair; `needs_checkpoint` is for another checkpoint. One that `replaces_all` is tried in all layers
    at once, and not in each alone.
    """

    make: Callable[[Site, np.random.Generator], Router | str]
    label: str
    description: str
    drawn: bool = False
    learns: bool = True
    needs_checkpoint: bool = False
    replaces_all: bool = False


NOT_LINEAR = "the router is not a linear map of its input, so it has no weights to take"
#: Score of an expert that no rule chooses: its weight is 0 for a softmax and for a sigmoid.
DROPPED = -1e4


def linear_scores(params: Params, batch: Batch) -> Tensor:
    scores = batch.features.float() @ params["kernel"]
    return scores + params["offset"] if "offset" in params else scores


def linear(weights: Linear, k: int = 0) -> Router:
    """Returns the router with these weights."""
    start = {"kernel": weights.kernel} | ({} if weights.offset is None else {"offset": weights.offset})
    return Router(linear_scores, start, k, weights.bias)


def as_sharp(scores: np.ndarray, site: Site) -> tuple[float, float]:
    """Returns (factor, shift) that give scores [F, E] the mean and the mean softmax entropy of the trained scores."""
    logs = site.scores - np.logaddexp.reduce(site.scores, axis=1, keepdims=True)
    entropy = float(-(np.exp(logs) * logs).sum(1).mean())
    factor = float(sharpness_for(jnp.asarray(scores), jnp.float32(entropy)))
    return factor, float(site.scores.mean() - factor * scores.mean())


def shuffled(site: Site, random: np.random.Generator) -> Router | str:
    """Returns the trained router with permuted experts, by one cycle through all experts."""
    cycle = random.permutation(site.experts)
    source = np.empty(site.experts, int)
    source[np.roll(cycle, -1)] = cycle  # expert e gets the scores of expert source[e]
    if site.trained is None:
        return Router(lambda params, batch: batch.scores[:, source.tolist()])
    return linear(site.trained.renumbered(source))


def random_weights(site: Site, random: np.random.Generator) -> Router | str:
    kernel = random.standard_normal((site.features.shape[1], site.experts)).astype(np.float32)
    factor, shift = as_sharp(site.features @ kernel, site)
    return Router(lambda params, batch: linear_scores(params, batch) + shift, {"kernel": factor * kernel})


def noise(site: Site, random: np.random.Generator) -> Router | str:
    seed = int(random.integers(1 << 31))
    some = np.random.default_rng(seed).standard_normal(site.scores.shape).astype(np.float32)
    factor, shift = as_sharp(some, site)
    return Router(lambda params, batch: factor * _normal(seed, batch) + shift)


def uniform(site: Site, random: np.random.Generator) -> Router | str:
    seed, level = int(random.integers(1 << 31)), float(site.scores.mean())
    # Noise breaks ties. Neighbours of a bfloat16 number x are |x| / 128 or less away: smaller noise would vanish.
    size = max(1e-3, abs(level) / 32)
    return Router(lambda params, batch: level + size * _normal(seed, batch))


def _normal(seed: int, batch: Batch) -> Tensor:
    """Returns normal numbers of the shape of the scores: equal for equal batches, on any device."""
    import torch

    source = torch.Generator().manual_seed((seed + 7919 * batch.number) % (1 << 31))
    return torch.randn(batch.scores.shape, generator=source).to(batch.scores.device)


def table(site: Site, random: np.random.Generator) -> Router | str:
    load = site.counts[-1] / max(site.counts[-1].sum(), 1)
    counts = np.concatenate([site.counts[:-1], np.zeros((1, site.experts))]) + np.maximum(load, 1e-6)
    logs = np.log(counts / counts.sum(1, keepdims=True)).astype(np.float32)
    factor, shift = as_sharp(logs[site.row_of[site.ids]], site)

    def scores(params: Params, batch: Batch) -> Tensor:
        import torch

        return params["table"][torch.as_tensor(site.row_of, device=batch.ids.device)[batch.ids]]

    return Router(scores, {"table": factor * logs + shift})


def top1(site: Site, random: np.random.Generator) -> Router | str:
    if site.k == 1:
        return "a token has one expert already"
    return NOT_LINEAR if site.trained is None else linear(site.trained, k=1)


def weights_named(name: str, lacking: str) -> Callable[[Site, np.random.Generator], Router | str]:
    """Returns the maker of a router from a site's weights of that name, with the reason where it has none."""

    def make(site: Site, random: np.random.Generator) -> Router | str:
        weights, shape = getattr(site, name), (site.features.shape[1], site.experts)
        if weights is None:
            return lacking
        if weights.kernel.shape != shape:
            return f"its weights have shape {list(weights.kernel.shape)}, not {list(shape)}"
        return linear(weights)

    return make


def kmeans(site: Site, random: np.random.Generator) -> Router | str:
    """Returns the router whose scores fall with the squared distance from centres of k-means: 2 x c - c c, times f.

    The term x x is equal for all experts, so a softmax does not see it.
    """
    if len(site.features) < site.experts:
        return f"the other text has {len(site.features)} tokens, fewer than experts"
    fitted = KMeans(site.experts, n_init=1, random_state=int(random.integers(1 << 31))).fit(site.features)
    table = np.zeros((site.experts, site.experts), np.int64)
    np.add.at(table, (site.first_experts, fitted.labels_), 1)
    centres = fitted.cluster_centers_[matched(table)[1]].astype(np.float32)  # expert e has the cluster it matches
    offset = -(centres**2).sum(1)
    factor, shift = as_sharp(2 * site.features @ centres.T + offset, site)
    return linear(Linear(2 * factor * centres.T, factor * offset + shift, None))


def of_companion(site: Site, random: np.random.Generator) -> Router | str:
    """Returns the router of the other model, on the features that it has there."""
    if site.companion is None:
        return "the other model has no router of that name with as many experts (--router_from)"
    features, weights = site.companion

    def scores(params: Params, batch: Batch) -> Tensor:
        return linear_scores(params, batch._replace(features=features(batch.ids)))

    return linear(weights)._replace(scores=scores)
