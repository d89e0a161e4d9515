"""The settings of the nodes `selection` and `selection.eval` that several selections, or the layer, read."""

from __future__ import annotations

from routed.layer.selection import SELECTIONS
from routed.settings.setting import RATE, Setting, When, at_least, one_of

_WHEN_BOUNDED = When(
    lambda config: (
        config.selection.capacity_factor
        or config.selection.eval.capacity_factor
        or SELECTIONS[config.selection.name].bounded
    ),
    "a capacity factor is above 0",
)

#: Settings of the node `selection` that several selections read.
SHARED: dict[str, Setting] = {
    "k": Setting(1, "experts per token", at_least(1)),
    "renormalise": Setting(
        True, "the k weights sum to 1 (k = 1: exactly 1), else they are probabilities over all experts"
    ),
    "no_gradient": Setting(
        False, "says that a learned router without gradient (k = 1 renormalised) is meant", identity=False
    ),
    "capacity_factor": Setting(
        0.0, "0: dropless; else a queue has this many times its fair share of places", at_least(0)
    ),
    "capacity_rule": Setting(
        "per_assignment",
        "ceil(factor k T / E), or per_token: round(factor T / E)",
        one_of(("per_assignment", "per_token")),
        when=_WHEN_BOUNDED,
    ),
    "min_capacity": Setting(1, "places in a queue, at least", at_least(1), when=_WHEN_BOUNDED),
    "capacity_multiple": Setting(
        1,
        "places in a queue are rounded up to a multiple of it (vmoe)",
        at_least(1),
        when=_WHEN_BOUNDED,
        omit_default_from_identity=True,
    ),
    "group_size": Setting(0, "tokens that queue together; divides the batch; 0: all", at_least(0)),
    "priority": Setting(
        "position",
        "who gets a place: position: the first in the batch; score: the highest probability of a chosen expert; causal:"
        " the first in the batch with all its choices (decoders always)",
        one_of(("position", "score", "causal")),
        when=_WHEN_BOUNDED,
    ),
    "balance_rate": Setting(0.0, "step of a bias that balances the load and only chooses; 0: no bias", RATE),
}

#: Settings of the node `selection.eval`: the rule of evaluation, where it differs.
SHARED_EVAL: dict[str, Setting] = {
    "k": SHARED["k"],
    "renormalise": SHARED["renormalise"],
    "capacity_factor": SHARED["capacity_factor"],
}
