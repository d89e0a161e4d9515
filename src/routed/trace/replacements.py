"""Routers that take a trained one's place, as data: a name, and a function from what a router sees of a batch to new scores.

The rule behind the scores stays the model's own (`hooks.rule_of`). Everything here is torch, which is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from routed.routers.sharpness import sharpness_for

Tensor = Any  # torch's
Params = Mapping[str, Tensor]


class Given(NamedTuple):
    """What a router sees of a batch, a row a token: the trained one's scores [T, E], features [T, D] and token ids [T]; `batch` numbers it."""

    scores: Tensor
    features: Tensor
    ids: Tensor
    batch: int


class Linear(NamedTuple):
    """Weights of a router: kernel [D, E], offset [E] or None, and the bias [E] or None that only chooses (DeepSeek-V3)."""

    kernel: np.ndarray
    offset: np.ndarray | None
    bias: np.ndarray | None


class Site(NamedTuple):
    """A router of `k` of `experts` a token that is to be replaced, and what other text says of it.

    Of tokens of that text: `ids` [F], `scores` [F, E], `features` [F, D]. `counts` [N + 1, E] are choices of each expert by token id,
    of all of that text, `row_of` [V] an id's row there: the last, of all ids together, if the text has none of it. `own` are the trained
    weights (None: it is no linear map), `other` the next layer's (the first's of the last), `foreign` the other checkpoint's.
    """

    experts: int
    k: int
    ids: np.ndarray
    scores: np.ndarray
    features: np.ndarray
    counts: np.ndarray
    row_of: np.ndarray
    own: Linear | None
    other: Linear | None = None
    foreign: Linear | None = None


class Router(NamedTuple):
    """A router: `scores` of (parameters, what it sees), and the parameters it starts with, which a repair trains.

    `k` is its count of experts (0: the model's), `bias` [E] what its choices, not its weights, have added.
    """

    scores: Callable[[Params, Given], Tensor]
    start: Mapping[str, np.ndarray] = {}
    k: int = 0
    bias: np.ndarray | None = None


class Replacement(NamedTuple):
    """`make` gives the router for a site, or says in words why there is none; `drawn`: another seed gives another.

    One that is not `learns` has no parameters for a repair to train; a `foreign` one takes those of another checkpoint.
    """

    make: Callable[[Site, np.random.Generator], Router | str]
    words: str
    drawn: bool = False
    learns: bool = True
    foreign: bool = False


NOT_LINEAR = "the router is not a linear map of its input, so it has no weights to take"


def _linear(params: Params, given: Given) -> Tensor:
    scores = given.features.float() @ params["kernel"]
    return scores + params["offset"] if "offset" in params else scores


def linear(weights: Linear, k: int = 0) -> Router:
    """The router with these weights."""
    start = {"kernel": weights.kernel} | ({} if weights.offset is None else {"offset": weights.offset})
    return Router(_linear, start, k, weights.bias)


def _as_sharp(scores: np.ndarray, site: Site) -> tuple[float, float]:
    """(factor, shift) that give scores [F, E] the mean and the mean entropy of their softmax that the trained ones have."""
    logs = site.scores - np.logaddexp.reduce(site.scores, axis=1, keepdims=True)
    entropy = float(-(np.exp(logs) * logs).sum(1).mean())
    factor = float(sharpness_for(jnp.asarray(scores), jnp.float32(entropy)))
    return factor, float(site.scores.mean() - factor * scores.mean())


def trained(site: Site, random: np.random.Generator) -> Router | str:
    """The router as it is: what a repair alone gains."""
    return NOT_LINEAR if site.own is None else linear(site.own)


def shuffled(site: Site, random: np.random.Generator) -> Router | str:
    """Expert pi(e) gets the scores of expert e: pi is one cycle through all experts, so that none keeps its own."""
    cycle = random.permutation(site.experts)
    source = np.empty(site.experts, int)
    source[np.roll(cycle, -1)] = cycle  # the column that each expert's scores come from
    if site.own is None:
        return Router(lambda params, given: given.scores[:, source.tolist()])
    kernel, offset, bias = site.own
    moved = Linear(kernel[:, source], *(None if one is None else one[source] for one in (offset, bias)))
    return linear(moved)


def drawn_anew(site: Site, random: np.random.Generator) -> Router | str:
    """Weights N(0, 1) on the same features, scaled to the trained router's mean entropy and moved to its mean score."""
    kernel = random.standard_normal((site.features.shape[1], site.experts)).astype(np.float32)
    factor, shift = _as_sharp(site.features @ kernel, site)
    return Router(lambda params, given: _linear(params, given) + shift, {"kernel": factor * kernel})


def noise(site: Site, random: np.random.Generator) -> Router | str:
    """Scores N(0, 1) for every token and expert, made as sharp: choices that know nothing, with weights like the trained ones."""
    seed = int(random.integers(1 << 31))
    some = np.random.default_rng(seed).standard_normal(site.scores.shape).astype(np.float32)
    factor, shift = _as_sharp(some, site)
    return Router(lambda params, given: factor * _normal(seed, given) + shift)


def uniform(site: Site, random: np.random.Generator) -> Router | str:
    """Equal scores, at the trained ones' mean; ties are broken by chance for each token."""
    seed, level = int(random.integers(1 << 31)), float(site.scores.mean())
    return Router(
        lambda params, given: level + 1e-3 * _normal(seed, given)
    )  # the least that bfloat16 tells apart near 0


def _normal(seed: int, given: Given) -> Tensor:
    """Normal numbers of the shape of the scores: the same for the same batch, whatever the device."""
    import torch

    source = torch.Generator().manual_seed((seed + 7919 * given.batch) % (1 << 31))
    return torch.randn(given.scores.shape, generator=source).to(given.scores.device)


def table(site: Site, random: np.random.Generator) -> Router | str:
    """The experts that other text chose most for the token id: log of (n(id, e) + load of e), made as sharp as the trained scores.

    The load of an expert, its share of all choices, breaks ties, and is all that an id has which the other text lacks.
    """
    load = site.counts[-1] / max(site.counts[-1].sum(), 1)
    often = np.concatenate([site.counts[:-1], np.zeros((1, site.experts))]) + np.maximum(load, 1e-6)
    logs = np.log(often / often.sum(1, keepdims=True)).astype(np.float32)
    factor, shift = _as_sharp(logs[site.row_of[site.ids]], site)
    rows = site.row_of

    def scores(params: Params, given: Given) -> Tensor:
        import torch

        return params["table"][torch.as_tensor(rows, device=given.ids.device)[given.ids]]

    return Router(scores, {"table": factor * logs + shift})


def top1(site: Site, random: np.random.Generator) -> Router | str:
    """The trained router with one expert a token, weighted as the model's rule weighs one."""
    if site.k == 1:
        return "a token has one expert already"
    return NOT_LINEAR if site.own is None else linear(site.own, k=1)


def next_layer(site: Site, random: np.random.Generator) -> Router | str:
    """The weights of the next layer's router (the last one's: the first's). Numbers of experts mean nothing across layers."""
    return _of(site.other, site, "no other layer has a router that is a linear map")


def checkpoint(site: Site, random: np.random.Generator) -> Router | str:
    """The weights of the router of that name in another checkpoint."""
    return _of(site.foreign, site, "the other checkpoint has no router of that name (--router_from)")


def _of(weights: Linear | None, site: Site, lacking: str) -> Router | str:
    if weights is None:
        return lacking
    shape = (site.features.shape[1], site.experts)
    if weights.kernel.shape != shape:
        return f"its weights have shape {list(weights.kernel.shape)}, not {list(shape)}"
    return linear(weights)


#: name -> what takes the trained router's place.
REPLACEMENTS: dict[str, Replacement] = {
    "noise": Replacement(noise, "noise, as sharp as trained", drawn=True, learns=False),
    "uniform": Replacement(uniform, "equal weights, experts by chance", drawn=True, learns=False),
    "shuffled": Replacement(shuffled, "trained router, experts shuffled", drawn=True),
    "random": Replacement(drawn_anew, "weights drawn anew, as sharp", drawn=True),
    "layer": Replacement(next_layer, "the next layer's router"),
    "checkpoint": Replacement(checkpoint, "another checkpoint's router", foreign=True),
    "table": Replacement(table, "table by token id, of other text"),
    "top1": Replacement(top1, "trained router, one expert a token"),
}

#: The trained router itself, which a repair may change too.
TRAINED = "trained"
EVERY = {TRAINED: Replacement(trained, "the trained router")} | REPLACEMENTS
