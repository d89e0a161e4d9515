"""Every kind of router that a surgery puts into a model, as data: a label, a description, and what makes it.

Subsets are the trained router that chooses among a share of the experts; the others get no token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from routed.trace import replacements
from routed.trace.replacements import DROPPED, NOT_LINEAR, Batch, Params, Replacement, Router, Site, Tensor

#: Kept percents of the experts.
SHARES = (12.5, 25.0, 50.0)

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


def subset(choose: Choose, share: float) -> Callable[[Site, np.random.Generator], Router | str]:
    """Returns the maker of the trained router on a share (percent) of the experts of a site.

    With fewer kept experts than k, a token has all that are kept.
    """

    def make(site: Site, random: np.random.Generator) -> Router | str:
        count = round(share * site.experts / 100)
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
#: Name of the trained router itself, which a repair may change too.
TRAINED = "trained"
#: Name -> kind of router, in the order of the page. The seed of a draw depends on this order.
EVERY: dict[str, Replacement] = {
    TRAINED: Replacement(
        replacements.weights_named("trained", NOT_LINEAR),
        "the trained router",
        "The router as it is: shows what a repair alone gains.",
    ),
    "noise": Replacement(
        replacements.noise,
        "noise, as sharp as trained",
        "Scores N(0, 1) for every token and expert, as sharp as the trained scores: ignores the token.",
        drawn=True,
        learns=False,
    ),
    "uniform": Replacement(
        replacements.uniform,
        "equal weights, experts by chance",
        "Equal scores, at the mean of the trained ones; ties are broken at random for each token.",
        drawn=True,
        learns=False,
    ),
    "shuffled": Replacement(
        replacements.shuffled,
        "trained router, experts shuffled",
        "The trained router, whose score of expert e goes to expert pi(e); pi is one cycle through all experts.",
        drawn=True,
    ),
    "random": Replacement(
        replacements.random_weights,
        "random weights, as sharp",
        "Weights N(0, 1) on the same features, with the sharpness and the mean of the trained scores.",
        drawn=True,
    ),
    "layer": Replacement(
        replacements.weights_named("next_layer", "no other layer has a router that is a linear map"),
        "the next layer's router",
        "The weights of the next layer's router (for the last layer, the first's); expert numbers are unrelated.",
    ),
    "checkpoint": Replacement(
        replacements.weights_named("checkpoint", "the other checkpoint has no router of that name (--router_from)"),
        "another checkpoint's router",
        "The weights of the router of that name in another checkpoint.",
        needs_checkpoint=True,
    ),
    "table": Replacement(
        replacements.table,
        "table by token id, from other text",
        "Scores log(n(id, e) + load of e), as sharp as the trained ones: the experts that other text chose for the id.",
    ),
    "kmeans": Replacement(
        replacements.kmeans,
        "k-means of the layer's inputs",
        "Scores by the distance from the centres of k-means of other text's features, as sharp as the trained scores;"
        " clusters have the numbers of the experts that the trained router chose for them most.",
        drawn=True,
    ),
    "seed": Replacement(
        replacements.of_companion,
        "another model's router on its own inputs",
        "The choices of the model in --router_from for the same text, in the layer of that name; experts are renumbered"
        " to agree with the trained router's on other text.",
        needs_checkpoint=True,
    ),
    "top1": Replacement(
        replacements.top1,
        "trained router, one expert a token",
        "The trained router with one expert per token, weighted by the model's own rule.",
    ),
    **SUBSETS,
}
#: Kinds that a user may ask for.
REPLACEMENTS = {name: replacement for name, replacement in EVERY.items() if name != TRAINED}
#: Names that stand for several kinds.
SEVERAL = {"subsets": tuple(SUBSETS)}
