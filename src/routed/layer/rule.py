"""A rule of selection as plain data, and what a selection says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Scalar
from ml_collections import ConfigDict

from routed.contracts import Routing, SoftRouting
from routed.settings.setting import Setting, accept


class SelectionRule(NamedTuple):
    """A selection as plain, static data; the field names are those of the config node `selection`."""

    name: str = "top_k"
    k: int = 1
    renormalise: bool = False
    capacity_factor: float = 0.0  # 0: dropless
    capacity_rule: str = "per_assignment"
    min_capacity: int = 1
    group_size: int = 0  # tokens; 0: all tokens are one group
    priority: str = "position"
    patches: int = 1
    patch_weights: str = "chosen"
    capacity_multiple: int = 1  # places are rounded up to it (vmoe)
    settings: Any = None  # the config node, for selections with settings of their own

    @property
    def balance_rate(self) -> float:
        """The rate of the balancing bias in training, or in a phase of it; evaluations do not move the bias."""
        return self.settings.balance_rate if self.settings and "balance_rate" in self.settings else 0.0


def selection_rule(node: Any, *, evaluation: bool = False) -> SelectionRule:
    """Returns the rule of a config node `selection`; its node `eval` overrides the keys that it has."""
    names = [name for name in SelectionRule._fields if name in node]
    keys = {name: node[name] for name in names} | {"settings": node}
    if evaluation:
        keys |= {name: node.eval[name] for name in SelectionRule._fields if name in node.eval} | {"settings": node.eval}
    return SelectionRule(**keys)


class Selection(NamedTuple):
    """A way to choose experts, and its consequences for a comparison.

    A selection that `sees_others` routes a token by its neighbours: it may route neither a decoder nor a test set. A
    `biased` one can be steered by a balancing bias. One that is `bounded` fills queues of a fixed length whatever the
    capacity factor; `places(rule)` is that length, where it does not follow from a fair share. One `within_samples`
    sees other tokens of the same sample only, which are its group. `experts_per_token(rule, tokens, experts)` counts
    the experts that compute for a training token.
    """

    #: Routes a group of tokens by (rule, scores [T, E], preference [T, E], bias [E], mask [T]): experts are chosen by
    #: preference plus bias, and weighted by scores; the mask is False for padding.
    route: Callable[[SelectionRule, Array, Array, Array, Array], Routing | SoftRouting]
    sparse: bool = True
    sees_others: bool = False
    biased: bool = False
    bounded: bool = False
    within_samples: bool = False
    places: Callable[[SelectionRule], int] | None = None
    experts_per_token: Callable[[SelectionRule, int, int], float] = lambda rule, tokens, experts: float(rule.k)
    #: What a training token costs, in experts that learn from it; None: all that compute do. One that only computes
    #: costs a third.
    work: Callable[[SelectionRule, int, int], Any] | None = None
    #: A token chooses as many experts as it likes: its list has all of them, and those with weight 0 are not kept
    #: (`metrics.load.asked`).
    open: bool = False
    #: Weights scale the input of a token's one expert, not its output.
    weighs_inputs: bool = False
    #: Outputs [T, O] and routing of (`layer.moe.MoE`, `layer.moe.Tokens`), for a selection that needs more than scores;
    #: None: route, then dispatch.
    forward: Callable[[Any, Any], tuple[Array, Routing]] | None = None
    #: A loss of each layer beside the task's; the extra data of its routing (`Routing.extra`) are what `forward` left
    #: there.
    loss: Callable[[SelectionRule, Routing], Scalar] | None = None
    #: The rule of an average step among so many, by which experts are counted.
    mean_rule: Callable[[SelectionRule, int], SelectionRule] = lambda rule, steps: rule
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept

    @property
    def chooses(self) -> bool:
        """True if scores with noise, or with a bias, could choose other experts than the scores that make weights."""
        return self.sparse and not self.open


#: What any rule reads of its queues.
QUEUES = ("capacity_factor", "capacity_rule", "min_capacity", "capacity_multiple", "group_size", "priority")
