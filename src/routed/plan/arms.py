"""Arms: the sides of a comparison. An arm is a dict of config overrides; nothing else differs between arms of a seed.

An override may be a function of the config of the point: what grows with its steps or experts, say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict


class Match(NamedTuple):
    """`setting` takes the final value of `metric` of the arm `source`, at the same point and seed."""

    setting: str
    source: str
    metric: str


class Arm(NamedTuple):
    """One side: what it changes (values, or functions of the config), its words in a legend, and its colour in every figure.

    `match`: a setting that it takes from a finished run of another arm; `transplants`: the arm whose trained router it gets. A
    `fair` arm is a frozen control that answers a confound; the fairest at a point is the one with the lowest test loss there.
    """

    changes: Mapping[str, Any]
    label: str
    colour: str
    match: Match | None = None
    transplants: str | None = None
    fair: bool = False


#: One expert a token with weight exactly 1, dispatched without computing the others.
TOP1 = {"selection.name": "top_k", "selection.k": 1, "selection.renormalise": True, "dispatch": "gather"}

#: As it is evaluated, and evaluated as it trains: one expert with its probability as weight (Switch), two whose weights sum to 1.
_EVALUATED = {"selection.eval.name": "top_k", "selection.eval.k": 1, "selection.eval.renormalise": True}
_SWITCH = {**TOP1, **_EVALUATED, "selection.renormalise": False, "selection.eval.renormalise": False}
_TOP2 = {**TOP1, **_EVALUATED, "selection.k": 2, "selection.eval.k": 2}

#: What a balancing bias adds in a step, in units of score. Of a short run: it crosses the spread of a fresh router in 100 steps.
_BALANCED = {"selection.balance_rate": 1e-2}

#: Scores by distance to places that are training data, trained and evaluated top-1: hard, as such a gate nearly is when it is soft.
_PLACES = {
    "router.frozen": True, "router.measure": "distance", "router.from_data": True,
    **TOP1, **_EVALUATED,
}  # fmt: skip


#: name -> arm. Colours: Okabe and Ito's colour-blind palette, Tol's wine for its yellow; then brown,
#: violet and Tol's muted ones, of which those that meet in a figure are far apart in normal vision and without red or green.
ARMS: dict[str, Arm] = {
    "learned": Arm({}, "learned router", "#0072B2"),
    # The untrained router.
    "frozen": Arm({"router.frozen": True}, "frozen at initialisation", "#D55E00"),
    # ... made as sharp as the learned one became: its scores are multiplied so that the mean per-token entropy is the
    # learned arm's final one on training samples. Removes the confound that top-1 evaluation punishes a soft gate.
    "frozen_sharp": Arm(
        {"router.frozen": True},
        "frozen, as sharp as learned",
        "#E69F00",
        match=Match("router.entropy", "learned", "router/entropy_token_train"),
        fair=True,
    ),
    # ... trained as it is evaluated.
    "frozen_top1": Arm({"router.frozen": True, **TOP1}, "frozen, trained top-1", "#CC79A7", fair=True),
    # ... whose rows are training examples: an informed partition that nobody trained.
    "frozen_data": Arm(
        {"router.frozen": True, "router.from_data": True}, "frozen, rows are examples", "#009E73", fair=True
    ),
    # ... whose scores are distances to the centres of k-means clusters of the training inputs, without labels (of what its
    # features make of them): the partition that needs no gradient where inputs are clustered as the target is.
    "frozen_kmeans": Arm(_PLACES | {"router.rows": "clusters"}, "frozen k-means of the inputs", "#5A2A00", fair=True),
    # ... to training examples: what of that k-means adds to cells around any samples.
    "frozen_nearest": Arm(_PLACES, "frozen, nearest example", "#117733", fair=True),
    # ... with its load balanced by a bias that only chooses (sparse selections): removes drops and idle experts.
    "frozen_balanced": Arm({"router.frozen": True, **_BALANCED}, "frozen, load balanced", "#882255"),
    # A router that learns by what the frozen k-means scores by: is it the distance, or what data say of places?
    "learned_distance": Arm({"router.measure": "distance"}, "learned, distances", "#DDCC77"),
    # Routers that train as they are evaluated, at k / E of a soft mixture's expert FLOPs a step. Top-1 weighs its expert by its
    # probability (Switch, Fedus et al. 2021), in evaluation too: with a weight of exactly 1 it would get no gradient. It is balanced
    # by a loss, as a bias sends tokens to experts whose probability, and so weight, is near 0 (loss .34 against .13 without any, in
    # the headline of gmm_router). The coefficient: of .1 and 1 the one that leaves fewer than half of the experts dead there.
    "learned_top1": Arm(_SWITCH, "learned, trained top-1", "#7B3FF2"),
    "learned_top1_balanced": Arm(_SWITCH | {"losses.balance": 1.0}, "learned, trained top-1, balanced", "#AA4499"),
    "learned_top2": Arm(_TOP2, "learned, trained top-2", "#CC6677"),
    "learned_top2_balanced": Arm(_TOP2 | _BALANCED, "learned, trained top-2, balanced", "#44AA99"),
    # The frozen balanced arm's twin, by the training rule of the config (language models).
    "learned_balanced": Arm(_BALANCED, "learned, load balanced", "#999933"),
    # The true cluster: the ceiling.
    "oracle": Arm({"router.frozen": True, "router.name": "oracle", **TOP1}, "oracle (true cluster)", "#000000"),
    # The true language of the row, by the rule of the config (language models).
    "oracle_language": Arm({"router.frozen": True, "router.name": "oracle"}, "oracle (true language)", "#000000"),
    # A fixed hash of the raw input.
    "hash": Arm({"router.frozen": True, "router.name": "hash", **TOP1}, "hash of the input", "#56B4E9"),
    # A fixed table of token ids, balanced by how often they occur (language models).
    "hash_token": Arm({"router.frozen": True, "router.name": "hash_id"}, "hash of the token id", "#56B4E9"),
    # The learned arm's trained router, frozen, in a network that starts anew.
    "transplant": Arm({"router.frozen": True}, "learned elsewhere, frozen", "#009E73", transplants="learned"),
    # No router: the FLOPs of one routed token, or the parameters of the whole layer, or one expert alone, no deeper.
    "dense_active": Arm({"model": "dense_active"}, "dense, active parameters", "#999999"),
    "dense_total": Arm({"model": "dense_total"}, "dense, all parameters", "#666666"),
    # The first of them, of a decoder alone.
    "decoder_active": Arm({"model": "decoder_active"}, "dense, active parameters", "#999999"),
    "dense_expert": Arm({"model": "dense_expert"}, "dense, one expert", "#332288"),
}


def changes_of(arm: str, config: ConfigDict) -> dict[str, Any]:
    """What an arm changes at a point with this config."""
    return {key: value(config) if callable(value) else value for key, value in ARMS[arm].changes.items()}


#: What every other arm is compared with, and the arm that nobody trained.
REFERENCE, UNTRAINED = "learned", "frozen"


def is_control(arm: str) -> bool:
    """Is it the comparison's own router, frozen? Then its line is dashed."""
    changes = ARMS[arm].changes
    return bool(changes.get("router.frozen")) and "router.name" not in changes and ARMS[arm].transplants is None


def source_of(arm: str) -> str | None:
    """The arm that has to finish before this one can start, or None."""
    match = ARMS[arm].match
    return match.source if match is not None else ARMS[arm].transplants


def fair_arms() -> list[str]:
    """The frozen controls that answer a confound."""
    return [name for name, arm in ARMS.items() if arm.fair]
