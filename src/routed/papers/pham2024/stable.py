"""StableMoE's router: it is taught to a table of token ids, which then decides."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar
from ml_collections import ConfigDict

from routed.contracts.ties import highest
from routed.kernels.matmul import matmul
from routed.routers import Router
from routed.routers.fixed import CERTAIN, check_table
from routed.settings.setting import COEFFICIENT, Setting, at_least, refuse

#: Of experts' embeddings, whose rows start orthogonal (released code of Dai et al. 2022).
GAIN = 0.1
#: A chosen expert's score is at least this: its sigmoid is above that of all others in float32.
LEAST = -80.0


class StableRouter(nn.Module):
    """StableMoE's router (Dai et al. 2022): it learns and teaches a router of token ids, which then decides for good.

    Before step `teach_steps` scores are x W, and two losses train the router. The first is `distillation_coefficient`
    times the cross-entropy of a student (embeddings of token ids, [V, token_dim], times those of experts) against the
    `choices` highest scores. The second is `balance_coefficient` times sum_e (n_e / n - 1) sigmoid(score_e) over a
    token's experts, mean over tokens, where n_e of T tokens choose e and n is their mean. From then on a token's
    experts are those of its id in a table of what the student said at the last of those steps, bit for bit. Other
    experts score -1e4; these score what W, which learns on, says of x.
    Evaluations go by their step.
    """

    num_experts: int
    vocabulary: int
    choices: int
    teach_steps: int
    token_dim: int
    distillation_coefficient: float
    balance_coefficient: float

    @nn.compact
    def __call__(
        self, x: Float[Array, "T D"], *, token_id: Int[Array, " T"], step: Int[Array, ""] | int = 0, **context
    ) -> Float[Array, "T E"]:
        scores = matmul(x.astype(jnp.float32), self.param("kernel", _experts, x.shape[-1], self.num_experts))
        embeddings = self.param("words", nn.initializers.normal(1.0), (self.vocabulary, self.token_dim))
        student = embeddings @ self.param("word_kernel", _experts, self.token_dim, self.num_experts)
        table = self.variable("token_table", "experts", lambda: highest(jax.lax.stop_gradient(student), self.choices))
        objective = self.variable("objective", "value", lambda: jnp.float32(0))
        teaching = step < self.teach_steps
        if self.is_mutable_collection("objective"):  # training
            chosen = highest(jax.lax.stop_gradient(scores), self.choices)
            loss = self.distillation_coefficient * taught(student[token_id], chosen)
            loss += self.balance_coefficient * unevenness(scores, chosen)
            objective.value = jnp.where(teaching, loss, 0.0)
            table.value = jnp.where(teaching, highest(jax.lax.stop_gradient(student), self.choices), table.value)
        named = jax.nn.one_hot(table.value[token_id], self.num_experts).sum(1) > 0
        return jnp.where(teaching, scores, jnp.where(named, jnp.maximum(scores, LEAST), -CERTAIN))


def taught(student: Float[Array, "T E"], chosen: Int[Array, "T k"]) -> Scalar:
    """Returns the cross-entropy of the student's softmax against the chosen experts, mean over tokens and experts."""
    return -jnp.take_along_axis(jax.nn.log_softmax(student), chosen, axis=1).mean()


def unevenness(scores: Float[Array, "T E"], chosen: Int[Array, "T k"]) -> Scalar:
    """Returns the mean over tokens of sum_e (n_e / n - 1) sigmoid(s_e) over a token's experts; n_e has no gradient."""
    tokens, experts = scores.shape
    load = jnp.zeros(experts).at[chosen.reshape(-1)].add(experts / chosen.size)
    return ((load[chosen] - 1) * jax.nn.sigmoid(jnp.take_along_axis(scores, chosen, axis=1))).sum() / tokens


def _experts(key: PRNGKeyArray, dim: int, experts: int) -> Float[Array, "D E"]:
    return nn.initializers.orthogonal(GAIN)(key, (dim, experts))


def check_stable(config: ConfigDict) -> None:
    """Refuses a table that is not that of the text and of the selection, and teaching that never ends."""
    check_table(config)
    if config.router.teach_steps > config.steps:
        refuse("router.teach_steps", config.router.teach_steps, f"must be at most steps={config.steps}")


STABLE = Router(
    lambda node, experts: StableRouter(
        experts,
        node.vocabulary,
        node.experts_per_id,
        node.teach_steps,
        node.token_dim,
        node.distillation_coefficient,
        node.balance_coefficient,
    ),
    tokens=("hidden",),
    needs=("token_id",),
    settings={
        "teach_steps": Setting(
            400,
            "steps in which scores choose and a router of token ids learns it, which then chooses for good",
            at_least(0),
        ),
        "token_dim": Setting(50, "dimensions of the token ids' embeddings", at_least(1)),
        "distillation_coefficient": Setting(
            0.3, "coefficient of what the router of token ids learns, summed over layers", COEFFICIENT
        ),
        "balance_coefficient": Setting(0.3, "coefficient of its loss of uneven load, summed over layers", COEFFICIENT),
    },
    reads=("experts_per_id", "vocabulary"),
    check=check_stable,
)
