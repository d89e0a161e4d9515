"""Auxiliary losses of published models; this module adds the losses of one layer to AUXILIARY."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int, Scalar
from ml_collections import ConfigDict

from routed.contracts import Routing
from routed.layer.auxiliary import AUXILIARY, Auxiliary, LossInputs, balance, mean_of_groups
from routed.layer.selection import SELECTIONS
from routed.settings.setting import POSITIVE, Allowed, Setting, When, at_least, refuse

#: The least and the largest that a steered coefficient becomes.
LIMITS = (1e-20, 1e20)


def load(
    scores: Float[Array, "T E"],
    noisy: Float[Array, "T E"],
    std: float,
    k: int | Int[Array, "T 1"],
    mask: Bool[Array, " T"] | None = None,
) -> Scalar:
    """Returns the squared variation over experts of the chance that a token chooses them: 0 where all have the same.

    The chance that the score of expert e, with fresh noise N(0, std^2), reaches the k-th highest noisy score of the
    token: 1 - Phi((threshold - score) / std), mean over tokens (Shazeer et al. 2017, appendix A, as vmoe has it, for
    whom it is std^2 / mean^2).
    """
    threshold = jnp.take_along_axis(jnp.sort(noisy, axis=1, descending=True), jnp.full((len(noisy), 1), k) - 1, axis=1)
    chance = 1 - norm.cdf((threshold - scores) / std)
    real = jnp.ones(len(scores), bool) if mask is None else mask
    mean = jnp.where(real[:, None], chance, 0).sum(0) / jnp.maximum(real.sum(), 1)
    return mean.var() / jnp.maximum(mean.mean(), 1e-9) ** 2


def balance_sigmoid(scores: Float[Array, "T E"], load: Float[Array, "groups E"], mask: Bool[Array, " T"]) -> Scalar:
    """Returns E sum_e f_e P_e of every group, P of normalised sigmoids: DeepSeek-V3's loss where a sequence is a group.

    DeepSeek-AI (2024), equations 17 to 20; mean over the groups of `load`.
    """
    # Softmax of logarithms: a sum of sigmoids is 0 in float32 at scores below about -100, and its gradient NaN before.
    return balance(jax.nn.softmax(jax.nn.log_sigmoid(scores)), load, mask)


def balance_pooled(probs: Float[Array, "L T E"], load: Float[Array, "L E"]) -> Scalar:
    """Returns E sum_e f_e P_e, load and mean probability over all layers together (transformers: k times this value).

    Layers that are out of balance in different directions cost nothing here, unlike the mean over layers of `balance`.
    """
    shares = jax.lax.stop_gradient(load).mean(0)
    return load.shape[1] * (shares * probs.mean((0, 1))).sum()


def l1(scores: Float[Array, "T E"], load: Float[Array, "groups E"], mask: Bool[Array, " T"]) -> Scalar:
    """Returns the mean over tokens and experts of the positive scores, each times its expert's load over a fair one.

    ReMoE's regularisation with balance (Wang et al. 2024, equation 9); loads have no gradient. `adapted` moves its
    coefficient.
    """
    groups, experts = load.shape
    real = jnp.where(mask[:, None], jax.nn.relu(scores), 0.0).reshape(groups, -1, experts)
    count = jnp.maximum(mask.reshape(groups, -1).sum(1), 1)
    return mean_of_groups((experts * jax.lax.stop_gradient(load) * real.sum(1)).sum(1) / (count * experts), mask)


def adapted(losses: Any, coefficient: Scalar | float, scores: Sequence[Float[Array, "... T E"]]) -> Scalar:
    """Returns the coefficient of `l1` times `l1_factor` with over `l1_gates` positive scores a token, else over it.

    Mean over the tokens of all layers (Wang et al. 2024, equation 8, from 1e-8 on, with factor 1.2; the same where as
    many). It stays within LIMITS, from which it can return: factors of hundreds of steps leave float32.
    """
    positive = sum((array > 0).sum() for array in scores) / sum(array.size // array.shape[-1] for array in scores)
    return jnp.clip(coefficient * losses.l1_factor ** jnp.sign(positive - losses.l1_gates), *LIMITS)


def _load(inputs: LossInputs) -> Scalar:
    routing, scores = inputs.routing, inputs.routing.scores
    k: Any = min(max(1, len(routing.token) // len(scores)), scores.shape[1]) if isinstance(routing, Routing) else 1
    if isinstance(routing, Routing) and routing.chosen is not None:  # layers of fewer experts
        k = routing.chosen.reshape(len(scores), k).sum(1, keepdims=True)
    return load(scores, scores, inputs.losses.load_std, k, inputs.mask)  # the threshold has a gradient, too


def _check_load(config: ConfigDict) -> None:
    """Refuses selections without a number of experts that a token chooses."""
    if config.losses.load and SELECTIONS[config.selection.name].open:
        refuse("losses.load", config.losses.load, f"selection.name={config.selection.name} has no k; set it to 0")


AUXILIARY["balance_sigmoid"] = Auxiliary(
    lambda inputs: balance_sigmoid(inputs.routing.scores, inputs.load, inputs.mask),
    "the balance loss of normalised sigmoids; a sequence a group with losses.balance_scope=group",
)
AUXILIARY["load"] = Auxiliary(
    _load,
    "squared variation of the experts' chance to be chosen under noise of deviation losses.load_std",
    settings={
        "load_std": Setting(
            1.0,
            "deviation of the noise on scores in the load loss",
            POSITIVE,
            when=When(lambda config: config.losses.load > 0, "losses.load > 0"),
        )
    },
    check=_check_load,
)


def _check(config: ConfigDict) -> None:
    """Refuses a steered coefficient with gates of another kind, a target of all experts, or a start at 0."""
    losses, gates = config.losses, config.losses.l1_gates
    if not gates:
        return
    if not SELECTIONS[config.selection.name].open:
        fits = " or ".join(repr(name) for name, selection in SELECTIONS.items() if selection.open)
        refuse("losses.l1_gates", gates, f"steers the gates of selection.name={fits}, not of {config.selection.name!r}")
    if not losses.l1:
        refuse("losses.l1_gates", gates, "multiplies losses.l1, which is 0; start it at 1e-8, say")
    if gates >= config.experts.count:
        refuse("losses.l1_gates", gates, f"must be below experts.count={config.experts.count}")


AUXILIARY["l1"] = Auxiliary(
    lambda inputs: l1(inputs.routing.scores, inputs.load, inputs.mask),
    "mean positive score, weighted by its expert's load over a fair one (for ReLU gates)",
    settings={
        "l1_gates": Setting(
            0.0,
            "positive gates a token to which losses.l1 is steered, step by step from its value on (ReMoE: 1e-8); 0:"
            " it stays. Scores need an offset"
            " to get there: a linear router without one is positive on half of what lies around 0",
            at_least(0),
            omit_default_from_identity=True,
        ),
        "l1_factor": Setting(
            1.2,
            "factor on losses.l1 after a step with more positive gates than l1_gates, divisor after one with fewer",
            Allowed(lambda value: value > 1, lambda: "must be above 1"),
            when=When(lambda config: config.losses.l1_gates > 0, "losses.l1_gates > 0"),
            omit_default_from_identity=True,
        ),
    },
    adapted=adapted,
    steered_by="l1_gates",
    check=_check,
)
