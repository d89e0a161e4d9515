"""Auxiliary losses of published models beside those of `auxiliary`; loading the room adds those of one layer to AUXILIARY."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Scalar

from routed.contracts import Routing
from routed.layer.auxiliary import AUXILIARY, Auxiliary, LossInputs, balance
from routed.settings.setting import POSITIVE, Setting, When


def load(
    scores: Float[Array, "T E"], noisy: Float[Array, "T E"], std: float, k: int, mask: Bool[Array, " T"] | None = None
) -> Scalar:
    """Squared variation over experts of the chance that a token chooses them: 0 where all have the same.

    The chance that the score of expert e, with fresh noise N(0, std^2), reaches the k-th highest noisy score of the token:
    1 - Phi((threshold - score) / std), mean over tokens (Shazeer et al. 2017, appendix A, as vmoe has it, for whom it is std^2 / mean^2).
    """
    threshold = jax.lax.top_k(noisy, k)[0][:, -1:]
    chance = 1 - norm.cdf((threshold - scores) / std)
    real = jnp.ones(len(scores), bool) if mask is None else mask
    mean = jnp.where(real[:, None], chance, 0).sum(0) / jnp.maximum(real.sum(), 1)
    return mean.var() / jnp.maximum(mean.mean(), 1e-9) ** 2


def balance_sigmoid(scores: Float[Array, "T E"], load: Float[Array, "groups E"], mask: Bool[Array, " T"]) -> Scalar:
    """E sum_e f_e P_e in every group, P of sigmoid(score) over its sum: with a sequence a group, DeepSeek-V3's sequence-wise loss.

    DeepSeek-AI (2024), equations 17 to 20; mean over the groups of `load`.
    """
    gate = jax.nn.sigmoid(scores)
    return balance(gate / (gate.sum(1, keepdims=True) + 1e-20), load, mask)


def balance_pooled(probs: Float[Array, "L T E"], load: Float[Array, "L E"]) -> Scalar:
    """E sum_e f_e P_e with load and mean probability taken over all layers together, as transformers has it (k times ours).

    Layers that are out of balance in different directions cost nothing here, unlike the mean over layers of `balance`.
    """
    shares = jax.lax.stop_gradient(load).mean(0)
    return load.shape[1] * (shares * probs.mean((0, 1))).sum()


def l1(scores: Float[Array, "T E"], load: Float[Array, "groups E"], mask: Bool[Array, " T"]) -> Scalar:
    """Mean over tokens and experts of the positive scores, each times its expert's load over a fair one: what ReLU gates pay.

    ReMoE's regularisation with balance (Wang et al. 2024, equation 9); loads have no gradient. `model_rules.adapted` moves its coefficient.
    """
    groups, experts = load.shape
    real = jnp.where(mask[:, None], jax.nn.relu(scores), 0.0).reshape(groups, -1, experts)
    count = jnp.maximum(mask.reshape(groups, -1).sum(1), 1)
    return ((experts * jax.lax.stop_gradient(load) * real.sum(1)).sum(1) / (count * experts)).mean()


def _load(inputs: LossInputs) -> Scalar:
    routing, scores = inputs.routing, inputs.routing.scores
    k = max(1, len(routing.token) // len(scores)) if isinstance(routing, Routing) else 1
    return load(scores, jax.lax.stop_gradient(scores), inputs.losses.load_std, min(k, scores.shape[1]), inputs.mask)


def _l1(inputs: LossInputs) -> Scalar:
    routing = inputs.routing
    used = inputs.load
    if isinstance(routing, Routing):  # of what is kept: of ReLU gates every expert is in the list
        groups, experts = inputs.load.shape
        kept = (jax.nn.one_hot(routing.expert, experts) * routing.kept[:, None]).reshape(groups, -1, experts).sum(1)
        used = kept / jnp.maximum(kept.sum(1, keepdims=True), 1e-9)
    return l1(routing.scores, used, inputs.mask)


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
)
AUXILIARY["l1"] = Auxiliary(_l1, "mean positive score, weighted by its expert's load over a fair one (for ReLU gates)")
