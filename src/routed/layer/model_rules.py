"""Selections of published models, which this module adds to SELECTIONS: DeepSeek's groups, ReMoE's ReLU, Llama 4."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import Routing, SoftRouting, UserError
from routed.contracts.ties import highest
from routed.layer.rule import QUEUES, Selection, SelectionRule
from routed.layer.selection import SELECTIONS, queued, sigmoid, sigmoid_order
from routed.settings.setting import POSITIVE, Setting, at_least, one_of, refuse

GROUPS: dict[str, Setting] = {
    "expert_groups": Setting(1, "groups of neighbouring experts, of one size; 1: no limit", at_least(1)),
    "groups_kept": Setting(1, "groups that a token may choose from", at_least(1)),
    "affinity": Setting(
        "sigmoid",
        "sigmoid of a score (DeepSeek-V3: a group counts the sum of its two best) or softmax over experts (V2: its"
        " best)",
        one_of(("sigmoid", "softmax")),
    ),
    "scaling": Setting(1.0, "factor on the k weights", POSITIVE),
}


def _setting_of(rule: SelectionRule, name: str) -> Any:
    return GROUPS[name].default if rule.settings is None else rule.settings[name]


def group_limited(rule: SelectionRule, scores, preference, bias, mask) -> Routing:
    """Returns the k experts of highest affinity + bias in the groups of experts that count most (DeepSeek-V2 and -V3).

    V3: affinity sigmoid(score); a group counts the sum of its two highest, bias included. V2: softmax over all experts;
    its highest. Weights are affinities without the bias, over their sum when `renormalise`, times `scaling`.
    """
    groups, limit, of = (_setting_of(rule, name) for name in ("expert_groups", "groups_kept", "affinity"))
    tokens, experts = scores.shape
    if experts % groups or rule.k > min(limit, groups) * experts // groups:
        problem = f"expert_groups={groups}, groups_kept={limit}, k={rule.k}"
        raise UserError(f"{problem}: groups must divide the {experts} experts, and the kept ones must have k")
    gate = jax.nn.sigmoid if of == "sigmoid" else jax.nn.softmax
    wanted = gate(preference) + bias[None]
    order = sigmoid_order(preference, bias) if of == "sigmoid" else wanted
    if groups > limit:
        inside = wanted.reshape(tokens, groups, experts // groups)
        best = min(2 if of == "sigmoid" else 1, experts // groups)
        counts = jax.lax.top_k(inside, best)[0].sum(-1)
        chosen = jax.nn.one_hot(highest(counts, limit), groups, dtype=bool).any(1)
        order = jnp.where(chosen[:, :, None], order.reshape(inside.shape), -jnp.inf).reshape(tokens, experts)
    expert = highest(order, rule.k)
    affinity = weight = jnp.take_along_axis(gate(scores), expert, axis=1)
    if rule.renormalise:  # of logarithms: the affinities of all chosen experts may be 0 in float32
        log_gate = jax.nn.log_sigmoid if of == "sigmoid" else jax.nn.log_softmax
        weight = jax.nn.softmax(jnp.take_along_axis(log_gate(scores), expert, axis=1))
    return queued(rule, scores, expert, _setting_of(rule, "scaling") * weight, mask, affinity)


def _check(config: ConfigDict) -> None:
    """Refuses groups that do not divide the experts, and too few places in the groups that a token may choose from."""
    for node in (config.selection, config.selection.eval):
        if SELECTIONS[node.name].route is not group_limited:
            continue
        experts = config.experts.count
        if experts % node.expert_groups:
            refuse("selection.expert_groups", node.expert_groups, f"does not divide experts.count={experts}")
        if node.groups_kept > node.expert_groups or node.k > node.groups_kept * experts // node.expert_groups:
            refuse(
                "selection.groups_kept",
                node.groups_kept,
                "must leave k experts, in at most selection.expert_groups groups",
            )


def relu(rule: SelectionRule, scores, preference, bias, mask) -> Routing:
    """Returns every expert whose score is positive, weighted by it: ReLU gates (ReMoE, Wang et al. 2024).

    How many these are is learned: `losses.l1` pays for them, and `losses.l1_gates` steers what they cost. All of a
    token's experts are in the list, the others not kept, so a dispatch computes for every expert; the bias has no part.
    """
    every = jnp.broadcast_to(jnp.arange(scores.shape[1]), scores.shape)
    weight = jax.nn.relu(scores)
    routing = queued(rule._replace(k=scores.shape[1]), scores, every, weight, mask, weight)
    chosen = routing.weight > 0
    return routing._replace(kept=routing.kept & chosen, chosen=chosen)


SELECTIONS["group_limited"] = Selection(
    group_limited, biased=True, settings=GROUPS, reads=("k", "renormalise", *QUEUES), check=_check
)
SELECTIONS["relu"] = Selection(
    relu, open=True, experts_per_token=lambda rule, tokens, experts: float(experts), reads=("group_size",)
)


def _check_one(config: ConfigDict) -> None:
    """Refuses several experts for one scaled input, and an evaluation that scales other inputs than training."""
    for node in (config.selection, config.selection.eval):
        if SELECTIONS[node.name].weighs_inputs and node.k != 1:
            refuse("selection.k", node.k, f"selection.name={node.name!r} scales the input of one expert; set it to 1")
    if SELECTIONS[config.selection.name].weighs_inputs != SELECTIONS[config.selection.eval.name].weighs_inputs:
        reason = f"experts learn inputs as selection.name={config.selection.name!r} scales them; use the same"
        refuse("selection.eval.name", config.selection.eval.name, reason)


#: Llama 4: the expert of the highest score gets its token times sigmoid(score).
SELECTIONS["sigmoid_input"] = Selection(
    sigmoid, biased=True, weighs_inputs=True, reads=("k", "renormalise", *QUEUES), check=_check_one
)


def scaled_inputs(
    x: Float[Array, "T ..."], routing: Routing | SoftRouting, selection: str = ""
) -> tuple[Float[Array, "T ..."], Routing]:
    """Returns tokens times the weight of their one expert, and the routing with weights of 1 (Llama 4).

    `selection` is the name of the selection that routed; "": one in which tokens choose.

    Raises:
      ValueError: tokens have several experts, and an input for each; or experts choose.
    """
    if selection and SELECTIONS[selection].bounded:
        raise ValueError(f"weights scale the input of a token's one expert; by {selection!r} experts choose")
    if not isinstance(routing, Routing) or len(routing.weight) != len(x):
        counts = f"{len(x)} tokens have {routing.weight.size}"
        raise ValueError(f"weights scale the input of one expert a token, and {counts}")
    weight = routing.weight.reshape(-1, *[1] * (x.ndim - 1))
    scaled: Routing = routing._replace(weight=jnp.ones_like(routing.weight))
    return x * weight.astype(x.dtype), scaled
