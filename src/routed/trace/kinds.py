"""Every kind of router that a surgery puts into a model, as data: a label, a description, and what makes it."""

from __future__ import annotations

from routed.trace.companions import of_companion
from routed.trace.replacements import (
    NOT_LINEAR,
    Replacement,
    kmeans,
    linear,
    noise,
    random_weights,
    shuffled,
    table,
    top1,
    uniform,
    weights_named,
)
from routed.trace.subsets import SUBSETS

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
        noise,
        "noise, as sharp as trained",
        "Scores N(0, 1) for every token and expert, as sharp as the trained scores: ignores the token.",
        drawn=True,
        learns=False,
    ),
    "uniform": Replacement(
        uniform,
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
        random_weights,
        "random weights, as sharp",
        "Weights N(0, 1) on the same features, with the sharpness and the mean of the trained scores.",
        drawn=True,
    ),
    "layer": Replacement(
        weights_named("next_layer", "no other layer has a router that is a linear map"),
        "the next layer's router",
        "The weights of the next layer's router (for the last layer, the first's); expert numbers are unrelated.",
    ),
    "checkpoint": Replacement(
        weights_named("checkpoint", "the other checkpoint has no router of that name (--router_from)"),
        "another checkpoint's router",
        "The weights of the router of that name in another checkpoint.",
        needs_checkpoint=True,
    ),
    "table": Replacement(
        table,
        "table by token id, from other text",
        "Scores log(n(id, e) + load of e), as sharp as the trained ones: the experts that other text chose for the id.",
    ),
    "kmeans": Replacement(
        kmeans,
        "k-means of the layer's inputs",
        "Scores by the distance from the centres of k-means of other text's features, as sharp as the trained scores;"
        " clusters have the numbers of the experts that the trained router chose for them most.",
        drawn=True,
    ),
    "seed": Replacement(
        of_companion,
        "another model's router on its own inputs",
        "The choices of the model in --router_from for the same text, in the layer of that name; experts are renumbered"
        " to agree with the trained router's on other text.",
        needs_checkpoint=True,
    ),
    "top1": Replacement(
        top1,
        "trained router, one expert a token",
        "The trained router with one expert per token, weighted by the model's own rule.",
    ),
    **SUBSETS,
}
#: Kinds that a user may ask for.
REPLACEMENTS = {name: replacement for name, replacement in EVERY.items() if name != TRAINED}
#: Names that stand for several kinds.
SEVERAL = {"subsets": tuple(SUBSETS)}
