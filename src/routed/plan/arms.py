"""Arms: the sides of a comparison. An arm is a dict of config overrides; nothing else differs between arms of a seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Match(NamedTuple):
    """`setting` takes the final value of `metric` of the arm `source`, at the same point and seed."""

    setting: str
    source: str
    metric: str


class Arm(NamedTuple):
    """One side: what it changes, its words in a legend, and its colour in every figure.

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
_TOP1 = {"selection.name": "top_k", "selection.k": 1, "selection.renormalise": True, "dispatch": "gather"}

#: name -> arm. Colours: Okabe and Ito's colour-blind palette, Tol's wine for its yellow.
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
    "frozen_top1": Arm({"router.frozen": True, **_TOP1}, "frozen, trained top-1", "#CC79A7", fair=True),
    # ... whose rows are training examples: an informed partition that nobody trained.
    "frozen_data": Arm(
        {"router.frozen": True, "router.from_data": True}, "frozen, rows are examples", "#009E73", fair=True
    ),
    # ... with its load balanced by a bias that only chooses (sparse selections): removes drops and idle experts. The rate is
    # that of a short run: the bias crosses a whole unit of score, the spread of a fresh router, in 100 steps.
    "frozen_balanced": Arm({"router.frozen": True, "selection.balance_rate": 1e-2}, "frozen, load balanced", "#882255"),
    # The true cluster: the ceiling.
    "oracle": Arm({"router.frozen": True, "router.name": "oracle", **_TOP1}, "oracle (true cluster)", "#000000"),
    # A fixed hash of the raw input.
    "hash": Arm({"router.frozen": True, "router.name": "hash", **_TOP1}, "hash of the input", "#56B4E9"),
    # A fixed table of token ids, balanced by how often they occur (language models).
    "hash_token": Arm({"router.frozen": True, "router.name": "hash_id"}, "hash of the token id", "#56B4E9"),
    # The learned arm's trained router, frozen, in a network that starts anew.
    "transplant": Arm({"router.frozen": True}, "learned elsewhere, frozen", "#009E73", transplants="learned"),
    # No router: the FLOPs of one routed token, or the parameters of the whole layer, or one expert alone, no deeper.
    "dense_active": Arm({"model": "dense_active"}, "dense, active parameters", "#999999"),
    "dense_total": Arm({"model": "dense_total"}, "dense, all parameters", "#666666"),
    "dense_expert": Arm({"model": "dense_expert"}, "dense, one expert", "#332288"),
}


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
