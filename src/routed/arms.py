"""Arms: the sides of a comparison. An arm is a dict of config overrides; nothing else differs between arms of a seed."""

from __future__ import annotations

from typing import Any, NamedTuple

#: One expert a token with weight exactly 1, dispatched without computing the others.
_TOP1 = {"selection.name": "top_k", "selection.k": 1, "selection.renormalise": True, "dispatch": "gather"}

ARMS: dict[str, dict[str, Any]] = {
    "learned": {},
    # The untrained router.
    "frozen": {"router.frozen": True},
    # ... made as sharp as the learned one became: its temperature is set so that the mean per-token entropy is the
    # learned arm's final one (see MATCHED). Removes the confound that top-1 evaluation punishes a soft gate.
    "frozen_sharp": {"router.frozen": True},
    # ... trained as it is evaluated.
    "frozen_top1": {"router.frozen": True, **_TOP1},
    # ... whose rows are training examples: an informed partition that nobody trained.
    "frozen_data": {"router.frozen": True, "router.from_data": True},
    # ... with its load balanced by a bias that only chooses (sparse selections): removes drops and idle experts. The rate is
    # that of a short run: the bias crosses a whole unit of score, the spread of a fresh router, in 100 steps.
    "frozen_balanced": {"router.frozen": True, "selection.balance_rate": 1e-2},
    # The true cluster: the ceiling.
    "oracle": {"router.frozen": True, "router.name": "oracle", **_TOP1},
    # A fixed hash of the raw input.
    "hash": {"router.frozen": True, "router.name": "hash", **_TOP1},
    # A fixed table of token ids, balanced by how often they occur (language models).
    "hash_token": {"router.frozen": True, "router.name": "hash_id"},
    # The learned arm's trained router, frozen, in a network that starts anew.
    "transplant": {"router.frozen": True},
    # No router: the FLOPs of one routed token, or the parameters of the whole layer.
    "dense_active": {"router.frozen": True, "model": "dense_active"},
    "dense_total": {"router.frozen": True, "model": "dense_total"},
    # ... or one expert alone, no deeper.
    "dense_expert": {"router.frozen": True, "model": "dense_expert"},
}


class Match(NamedTuple):
    """`setting` takes the final value of `metric` of the arm `source`, at the same point and seed."""

    setting: str
    source: str
    metric: str


MATCHED = {"frozen_sharp": Match("router.entropy", "learned", "router/entropy_token")}

#: Arms that take the trained router of another.
TRANSPLANTED = {"transplant": "learned"}


def source_of(arm: str) -> str | None:
    """The arm that has to finish before this one can start, or None."""
    return MATCHED[arm].source if arm in MATCHED else TRANSPLANTED.get(arm)


#: The frozen controls that answer a confound; the fairest at a point is the one with the lowest test loss there.
FAIR = ("frozen_sharp", "frozen_top1", "frozen_data")

#: One colour an arm in every figure (Okabe and Ito's colour-blind palette, Tol's wine for its yellow), with the words of the
#: legend.
LABELS = {
    "learned": ("learned router", "#0072B2"),
    "frozen": ("frozen at initialisation", "#D55E00"),
    "frozen_sharp": ("frozen, as sharp as learned", "#E69F00"),
    "frozen_top1": ("frozen, trained top-1", "#CC79A7"),
    "frozen_data": ("frozen, rows are examples", "#009E73"),
    "frozen_balanced": ("frozen, load balanced", "#882255"),
    "oracle": ("oracle (true cluster)", "#000000"),
    "hash": ("hash of the input", "#56B4E9"),
    "hash_token": ("hash of the token id", "#56B4E9"),
    "transplant": ("learned elsewhere, frozen", "#009E73"),
    "dense_active": ("dense, active parameters", "#999999"),
    "dense_total": ("dense, all parameters", "#666666"),
    "dense_expert": ("dense, one expert", "#332288"),
}
