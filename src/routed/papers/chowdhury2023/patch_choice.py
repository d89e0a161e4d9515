"""Choosing patches: experts that take patches of a sample, and a router that knows the patches that decide."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts import Routing
from routed.contracts.ties import highest
from routed.layer.rule import Selection, SelectionRule
from routed.layer.selection import SELECTIONS, capacity, mean_experts, taken
from routed.routers import Router
from routed.routers.fixed import CERTAIN
from routed.settings.setting import Setting, at_least, one_of, refuse

#: Gates that no score changes: they have no gradient, and no sharpness.
CONSTANT_GATES = ("one", "even")

#: What an expert takes of a sample.
PATCHES = {
    "patches": Setting(1, "l: patches of a sample that each expert takes, those with its highest scores", at_least(1)),
    "patch_weights": Setting(
        "chosen",
        "weights of the patches that an expert takes: 1 (one), 1 / l (even), softmax over the chosen ones, or over"
        " all patches of the sample",
        one_of((*CONSTANT_GATES, "chosen", "all")),
    ),
}


def patch_choice(rule: SelectionRule, scores, preference, bias, mask) -> Routing:
    """Gives each expert the l = `rule.patches` tokens of a sample that it prefers most (Chowdhury et al. 2023, Section
    3).

    Expert choice whose group is the sample, with two differences: an expert compares patches by their scores as they
    are, not by what the softmax over experts leaves of them, and gates are shares of patches. `rule.patch_weights`: one
    (1 each; their separate training), even (1 / l each: what `chosen` is for equal scores), chosen (softmax over the l
    chosen patches; joint training), all (softmax over all patches of the sample, of which the l largest are kept; the
    released wide ResNets). The bias has no part.
    """
    padding = jnp.finfo(scores.dtype).min  # below any score, and no weight; -inf would make a group of nothing else NaN
    token = highest(jnp.where(mask[:, None], preference, padding).T, capacity(rule, *scores.shape))
    by_expert = jnp.where(mask[:, None], scores, padding).T
    weight = jnp.take_along_axis(jax.nn.softmax(by_expert) if rule.patch_weights == "all" else by_expert, token, axis=1)
    if rule.patch_weights == "chosen":
        weight = jax.nn.softmax(weight)
    if rule.patch_weights in CONSTANT_GATES:
        weight = jnp.full_like(weight, 1.0 if rule.patch_weights == "one" else 1 / weight.shape[1])
    return taken(scores, token, weight, mask)


def _check_patches(config: ConfigDict) -> None:
    """Refuses a router that would be frozen by accident, or made sharp where its scores only choose."""
    rule, router = config.selection, config.router
    if (
        SELECTIONS[rule.name].within_samples
        and rule.patch_weights in CONSTANT_GATES
        and not (router.frozen or rule.no_gradient or config.phases)
    ):
        refuse(
            "selection.patch_weights",
            rule.patch_weights,
            "gives the router no gradient; set router.frozen=true (if it is meant: selection.no_gradient=true)",
        )
    if (
        SELECTIONS[rule.name].within_samples
        and "initial_entropy" in router
        and router.initial_entropy > 0
        and rule.patch_weights in CONSTANT_GATES
    ):
        refuse(
            "router.initial_entropy",
            router.initial_entropy,
            f"selection.patch_weights={rule.patch_weights!r} is as sharp for any scores; set it to 0",
        )


class DecisiveRouter(nn.Module):
    """Scores patches with a label below `decisive_labels`, which decide the class, alike for every expert.

    No expert can tell the class by what it is given. All other patches score 0, so the first in the sample come next.
    """

    num_experts: int
    decisive_labels: int = 2

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], *, cluster: Int[Array, " T"], **context) -> Float[Array, "T E"]:
        return CERTAIN * jnp.broadcast_to((cluster < self.decisive_labels)[:, None], (len(cluster), self.num_experts))


PATCH_CHOICE = Selection(
    patch_choice,
    sees_others=True,
    bounded=True,
    within_samples=True,
    places=lambda rule: rule.patches,
    experts_per_token=mean_experts,
    settings=PATCHES,
    check=_check_patches,
)
DECISIVE = Router(
    lambda node, experts: DecisiveRouter(experts, node.decisive_labels),
    tokens=(),
    needs=("cluster",),
    learns=False,
    settings={"decisive_labels": Setting(2, "labels of patches, from 0 on, that decide a class", at_least(1))},
)
