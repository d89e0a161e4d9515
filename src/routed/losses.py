"""What a sample's outputs cost, and auxiliary losses of a router, normalised so that coefficients mean the same everywhere.

All are pure functions; the auxiliary ones of scores and routing. Padding (`mask` False) counts nowhere. A loss of fixed choices would optimise decisions that are never executed, so
`auxiliary` is 0 for routers that do not learn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float, Scalar

from routed.metrics import load_of
from routed.words import Routing, SoftRouting


def squared(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """|prediction - y|^2."""
    return ((prediction - y) ** 2).sum(-1)


def logistic(prediction: Float[Array, "B 1"], y: Float[Array, "B 1"]) -> Float[Array, " B"]:
    """log(1 + exp(-y f)) of labels -1 and 1, in nats: log 2 for f = 0."""
    return jax.nn.softplus(-y * prediction)[:, 0]


def cross_entropy(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """-log softmax(f)_y in nats; y is one-hot."""
    return -(y * jax.nn.log_softmax(prediction)).sum(-1)


def softmax_cross_entropy(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Float[Array, " B"]:
    """The cross entropy of softmax(softmax(f)), at least log(1 + 1/e) = .3133 for two classes (the released code of Chen et al. 2022)."""
    return cross_entropy(jax.nn.softmax(prediction), y)


#: name -> (loss of each sample, outputs of its targets: None: any, 1: a label of -1 or 1, 2: at least two classes).
TASK_LOSSES = {
    "squared": (squared, None),
    "logistic": (logistic, 1),
    "cross_entropy": (cross_entropy, 2),
    "softmax_cross_entropy": (softmax_cross_entropy, 2),
}


def correct(prediction: Float[Array, "B O"], y: Float[Array, "B O"]) -> Bool[Array, " B"]:
    """Is the class right? One output: its sign; several: the largest. An output of 0 is never right."""
    if y.shape[1] == 1:
        return (prediction * y > 0)[:, 0]
    return prediction.argmax(1) == y.argmax(1)


def balance(probs: Float[Array, "T E"], load: Float[Array, "groups E"], mask: Bool[Array, " T"]) -> Scalar:
    """E sum_e f_e P_e: 1 at uniform routing, E/k when all tokens choose the same k experts with certainty.

    f_e is the share of the assignments before drops (no gradient), P_e the mean probability (Shazeer et al. 2017, Fedus
    et al. 2022); flaxformer's value is k times ours. 1 is not the minimum and no proof of balance. Mean over the groups
    of `load`; one is the whole batch (losses.balance_scope).
    """
    groups, experts = load.shape
    real = mask.astype(jnp.float32).reshape(groups, -1, 1)
    mean = (probs.reshape(groups, -1, experts) * real).sum(1) / jnp.maximum(real.sum(1), 1.0)
    return experts * (jax.lax.stop_gradient(load) * mean).sum(-1).mean()


def importance(probs: Float[Array, "T E"], mask: Bool[Array, " T"]) -> Scalar:
    """Squared coefficient of variation of the experts' summed probabilities: 0 at uniform, E - 1 when collapsed on one.

    Shazeer et al. (2017). Written var / mean^2: the gradient of (std / mean)^2 is NaN at perfect balance.
    """
    total = jnp.where(mask[:, None], probs, 0.0).sum(0)
    return total.var() / jnp.maximum(total.mean(), 1e-9) ** 2


def z(scores: Float[Array, "T E"], mask: Bool[Array, " T"]) -> Scalar:
    """Mean squared log-partition of the scores, logsumexp(s)^2: (ln E)^2 for scores of 0 (Zoph et al. 2022)."""
    return _mean(jax.nn.logsumexp(scores, axis=1) ** 2, mask)


def entropy(probs: Float[Array, "T E"], mask: Bool[Array, " T"]) -> Scalar:
    """Mean entropy of a token's probabilities in nats: ln E at uniform, 0 when certain. A positive coefficient sharpens."""
    # xlogy has an infinite derivative at 0; the floor keeps certain routers finite and changes nothing visible.
    return _mean(-xlogy(probs, jnp.maximum(probs, 1e-30)).sum(1), mask)


def auxiliary(
    routing: Routing | SoftRouting,
    coefficients: dict[str, float],
    *,
    learned: Bool[Array, ""] | bool = True,
    mask: Bool[Array, " T"] | None = None,
    groups: int = 1,
    balance_of: str = "probabilities",
) -> tuple[Scalar, dict[str, Scalar]]:
    """The weighted sum of the losses named in `coefficients`, and each unweighted.

    `balance_of` scores puts mean scores in the place of mean probabilities (the released code of Chen et al. 2022).
    `learned` is traced: False makes the sum 0, so a frozen, hash or oracle router contributes neither value nor gradient.
    """
    scores = routing.scores
    load = load_of(routing, mask, groups)
    mask = jnp.ones(len(scores), bool) if mask is None else mask
    probs = jax.nn.softmax(scores)
    values = {
        "balance": balance(scores if balance_of == "scores" else probs, load, mask),
        "importance": importance(probs, mask),
        "z": z(scores, mask),
        "entropy": entropy(probs, mask),
    }
    total = sum((coefficients[name] * values[name] for name in coefficients), jnp.float32(0))
    return jnp.where(learned, total, 0.0), values


def _mean(values: Float[Array, " T"], mask: Bool[Array, " T"]) -> Scalar:
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1)
