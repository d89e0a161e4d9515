"""Subsets of the experts: the trained router chooses among a share of them, and the others get no token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from routed.trace.replacements import Batch, Params, Replacement, Router, Site, Tensor

#: Kept percents of the experts.
SHARES = (12.5, 25.0, 50.0)
#: Score of an expert that is not kept: its weight is 0 for a softmax and for a sigmoid.
DROPPED = -1e4

#: Function from (site, number of kept experts, random source) to the numbers of the kept experts.
Choose = Callable[[Site, int, np.random.Generator], np.ndarray]


def most_chosen(site: Site, count: int, random: np.random.Generator) -> np.ndarray:
    """Returns the experts that the trained router chose most often on the other text."""
    return np.argsort(-site.counts[-1], kind="stable")[:count]


def by_chance(site: Site, count: int, random: np.random.Generator) -> np.ndarray:
    """Returns random experts."""
    return random.permutation(site.experts)[:count]


def untrained(site: Site, count: int, random: np.random.Generator) -> np.ndarray:
    """Returns the experts that a router with weights N(0, 1) would choose most often on features of the other text."""
    scores = site.features @ random.standard_normal((site.features.shape[1], site.experts))
    chosen = np.argpartition(-scores, site.k - 1, axis=1)[:, : site.k]
    loads = np.bincount(chosen.ravel(), minlength=site.experts)
    return np.argsort(-loads, kind="stable")[:count]


#: Prefix of a name -> (function that chooses, words on the chosen experts, is it drawn).
CHOICES: dict[str, tuple[Choose, str, bool]] = {
    "most": (most_chosen, "that other text chose most", False),
    "chance": (by_chance, "drawn at random", True),
    "untrained": (untrained, "that an untrained router would choose most", True),
}


def kept_of(share: float, experts: int) -> int:
    """Returns the number of kept experts at a share in percent."""
    return round(share * experts / 100)


def subset(choose: Choose, share: float) -> Callable[[Site, np.random.Generator], Router | str]:
    """Returns the maker of the trained router on a share (percent) of the experts of a site.

    With fewer kept experts than k, a token has all that are kept.
    """

    def make(site: Site, random: np.random.Generator) -> Router | str:
        count = kept_of(share, site.experts)
        if not count:
            return f"{share:g} % of {site.experts} experts is less than one"
        dropped = np.ones(site.experts, bool)
        dropped[choose(site, count, random)] = False

        def scores(params: Params, batch: Batch) -> Tensor:
            import torch

            return batch.scores.masked_fill(torch.as_tensor(dropped, device=batch.scores.device), DROPPED)

        bias = None if site.trained is None else site.trained.bias
        bias = None if bias is None else np.where(dropped, np.float32(DROPPED), bias)
        return Router(scores, k=count if count < site.k else 0, bias=bias)

    return make


def name_of(choice: str, share: float) -> str:
    """Returns the name of a subset among the replacements, without the dot of 12.5."""
    return f"{choice}{int(share)}"


def _replacements() -> dict[str, Replacement]:
    subsets: dict[str, Replacement] = {}
    for choice, (choose, meaning, drawn) in CHOICES.items():
        for share in SHARES:
            text = f"The trained router on {share:g} % of the experts of each layer: those {meaning}."
            label = f"{share:g} % of the experts, those {meaning}"
            subsets[name_of(choice, share)] = Replacement(
                subset(choose, share), label, text, drawn=drawn, learns=False, replaces_all=True
            )
    return subsets


#: Name -> subset, as kinds of replacements.
SUBSETS = _replacements()
