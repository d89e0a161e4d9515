"""Competition (Pham et al. 2024): on a share of the steps all experts run, those with the largest outputs win, and the router learns who.

A selection with a contest routes as `top_k` does. In training a layer also tosses a coin: where it competes, all experts compute every
token, and the winners are the K with the largest norms of their outputs. At evaluation (`selection.eval.name=compete`) it competes always.
With share 0 nothing is left of it but the selection: the same program, for any value.

Where weights are renormalised and nothing is dropped, gradients reach the winners and the router, nobody else. So `elected` computes all
experts forward only, for who wins, and then the winners as any sparse layer does; `contest` computes all of them at once, and is its oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Scalar
from ml_collections import ConfigDict

from routed.contracts import Routing, SoftRouting
from routed.contracts.ties import is_highest
from routed.layer.rule import Rule
from routed.settings.setting import Setting, When, at_least, one_of, refuse, within
from routed.settings.tree import from_flat

#: Steps of an epoch of the released code, by which its schedule goes.
EPOCH = 1000

#: Where somebody wins.
_WON = When(lambda config: config.selection.winners != "all", "selection.winners=norms or random")

#: Where the task's loss reaches the router of a layer that competes.
_HEARD = When(lambda config: _WON.holds(config) and not config.selection.forward, "selection.forward=false")

SETTINGS: dict[str, Setting] = {
    "share": Setting(0.05, "lambda: share of the training steps on which a layer competes", within(0, 1), traced=True),
    "schedule": Setting(
        "constant",
        f"of share; root: times 2 / (2 + sqrt(t + 1)), t the number of past {EPOCH:,} steps (an option of the released code)",
        one_of(("constant", "root")),
    ),
    "winners": Setting(
        "norms",
        "norms: the largest outputs; random: each token's norms, dealt anew among its experts; all: nobody wins, every expert counts by"
        " the softmax of its score",
        one_of(("norms", "random", "all")),
    ),
    "forward": Setting(
        True, "the layer's output is the winners'; else the router's choice, and its loss alone is of them", when=_WON
    ),
    "alpha": Setting(
        1.0, "times the gradient that the task's loss sends to the router's weights where a layer competes (eq. 5)", at_least(0), when=_HEARD
    ),
    "distil": Setting(1.0, "coefficient of the router's loss, summed over the layers that compete", at_least(0), traced=True, when=_WON),
    "distil_side": Setting(
        "chosen", "of the router in that loss: softmax over the chosen K (paper) or all experts", one_of(("chosen", "all")), when=_WON
    ),
    "distil_target": Setting(
        "own", "what it learns: its own tokens' norms; shuffled: those of other tokens", one_of(("own", "shuffled")), when=_WON
    ),
    "distil_detached": Setting(True, "its loss sends no gradient to the experts through the norms", when=_WON),
    "distil_trunk": Setting(False, "its loss sends a gradient to the layers below through the router's input", when=_WON),
    "distil_mean": Setting(
        "tokens", "squared errors are summed over experts, or (entries) averaged too", one_of(("tokens", "entries")), when=_WON
    ),
}  # fmt: skip


def held(rule: Rule, key: PRNGKeyArray, step: Any) -> Bool[Array, ""]:
    """Does a layer compete at this step? The key, its own at the step, is consumed."""
    share = jnp.asarray(rule.own.share, jnp.float32)
    if rule.own.schedule == "root":
        share *= 2 / (2 + jnp.sqrt(step // EPOCH + 1.0))
    return jax.random.uniform(key) < share


def is_elected(rule: Rule) -> bool:
    """Whether `elected` computes it: nobody learns through the norm of an expert that does not compute the output.

    Without `renormalise` the winners' weights are shares of all norms, and a winner that is dropped has a norm of its own.
    """
    own = rule.own
    if own.winners == "random":
        return True
    alone = rule.renormalise and not rule.capacity_factor if own.forward else own.distil_detached
    return own.winners == "norms" and alone


def elected(
    rule: Rule,
    select: Callable[..., Any],
    norms_of_all: Callable[[], Float[Array, "T E"]],
    outputs_of: Callable[[Routing], Any],
    routing: Routing,
    took_part: Bool[Array, ""],
    key: PRNGKeyArray | None,
    mask: Bool[Array, " T"] | None = None,
) -> tuple[Any, Routing, Float[Array, "T E"]]:
    """(outputs of the assignments, these, what the router is to learn) of a layer that competes if it `took_part`; the key is consumed.

    `norms_of_all`, called where it did, gives the norm of every expert's output, and no gradient; `outputs_of` runs the experts of a
    routing, sorted by expert (`routed.layer.dispatch.ragged.Sorted`).
    """
    absent = lambda: jnp.zeros_like(routing.scores)  # noqa: E731
    norms = jax.lax.stop_gradient(jax.lax.cond(took_part, norms_of_all, absent))
    deal, order = jax.random.split(key) if key is not None else (None, None)
    if rule.own.winners == "random" and deal is not None:
        norms = jax.random.permutation(deal, norms, axis=1, independent=True)
    winners, learned, ours = select(norms), norms, routing.weight
    chosen = _where(took_part, winners, routing) if rule.own.forward else routing
    outputs = outputs_of(chosen)
    if rule.own.forward and rule.own.winners == "norms":
        computed = jnp.where(chosen.kept, chosen.token, len(norms))  # padding is not
        learned = norms.at[computed, chosen.expert].set(outputs.measured(norms_of), mode="drop")
        learned = jnp.where(took_part, learned, norms)
        winners = select(learned, preference=norms)
    if rule.own.forward:
        ours = jnp.where(took_part, winners.weight, ours)
    if rule.own.distil_target == "shuffled" and order is not None:
        learned = _shuffled(order, learned, mask)
    return outputs, chosen._replace(scores=routing.scores, weight=ours), learned


def _shuffled(key: PRNGKeyArray, norms: Float[Array, "T E"], mask: Bool[Array, " T"] | None) -> Float[Array, "T E"]:
    """The rows in another order; padding stays where it is."""
    if mask is None:
        return jax.random.permutation(key, norms)
    drawn = jax.random.uniform(key, mask.shape)
    own, other = (jnp.argsort(jnp.where(mask, rank, jnp.inf)) for rank in (jnp.zeros_like(drawn), drawn))
    return norms.at[own].set(norms[other])


def _where(first: Bool[Array, ""], one: Routing, other: Routing) -> Routing:
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


def norms_of(outputs: Float[Array, "*N O"]) -> Float[Array, "*N"]:
    """|f|, float32."""
    return jnp.sqrt((outputs.astype(jnp.float32) ** 2).sum(-1) + 1e-24)  # the derivative of a root at 0 is infinite


def contest(
    rule: Rule,
    select: Callable[[Float[Array, "T E"]], Routing],
    combine: Callable[[Routing | SoftRouting, Float[Array, "E N O"]], Float[Array, "T O"]],
    outputs: Float[Array, "E N O"],
    routing: Routing,
    key: PRNGKeyArray | None,
    mask: Bool[Array, " T"] | None = None,
) -> tuple[Float[Array, "T O"], Routing, Float[Array, "T E"]]:
    """(the layer's output, who computes it, what the router is to learn) where a layer competes; the key is consumed.

    Norms dealt anew (winners random) are numbers: no expert is to learn from another's.
    `outputs` are those of all experts (N: one row for all tokens, or T), which `combine` weighs; `routing` is what the router says, and
    `select` routes by other scores.
    """
    norms = jnp.broadcast_to(norms_of(outputs).T, routing.scores.shape)
    deal, order = jax.random.split(key) if key is not None else (None, None)
    if rule.own.winners == "random" and deal is not None:
        norms = jax.lax.stop_gradient(jax.random.permutation(deal, norms, axis=1, independent=True))
    learned = norms
    if rule.own.distil_target == "shuffled" and order is not None:
        learned = _shuffled(order, norms, mask)
    if rule.own.winners == "all":
        return combine(SoftRouting(routing.scores, jax.nn.softmax(routing.scores)), outputs), routing, learned
    if rule.own.forward:
        routing = select(norms)._replace(scores=routing.scores)
    return combine(routing, outputs), routing, learned


def weighed(
    rule: Rule, took_part: Bool[Array, ""], scores: Float[Array, "T E"], own: Float[Array, "T E"]
) -> Float[Array, "T E"]:
    """`scores`, of which the router's weights hear `alpha` times as much where a layer competes, and the trunk as much as ever.

    `own` are the same scores, of inputs that get no gradient.
    """
    return scores + jnp.where(took_part, rule.own.alpha - 1.0, 0.0) * (own - jax.lax.stop_gradient(own))


def distillation(rule: Rule, routing: Routing) -> Scalar:
    """The router's loss of one layer (Pham et al. 2024, eq. 3): squared error of its softmax and that of the norms over the K largest.

    0 where the layer did not compete, or nobody won.
    """
    own, seen = rule.own, routing.contest
    if seen is None or own.winners == "all":
        return jnp.float32(0)
    target = _softmax_of_largest(seen.norms, rule.k)
    target = jax.lax.stop_gradient(target) if own.distil_detached else target
    ours = _softmax_of_largest(seen.scores, rule.k) if own.distil_side == "chosen" else jax.nn.softmax(seen.scores)
    error = ((ours - target) ** 2).sum(1)
    error = (
        error.mean() if seen.mask is None else jnp.where(seen.mask, error, 0).sum() / jnp.maximum(seen.mask.sum(), 1)
    )
    error /= ours.shape[1] if own.distil_mean == "entries" else 1
    return own.distil * jnp.where(seen.held, error, 0.0)


def _softmax_of_largest(values: Float[Array, "T E"], k: int) -> Float[Array, "T E"]:
    """Returns softmax(TopK(values)): 0 for all but the k largest values of a row."""
    return jax.nn.softmax(jnp.where(is_highest(values, k), values, -jnp.inf))


def experts_per_token(rule: Rule, tokens: int, experts: int) -> Any:
    """Experts that compute a training token, on average: all of them where the layer competes."""
    del tokens
    return rule.k + rule.own.share * (experts - rule.k)


def work(rule: Rule, tokens: int, experts: int) -> Any:
    """The same in experts that learn: who computes forward only is a third of a training step. Where not only winners have a gradient, all learn."""
    del tokens
    return rule.k + rule.own.share * (experts - rule.k) / (3 if is_elected(rule) else 1)


def averaged(rule: Rule, steps: int) -> Rule:
    """The rule with the share of a mean step of so many in the place of its schedule: what is counted by, from the first evaluation on."""
    if rule.own is None or "schedule" not in rule.own or rule.own.schedule != "root":
        return rule
    factor = float((2 / (2 + np.sqrt(np.arange(steps) // EPOCH + 1.0))).mean())
    own = {name: rule.own[name] for name in SETTINGS if name in rule.own}
    return rule._replace(own=from_flat(own | {"share": factor * rule.own.share}))


def _taught(own: Any) -> bool:
    """Whether anything tells the router of a layer that always competes what to learn: the task's loss, or a target that is not constant."""
    return own.winners == "all" or not own.forward or bool(own.distil and (own.k > 1 or own.distil_side == "all"))


def check(config: ConfigDict) -> None:
    """Refuses a contest at an evaluation that would toss coins or teach, and a router that nothing would teach."""
    own, node = config.selection, config.selection.eval
    always = "share" in own and own.share == 1  # read where experts compete in training
    if always and not (_taught(own) or config.router.frozen or own.no_gradient or config.phases):
        refuse(
            "selection.share",
            1,
            "where winners compute every output the router hears of no task, and selection.distil=0 (or selection.k=1, of which a softmax is always 1)"
            " teaches it nothing, an accidental frozen router; lower the share or set router.frozen=true",
        )
    if "distil_trunk" in own and own.distil_trunk and "stop_gradient" in config.router and config.router.stop_gradient:
        refuse(
            "selection.distil_trunk",
            True,
            "router.stop_gradient=true lets nothing through to the layers below; set one of them to false",
        )
    if "winners" not in node:  # an evaluation without a contest
        return
    if node.winners == "random":
        refuse("selection.eval.winners", "random", "an evaluation tosses no coins; use norms or all")
    for name in SETTINGS.keys() - {"winners", "forward"}:
        if name in node and node[name] != SETTINGS[name].default:
            refuse(
                f"selection.eval.{name}",
                node[name],
                f"an evaluation competes always and teaches nobody; set selection.{name}, which is of training",
            )
    if "noise_at_eval" in config.router and config.router.noise_at_eval:
        refuse(
            "router.noise_at_eval",
            True,
            "an evaluation that competes draws nothing; set it to false or selection.eval.name=top_k",
        )
