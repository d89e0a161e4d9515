"""Auxiliary losses of a router, normalised so that coefficients mean the same everywhere.

All are pure functions of what one layer's gate decided. Padding (`mask` False) counts nowhere. A loss of fixed choices
would optimise decisions that are never executed, so `auxiliary` is 0 for routers that do not learn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float, Int, Scalar
from ml_collections import ConfigDict

from routed.contracts import Routing, SoftRouting, UserError, nearest
from routed.metrics.load import load_of
from routed.settings.setting import COEFFICIENT, Setting, When, accept, one_of, refuse
from routed.settings.tree import from_flat


class LossInputs(NamedTuple):
    """The inputs of an auxiliary loss: one layer at one training step.

    `features` are the tokens as the layer's experts got them; `responses` runs every expert on every token [T, E, O],
    at the cost that this has; `losses` is the config node of that name. What a caller does not know is None.
    """

    routing: Routing | SoftRouting
    probs: Float[Array, "T E"]
    load: Float[Array, "groups E"]
    mask: Bool[Array, " T"]
    losses: Any
    features: Float[Array, "T ..."] | None = None
    responses: Callable[[], Float[Array, "T E O"]] | None = None
    step: Int[Array, ""] | int = 0
    steps: int = 0  # of the run


class Auxiliary(NamedTuple):
    """A loss of a layer with the coefficient `losses.NAME`; `settings` are further settings of the node `losses`.

    With `adapted`, and where the setting `steered_by` is not 0, `losses.NAME` is the coefficient of the first step
    only.
    """

    value: Callable[[LossInputs], Scalar]
    doc: str
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept
    #: The coefficient after a step, of (node `losses`, the coefficient before, scores [..., T, E] of each site).
    adapted: Callable[[Any, Scalar, Sequence[Array]], Scalar] | None = None
    steered_by: str = ""


def balance(probs: Float[Array, "T E"], load: Float[Array, "groups E"], mask: Bool[Array, " T"]) -> Scalar:
    """Returns E sum_e f_e P_e: 1 at uniform routing, E/k when all tokens choose the same k experts with certainty.

    f_e is the share of the assignments before drops (no gradient), P_e the mean probability (Shazeer et al. 2017, Fedus
    et al. 2022); flaxformer's value is k times ours. 1 is not the minimum and no proof of balance. Mean over the groups
    of `load` that have tokens; one is the whole batch (losses.balance_scope).
    """
    groups, experts = load.shape
    real = mask.astype(jnp.float32).reshape(groups, -1, 1)
    mean = (probs.reshape(groups, -1, experts) * real).sum(1) / jnp.maximum(real.sum(1), 1.0)
    return mean_of_groups(experts * (jax.lax.stop_gradient(load) * mean).sum(-1), mask)


def mean_of_groups(values: Float[Array, " groups"], mask: Bool[Array, " T"]) -> Scalar:
    """Returns the mean of values of equal groups of tokens, without the groups that are all padding (then 0)."""
    return _mean(values, mask.reshape(len(values), -1).any(1))


def importance(probs: Float[Array, "T E"], mask: Bool[Array, " T"]) -> Scalar:
    """Returns the squared coefficient of variation of experts' summed probabilities: 0 at uniform, E - 1 at collapse.

    Shazeer et al. (2017). Written var / mean^2: the gradient of (std / mean)^2 is NaN at perfect balance.
    """
    total = jnp.where(mask[:, None], probs, 0.0).sum(0)
    return total.var() / jnp.maximum(total.mean(), 1e-9) ** 2


def z(scores: Float[Array, "T E"], mask: Bool[Array, " T"]) -> Scalar:
    """Returns the mean of logsumexp(scores)^2: (ln E)^2 for scores of 0 (Zoph et al. 2022)."""
    return _mean(jax.nn.logsumexp(scores, axis=1) ** 2, mask)


def entropy(probs: Float[Array, "T E"], mask: Bool[Array, " T"]) -> Scalar:
    """Returns the mean entropy of a token's probabilities in nats, 0 to ln E; a positive coefficient sharpens."""
    # xlogy has an infinite derivative at 0; the floor keeps certain routers finite and changes nothing visible.
    return _mean(-xlogy(probs, jnp.maximum(probs, 1e-30)).sum(1), mask)


def _balance(inputs: LossInputs) -> Scalar:
    shares = inputs.routing.scores if inputs.losses.balance_of == "scores" else inputs.probs
    return balance(shares, inputs.load, inputs.mask)


#: The scope of a balance loss over the layers of a model together.
POOLED = "layers"

_BALANCED = When(lambda config: config.losses.balance > 0, "losses.balance > 0")
_SCOPED = When(
    lambda config: config.losses.balance > 0 or config.losses.balance_sigmoid > 0,
    "losses.balance > 0 or losses.balance_sigmoid > 0",
)


def _check_scope(config: ConfigDict) -> None:
    """Refuses groups without a size, and the scope of all layers where a balance loss is taken layer by layer."""
    losses = config.losses
    if losses.balance_scope == "group" and not config.selection.get("group_size", 0):
        refuse("losses.balance_scope", "group", "all tokens are one group: set selection.group_size to those of a row")
    if losses.balance_scope == POOLED and losses.balance_sigmoid and not losses.balance:
        refuse("losses.balance_scope", POOLED, "is a scope of losses.balance, which is 0; use batch or group")


#: name -> auxiliary loss.
AUXILIARY: dict[str, Auxiliary] = {
    "balance": Auxiliary(
        _balance,
        "E sum_e load_e mean-probability_e: 1 at uniform",
        settings={
            "balance_of": Setting(
                "probabilities",
                "probabilities, or scores: mean scores stand in their place (released code of Chen et al. 2022)",
                one_of(("probabilities", "scores")),
                when=_BALANCED,
            ),
            "balance_scope": Setting(
                "batch",
                "batch, group, or layers: over which tokens load and probability are taken; layers: the batch, in all"
                " layers together (transformers)",
                one_of(("batch", "group", POOLED)),
                when=_SCOPED,
            ),
        },
        check=_check_scope,
    ),
    "importance": Auxiliary(
        lambda inputs: importance(inputs.probs, inputs.mask), "squared variation of the experts' summed probabilities"
    ),
    "z": Auxiliary(lambda inputs: z(inputs.routing.scores, inputs.mask), "mean squared log-partition of the scores"),
    "entropy": Auxiliary(
        lambda inputs: entropy(inputs.probs, inputs.mask), "mean per-token entropy; positive sharpens"
    ),
}


def loss_settings() -> dict[str, Setting]:
    """Returns the settings of the node `losses`: a coefficient for each loss of the table, and the loss's settings."""
    settings: dict[str, Setting] = {}
    for name, loss in AUXILIARY.items():
        settings[name] = Setting(0.0, f"coefficient of an auxiliary loss: {loss.doc}", COEFFICIENT)
        settings |= loss.settings
    return settings


def coefficients_of(losses: Any) -> dict[str, float]:
    """Returns the coefficient of every auxiliary loss, from the config node `losses`."""
    return {name: losses[name] for name in AUXILIARY}


def users_losses(losses: Any) -> list[str]:
    """Returns the auxiliary losses of users' files that have a coefficient, whose values results keep."""
    declared = {name: loss for name, loss in AUXILIARY.items() if name in losses}
    users = [name for name, loss in declared.items() if not loss.value.__module__.startswith("routed.")]
    return [name for name in users if losses[name]]


def steered(losses: Any) -> dict[str, float]:
    """Returns the first values of coefficients that training moves; `losses` may lack settings that no part reads."""
    moving = {name: loss.steered_by for name, loss in AUXILIARY.items() if loss.adapted is not None}
    return {
        name: losses[name] for name, setting in moving.items() if setting in losses and losses[name] and losses[setting]
    }


def auxiliary(
    routing: Routing | SoftRouting,
    coefficients: Mapping[str, float | Scalar],
    *,
    learned: Bool[Array, ""] | bool = True,
    mask: Bool[Array | np.ndarray, " T"] | None = None,
    groups: int = 1,
    losses: Any = None,
    features: Float[Array, "T ..."] | None = None,
    responses: Callable[[], Float[Array, "T E O"]] | None = None,
    step: Int[Array, ""] | int = 0,
    steps: int = 0,
) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns the weighted sum of the losses named in `coefficients`, and each unweighted.

    `learned` is traced: False makes the sum 0, so a frozen, hash or oracle router contributes neither value nor
    gradient. `losses` is the config node of that name (default: all settings at their defaults).

    Raises:
      UserError: no such loss, a loss that is no single number, or groups that do not divide the tokens.
    """
    if unknown := [name for name in coefficients if name not in AUXILIARY]:
        problem = f"auxiliary loss {unknown[0]!r} is unknown{nearest(unknown[0], AUXILIARY)}"
        raise UserError(f"{problem}; known: {', '.join(AUXILIARY)}")
    if routing.scores.ndim != 2:
        mend = "jax.vmap(lambda one: auxiliary(one, coefficients)[0])(routing).mean()"
        raise UserError(f"scores {[*routing.scores.shape]}: must be [T, E]; of several layers take {mend}")
    tokens = len(routing.scores)
    if tokens % groups:
        raise UserError(f"groups={groups}: {tokens} tokens do not make so many groups of one size")
    load = load_of(routing, None if mask is None else jnp.asarray(mask), groups)
    mask = jnp.ones(tokens, bool) if mask is None else jnp.asarray(mask)
    if losses is None:
        losses = from_flat({name: setting.default for name, setting in loss_settings().items()})
    inputs = LossInputs(routing, jax.nn.softmax(routing.scores), load, mask, losses, features, responses, step, steps)
    values = {name: AUXILIARY[name].value(inputs) for name in coefficients}
    for name, value in values.items():
        if (shape := jnp.shape(value)) != ():
            raise UserError(f"auxiliary loss {name!r} returns {list(shape)}; it must return one number, such as a mean")
    total = sum((coefficients[name] * values[name] for name in coefficients), jnp.float32(0))
    return jnp.where(learned, total, 0.0), values


def _mean(values: Float[Array, " T"], mask: Bool[Array, " T"]) -> Scalar:
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1)
