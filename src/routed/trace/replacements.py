"""Routers that replace a trained router, as data: a label, and a function from a site to new scores for each batch.

The model's own rule turns the scores into choices (`hooks_replace.replacing`). Torch is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from routed.routers.scores import sharpness_for

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


class Site(NamedTuple):
    """A router to replace, with `k` of `experts` experts per token, and statistics of it on other text.

    `ids` [F], `scores` [F, E] and `features` [F, D] are of some tokens of that text. `counts` [N + 1, E] are choices
    of each expert by token id, on all of that text; the last row is their sum. `row_of` [V] is the row of an id: the
    last if the text lacks it. `trained` are the router's weights (None: it is no linear map), `next_layer` those of
    the next layer's router (for the last layer the first's), `checkpoint` those in another checkpoint.
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
    parameters to repair; `needs_checkpoint` is for the weights of another checkpoint.
    """

    make: Callable[[Site, np.random.Generator], Router | str]
    label: str
    description: str
    drawn: bool = False
    learns: bool = True
    needs_checkpoint: bool = False


NOT_LINEAR = "the router is not a linear map of its input, so it has no weights to take"


def _linear_scores(params: Params, batch: Batch) -> Tensor:
    scores = batch.features.float() @ params["kernel"]
    return scores + params["offset"] if "offset" in params else scores


def linear(weights: Linear, k: int = 0) -> Router:
    """Returns the router with these weights."""
    start = {"kernel": weights.kernel} | ({} if weights.offset is None else {"offset": weights.offset})
    return Router(_linear_scores, start, k, weights.bias)


def _as_sharp(scores: np.ndarray, site: Site) -> tuple[float, float]:
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
    kernel, offset, bias = site.trained
    return linear(Linear(kernel[:, source], *(None if part is None else part[source] for part in (offset, bias))))


def _random(site: Site, random: np.random.Generator) -> Router | str:
    kernel = random.standard_normal((site.features.shape[1], site.experts)).astype(np.float32)
    factor, shift = _as_sharp(site.features @ kernel, site)
    return Router(lambda params, batch: _linear_scores(params, batch) + shift, {"kernel": factor * kernel})


def _noise(site: Site, random: np.random.Generator) -> Router | str:
    seed = int(random.integers(1 << 31))
    some = np.random.default_rng(seed).standard_normal(site.scores.shape).astype(np.float32)
    factor, shift = _as_sharp(some, site)
    return Router(lambda params, batch: factor * _normal(seed, batch) + shift)


def _uniform(site: Site, random: np.random.Generator) -> Router | str:
    seed, level = int(random.integers(1 << 31)), float(site.scores.mean())
    # Noise of 1e-3 breaks ties: less would vanish in bfloat16.
    return Router(lambda params, batch: level + 1e-3 * _normal(seed, batch))


def _normal(seed: int, batch: Batch) -> Tensor:
    """Returns normal numbers of the shape of the scores: equal for equal batches, on any device."""
    import torch

    source = torch.Generator().manual_seed((seed + 7919 * batch.number) % (1 << 31))
    return torch.randn(batch.scores.shape, generator=source).to(batch.scores.device)


def _table(site: Site, random: np.random.Generator) -> Router | str:
    load = site.counts[-1] / max(site.counts[-1].sum(), 1)
    counts = np.concatenate([site.counts[:-1], np.zeros((1, site.experts))]) + np.maximum(load, 1e-6)
    logs = np.log(counts / counts.sum(1, keepdims=True)).astype(np.float32)
    factor, shift = _as_sharp(logs[site.row_of[site.ids]], site)

    def scores(params: Params, batch: Batch) -> Tensor:
        import torch

        return params["table"][torch.as_tensor(site.row_of, device=batch.ids.device)[batch.ids]]

    return Router(scores, {"table": factor * logs + shift})


def _top1(site: Site, random: np.random.Generator) -> Router | str:
    if site.k == 1:
        return "a token has one expert already"
    return NOT_LINEAR if site.trained is None else linear(site.trained, k=1)


def _weights_of(name: str, lacking: str) -> Callable[[Site, np.random.Generator], Router | str]:
    """Returns the maker of a router from a site's weights of that name, with the reason where it has none."""

    def make(site: Site, random: np.random.Generator) -> Router | str:
        weights, shape = getattr(site, name), (site.features.shape[1], site.experts)
        if weights is None:
            return lacking
        if weights.kernel.shape != shape:
            return f"its weights have shape {list(weights.kernel.shape)}, not {list(shape)}"
        return linear(weights)

    return make


#: Name of the trained router itself, which a repair may change too.
TRAINED = "trained"
#: Name -> kind of router, in the order of the page. The seed of a draw depends on this order.
EVERY: dict[str, Replacement] = {
    TRAINED: Replacement(
        lambda site, random: NOT_LINEAR if site.trained is None else linear(site.trained),
        "the trained router",
        "The router as it is: shows what a repair alone gains.",
    ),
    "noise": Replacement(
        _noise,
        "noise, as sharp as trained",
        "Scores N(0, 1) for every token and expert, as sharp as the trained scores: ignores the token.",
        drawn=True,
        learns=False,
    ),
    "uniform": Replacement(
        _uniform,
        "equal weights, experts by chance",
        "Equal scores, at the mean of the trained ones; ties are broken at random for each token.",
        drawn=True,
        learns=False,
    ),
    "shuffled": Replacement(
        shuffled,
        "trained router, experts shuffled",
        "The trained router, whose score of expert e goes to expert pi(e); pi is one cycle through all experts.",
        drawn=True,
    ),
    "random": Replacement(
        _random,
        "random weights, as sharp",
        "Weights N(0, 1) on the same features, with the sharpness and the mean of the trained scores.",
        drawn=True,
    ),
    "layer": Replacement(
        _weights_of("next_layer", "no other layer has a router that is a linear map"),
        "the next layer's router",
        "The weights of the next layer's router (for the last layer, the first's); expert numbers are unrelated.",
    ),
    "checkpoint": Replacement(
        _weights_of("checkpoint", "the other checkpoint has no router of that name (--router_from)"),
        "another checkpoint's router",
        "The weights of the router of that name in another checkpoint.",
        needs_checkpoint=True,
    ),
    "table": Replacement(
        _table,
        "table by token id, from other text",
        "Scores log(n(id, e) + load of e), as sharp as the trained ones: the experts that other text chose for the id.",
    ),
    "top1": Replacement(
        _top1,
        "trained router, one expert a token",
        "The trained router with one expert per token, weighted by the model's own rule.",
    ),
}
#: Kinds that a user may ask for.
REPLACEMENTS = {name: replacement for name, replacement in EVERY.items() if name != TRAINED}
