"""Arms: the sides of a comparison. An arm is a dict of config overrides; arms of a seed differ in nothing else.

An override may be a function of the point's config: a value that grows with steps or experts, say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict


class Match(NamedTuple):
    """A setting whose value is the final `metric` of the arm `source`, at the same point and seed."""

    setting: str
    source: str
    metric: str


class Arm(NamedTuple):
    """A side of a comparison: its overrides (values, or functions of the config), legend label and colour.

    match: a setting whose value comes from a finished run of another arm.
    transplants: the arm whose trained router this arm receives.
    fair: the arm is a frozen control that answers a confound. The fairest arm of a point has the lowest test loss.
    """

    changes: Mapping[str, Any]
    label: str
    colour: str
    match: Match | None = None
    transplants: str | None = None
    fair: bool = False


#: One expert per token with weight exactly 1; a token is not computed by further experts.
TOP1 = {"selection.name": "top_k", "selection.k": 1, "selection.renormalise": True, "dispatch": "gather"}

#: Equal rules in training and evaluation. Switch: one expert, weighted by its probability. Top-2: weights sum to 1.
_EVALUATED = {"selection.eval.name": "top_k", "selection.eval.k": 1, "selection.eval.renormalise": True}
_SWITCH = {**TOP1, **_EVALUATED, "selection.renormalise": False, "selection.eval.renormalise": False}
_TOP2 = {**TOP1, **_EVALUATED, "selection.k": 2, "selection.eval.k": 2}

#: Step of a balancing bias, in units of score. For short runs: 100 steps cross the spread of an initial router's
#: scores.
_BALANCED = {"selection.balance_rate": 1e-2}

#: Scores by distance to training samples, trained and evaluated top-1: a soft gate of distances is nearly hard too.
BY_DISTANCE = {"router.frozen": True, "router.score": "distance", "router.init_from_data": True, **TOP1, **_EVALUATED}

#: Scores by distance to centres of what a layer of a language model sees.
_FITTED = {"router.score": "distance", "router.fit": "clusters"}


#: name -> arm. Colours: Okabe and Ito's colour-blind palette with Tol's wine instead of yellow; then brown, violet and
#: Tol's muted colours. Colours of the same figure differ clearly in normal vision and with red or green blindness.
ARMS: dict[str, Arm] = {
    "learned": Arm({}, "learned router", "#0072B2"),
    # The untrained router.
    "frozen": Arm({"router.frozen": True}, "frozen at initialisation", "#D55E00"),
    # Frozen, as sharp as the learned router: a factor on the scores sets the mean per-token entropy to the learned
    # arm's final entropy on training samples. Removes the confound that top-1 evaluation punishes a soft gate.
    "frozen_sharp": Arm(
        {"router.frozen": True},
        "frozen, as sharp as learned",
        "#E69F00",
        match=Match("router.initial_entropy", "learned", "router/entropy_token_train"),
        fair=True,
    ),
    # Frozen, trained by the rule of evaluation.
    "frozen_top1": Arm({"router.frozen": True, **TOP1}, "frozen, trained top-1", "#CC79A7", fair=True),
    # Frozen, with training examples as rows: an informed, untrained partition.
    "frozen_data": Arm(
        {"router.frozen": True, "router.init_from_data": True}, "frozen, rows are examples", "#009E73", fair=True
    ),
    # Frozen, scored by distances to k-means centres of the training inputs (or of the router's features), without
    # labels: a partition without gradients, which suffices if inputs have the target's clusters.
    "frozen_kmeans": Arm(
        BY_DISTANCE | {"router.init_rows": "clusters"}, "frozen k-means of the inputs", "#5A2A00", fair=True
    ),
    # Frozen, scored by distances to training examples: the control of k-means by cells around random samples.
    "frozen_nearest": Arm(BY_DISTANCE, "frozen, nearest example", "#117733", fair=True),
    # Frozen, with a balancing bias on the choice (sparse selections): removes drops and idle experts.
    "frozen_balanced": Arm({"router.frozen": True, **_BALANCED}, "frozen, load balanced", "#882255"),
    # Learned, scored by distances like frozen k-means: separates the effect of distances from the effect of k-means.
    "learned_distance": Arm({"router.score": "distance"}, "learned, distances", "#DDCC77"),
    # Routers with equal rules in training and evaluation, at k / E of a soft mixture's expert FLOPs per step. Top-1
    # weights the expert by its probability (Switch, Fedus et al. 2021), in evaluation too: a weight of exactly 1 would
    # give the router no gradient. A loss balances top-1, as a bias sends tokens to experts of probability, and so
    # weight, near 0 (loss .34 against .13 without balancing, in the headline of gmm_router). The coefficient, of .1 and
    # 1, leaves fewer than half of the experts dead in this headline.
    "learned_top1": Arm(_SWITCH, "learned, trained top-1", "#7B3FF2"),
    "learned_top1_balanced": Arm(_SWITCH | {"losses.balance": 1.0}, "learned, trained top-1, balanced", "#AA4499"),
    "learned_top2": Arm(_TOP2, "learned, trained top-2", "#CC6677"),
    "learned_top2_balanced": Arm(_TOP2 | _BALANCED, "learned, trained top-2, balanced", "#44AA99"),
    # The learned twin of the arm `frozen_balanced`, with the config's selection (language models).
    "learned_balanced": Arm(_BALANCED, "learned, load balanced", "#999933"),
    # The true cluster: the ceiling.
    "oracle": Arm({"router.frozen": True, "router.name": "oracle", **TOP1}, "oracle (true cluster)", "#000000"),
    # The true language of the row, with the config's selection (language models).
    "oracle_language": Arm({"router.frozen": True, "router.name": "oracle"}, "oracle (true language)", "#000000"),
    # A fixed hash of the raw input.
    "hash": Arm({"router.frozen": True, "router.name": "hash", **TOP1}, "hash of the input", "#56B4E9"),
    # A fixed table of token ids, balanced by the frequencies of ids (language models).
    "hash_token": Arm({"router.frozen": True, "router.name": "hash_id"}, "hash of the token id", "#56B4E9"),
    # A fixed hash of the token id and the one before.
    "hash_bigram": Arm({"router.frozen": True, "router.name": "hash_bigram"}, "hash of the token bigram", "#004488"),
    # k-means of what each sparse layer sees, at `router.fit_at` of the steps: fixed, as sharp as the learned arm, or
    # with clusters of equal size; learned from there on; and online, by distance and by cosine (language models).
    "kmeans_fitted": Arm(_FITTED | {"router.frozen": True}, "k-means of hidden states", "#5A2A00"),
    "kmeans_as_sharp": Arm(
        {"router.frozen": True, "router.fit": "sharp_clusters", "router.bias": True},
        "k-means, as sharp as learned",
        "#A50F15",
        match=Match("router.fit_entropy", "learned", "router/entropy_token"),
    ),
    "kmeans_balanced": Arm(
        _FITTED | {"router.frozen": True, "router.fit": "balanced", "router.bias": True}, "balanced k-means", "#A6761D"
    ),
    "kmeans_learned": Arm(_FITTED, "learned from k-means", "#E7298A"),
    "kmeans_online": Arm({"router.name": "online_kmeans"}, "online k-means", "#66A61E"),
    "kmeans_cosine": Arm(
        {"router.name": "online_kmeans", "router.centres": "direction"}, "online k-means, cosine", "#1B9E77"
    ),
    # Frozen, with columns times the factor at which each layer's mean entropy per token is that of the learned arm's
    # layers (language models).
    "frozen_as_sharp": Arm(
        {"router.frozen": True, "router.fit": "sharpness"},
        "frozen, as sharp as learned",
        "#E69F00",
        match=Match("router.fit_entropy", "learned", "router/entropy_token"),
        fair=True,
    ),
    # The first numbers of the hidden state are the scores (language models).
    "self_routed": Arm({"router.name": "self"}, "self-routing", "#7570B3"),
    # Experts drawn anew for each token in each step (language models).
    "random": Arm({"router.frozen": True, "router.name": "random"}, "random, anew in each step", "#EE6677"),
    # The learned arm's trained router, frozen, in a network with new initial weights.
    "transplant": Arm({"router.frozen": True}, "learned elsewhere, frozen", "#009E73", transplants="learned"),
    # A router that has learned the choices of the learned arm's router, from what its own layer sees of these tokens
    # in a network with new initial weights; frozen (Grouter, 2603.06626; language models).
    "distilled": Arm(
        {"router.frozen": True, "router.fit": "distilled"}, "distilled, frozen", "#0F8554", transplants="learned"
    ),
    # No router: the FLOPs of one routed token, or the parameters of the whole layer, or one expert alone, no deeper.
    "dense_active": Arm({"model": "dense_active"}, "dense, active parameters", "#999999"),
    "dense_total": Arm({"model": "dense_total"}, "dense, all parameters", "#666666"),
    # The twin with active parameters of a decoder-only transformer.
    "decoder_active": Arm({"model": "decoder_active"}, "dense, active parameters", "#999999"),
    "dense_expert": Arm({"model": "dense_expert"}, "dense, one expert", "#332288"),
}


def changes_of(arm: str, config: ConfigDict) -> dict[str, Any]:
    """Returns the overrides of an arm at a point with this config."""
    return {key: value(config) if callable(value) else value for key, value in ARMS[arm].changes.items()}


#: Arms that users' files add.
OWN: set[str] = set()


def shown(asked: Collection[str] | None) -> list[str]:
    """Returns the arms of a figure that asks for some (None: for all): with the user's own, unless it names one."""
    more = OWN if asked is not None and OWN.isdisjoint(asked) else ()
    return [arm for arm in ARMS if asked is None or arm in asked or arm in more]


#: The arm with which every arm is compared, and the arm with the untrained router.
REFERENCE, UNTRAINED = "learned", "frozen"


def is_control(arm: str) -> bool:
    """True if the arm is the comparison's router, frozen. Figures show such arms by dashed lines."""
    changes = ARMS[arm].changes
    return bool(changes.get("router.frozen")) and "router.name" not in changes and ARMS[arm].transplants is None


def source_of(arm: str) -> str | None:
    """Returns the arm that must finish before this arm starts, or None."""
    match = ARMS[arm].match
    return match.source if match is not None else ARMS[arm].transplants


def fair_arms() -> list[str]:
    """Returns the frozen controls that answer a confound."""
    return [name for name, arm in ARMS.items() if arm.fair]
