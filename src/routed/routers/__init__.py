"""Routers: small Flax modules that return scores [T, E] before any softmax, and the table of them."""

from collections.abc import Collection
from functools import partial
from typing import Any

import flax.linen as nn

from routed.routers.features import Convolutions, Flat, Hidden, Windows
from routed.routers.fixed import (
    HashBigramRouter,
    HashIdRouter,
    HashRouter,
    OracleRouter,
    RandomRouter,
    balanced_table,
    check_choices,
    check_table,
)
from routed.routers.product import (
    DIRECTION,
    DISTANCE,
    MEASURES,
    PRODUCT,
    CosineRouter,
    HyperRouter,
    OnlineKMeansRouter,
    ProductRouter,
    SelfRouter,
)
from routed.routers.router import CLUSTERS, EXAMPLES, Router, kernel_from_clusters, kernel_from_examples, scale_kernel
from routed.settings.setting import FRACTION, LAYERS, RATE, Setting, When, at_least, one_of, within

_DIM = Setting(16, "dimensions of the down-projection", at_least(1))

#: Routers with a kernel, whose columns can be scaled, and filled from data.
_WEIGHTED = partial(Router, scale=scale_kernel, from_examples=kernel_from_examples, from_clusters=kernel_from_clusters)

#: name -> router.
ROUTERS: dict[str, Router] = {
    "linear": _WEIGHTED(
        lambda node, experts: ProductRouter(experts, Flat(), node.bias, node.score),
        tokens=("rows", "patches", "hidden"),
        reads=("bias", "score"),
    ),
    "mlp": _WEIGHTED(
        lambda node, experts: ProductRouter(experts, Hidden(node.depth - 1, node.width), node.bias, node.score),
        tokens=("rows", "patches", "hidden"),
        reads=("depth", "width", "bias", "score"),
    ),
    "conv": _WEIGHTED(
        lambda node, experts: ProductRouter(experts, Windows(node.window), node.bias, node.score),
        tokens=("rows", "patches", "images"),
        settings={"window": Setting(1, "positions of a window along each axis", at_least(1))},
        reads=("bias", "score"),
    ),
    "cnn": _WEIGHTED(
        lambda node, experts: ProductRouter(experts, Convolutions(node.depth, node.width), measure=node.score),
        tokens=("images",),
        reads=("depth", "width", "score"),
    ),
    "cosine": _WEIGHTED(
        lambda node, experts: CosineRouter(experts, nn.Dense(node.dim, use_bias=False)),
        tokens=("rows", "patches", "hidden"),
        settings={"dim": _DIM},
    ),
    "projected": _WEIGHTED(
        lambda node, experts: ProductRouter(experts, nn.Dense(node.dim, use_bias=False), node.bias, node.score),
        tokens=("rows", "patches", "hidden"),
        settings={"dim": _DIM},
        reads=("bias", "score"),
    ),
    "hyper": Router(
        lambda node, experts: HyperRouter(experts, node.hidden),
        tokens=("rows", "hidden"),
        settings={"hidden": Setting(256, "units of the frozen network that makes its weights", at_least(1))},
    ),
    "hash": Router(lambda node, experts: HashRouter(experts), tokens=(), learns=False, check=check_choices),
    "hash_id": Router(
        lambda node, experts: HashIdRouter(experts, node.vocabulary, node.experts_per_id),
        tokens=(),
        needs=("token_id",),
        learns=False,
        reads=("experts_per_id", "table_seed", "vocabulary"),
        from_counts=balanced_table,
        check=check_table,
    ),
    "hash_bigram": Router(
        lambda node, experts: HashBigramRouter(experts, node.experts_per_id),
        tokens=(),
        needs=("token_id", "previous_id"),
        learns=False,
        reads=("experts_per_id",),
        check=check_table,
    ),
    "online_kmeans": Router(
        lambda node, experts: OnlineKMeansRouter(experts, node.decay, node.centres),
        learns=False,
        settings={
            "decay": Setting(0.99, "of the counts and sums of earlier steps; 1: all tokens count alike", within(0, 1)),
            "centres": Setting(DISTANCE, "near by distance, or by cosine (direction)", one_of((DISTANCE, DIRECTION))),
        },
    ),
    "self": Router(lambda node, experts: SelfRouter(experts), tokens=("hidden",), has_parameters=False),
    "oracle": Router(
        lambda node, experts: OracleRouter(experts, node.experts_per_id, node.label_digit),
        tokens=(),
        needs=("cluster",),
        learns=False,
        settings={
            "label_digit": Setting(
                0, "of the cluster's number in base E, from the last: what names the expert", within(0, 3)
            )
        },
        reads=("experts_per_id",),
        check=check_choices,
    ),
    "random": Router(
        lambda node, experts: RandomRouter(experts, node.resample),
        tokens=(),
        learns=False,
        settings={"resample": Setting(True, "scores are drawn in each training step; else a token's bits decide them")},
    ),
}


def _has(ability: str):
    return lambda config: getattr(ROUTERS[config.router.name], ability) is not None


#: Values of `fit` that read `fit_entropy`.
SHARP = ("sharpness", "sharp_clusters")

#: Settings of the node `router` that several routers, or the programs around them, read.
SHARED: dict[str, Setting] = {
    "depth": Setting(2, "layers of an mlp, scores included; convolutions of a cnn", LAYERS),
    "width": Setting(64, "hidden units of an mlp; filters of a cnn's first convolution", at_least(1)),
    "bias": Setting(False, "a score of each expert for every token, 0 at the start"),
    "experts_per_id": Setting(1, "experts of each token id, or of each cluster of the oracle", at_least(1)),
    "table_seed": Setting(0, "draw of a hash's balanced table", at_least(0), omit_default_from_identity=True),
    "frozen": Setting(False, "parameters and state stay bit for bit what they were at step 0", traced=True),
    "init_scale": Setting(
        1.0,
        "times the initial weights",
        at_least(0),
        traced=True,
        when=When(
            lambda config: _has("scale")(config) and config.router.score != DIRECTION,
            "the router says how its weights are scaled (Router.scale), and its scores depend on it (not"
            " score=direction)",
        ),
    ),
    "init_from_data": Setting(
        False,
        "initial weights are rows of training data: what `rows` says",
        traced=True,
        when=When(_has("from_examples"), "the router has rows to fill with examples (Router.from_examples)"),
    ),
    "init_rows": Setting(
        EXAMPLES,
        "of init_from_data: examples, one a row (Dikkala et al. 2023, Theorem 2); clusters: centres of k-means, without"
        " labels, on what the fresh router makes of the first 16,384 training samples (fresh data: of data.samples"
        " samples that they are not)",
        one_of((EXAMPLES, CLUSTERS)),
        when=When(
            lambda config: config.router.init_from_data and _has("from_clusters")(config),
            "router.init_from_data=true and the router has rows to fill with centres (Router.from_clusters)",
        ),
    ),
    "init_starts": Setting(
        1,
        "starts of k-means, of which the one with the least sum of squared distances stays",
        within(1, 100),
        when=When(
            lambda config: config.router.init_from_data and config.router.init_rows == CLUSTERS,
            "router.init_from_data=true and router.init_rows=clusters",
        ),
        omit_default_from_identity=True,
    ),
    "score": Setting(
        PRODUCT,
        "what a score is: product f.w, distance f.w - |w|^2 / 2 (the softmax of minus half the squared distances), or"
        " direction f.w / |w|",
        one_of(MEASURES),
    ),
    "initial_entropy": Setting(
        0.0,
        "nats; > 0: the scores of a fresh router are multiplied by the factor at which their mean per-token entropy is"
        " this, on training samples and (of scores that depend on the step) at the last step",
        at_least(0),
        traced=True,
    ),
    "layers": Setting(
        (),
        'sparse layers of a language model whose router is another, as "first=N|last=N|layers=I+J KEY=VALUE": router.*,'
        " or selection.name, k, renormalise, balance_rate",
        omit_default_from_identity=True,
    ),
    "fit": Setting(
        "none",
        "what sets the router of a sparse layer, by what that sees of 16,384 training tokens: clusters: columns are"
        " centres of k-means; balanced: of equal size, with router.bias=true; sharpness: columns times a factor, by"
        " fit_entropy; sharp_clusters: closeness to the centres times such a factor, with router.score=product and"
        " router.bias=true; distilled: the choices of the learned arm (arm distilled)",
        one_of(("none", "clusters", "balanced", "sharpness", "sharp_clusters", "distilled")),
        omit_default_from_identity=True,
    ),
    "fit_at": Setting(
        0.0,
        "of the steps, at whose evaluation router.fit sets the columns; a router that is frozen then stays",
        FRACTION,
        when=When(lambda config: config.router.fit != "none", "router.fit is not none"),
        omit_default_from_identity=True,
    ),
    "fit_entropy": Setting(
        0.0,
        "nats: mean entropy of a token's probabilities that router.fit gives each sparse layer",
        at_least(0),
        traced=True,
        when=When(lambda config: config.router.fit in SHARP, f"router.fit is {' or '.join(SHARP)}"),
        omit_default_from_identity=True,
    ),
    "freeze_at": Setting(
        1.0,
        "of the steps, behind which the router is frozen; 0: as router.frozen",
        within(0, 1),
        omit_default_from_identity=True,
    ),
    "vocabulary": Setting(32128, "token ids", at_least(1)),
    "learning_rate": Setting(0.1, "of the router's parameters", RATE, traced=True),
    "stop_gradient": Setting(False, "what the router learns does not reach the layers below it"),
}


#: What every router may read in a call: steps taken so far, and steps of the run.
TIMES = ("step", "steps")


def router_context(needs: Collection[str], **context: Any) -> dict[str, Any]:
    """Returns the context that a router reads: step, steps, and what it `needs` (`Router.needs`) of the labels."""
    return {name: value for name, value in context.items() if name in (*TIMES, *needs)}
