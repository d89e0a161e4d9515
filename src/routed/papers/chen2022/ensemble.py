"""An ensemble without a router: each expert of a mixture trains alone on every sample; evaluation takes the mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed.experts import EXPERTS
from routed.layer.dispatch import alone
from routed.models.model import Model, ModelPart, Outputs
from routed.settings.tree import node_of
from routed.tasks import TASKS


def ensemble(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds the ensemble of E experts.

    Predictions in training are the logits of all members, one member after another [E B, O]; at evaluation the
    logarithm of the members' mean probability [B, O]. Members differ in their initial weights only: expert e starts as
    expert e of the mixture. The loss is the mean over members, so a member's gradient is 1 / E of the gradient of a
    single model; normalised gradients (`optimizer.normalise`) undo the factor.
    """
    del mesh
    count = config.experts.count
    member = EXPERTS[config.experts.name].make(node_of(config).experts, TASKS[config.data.name].outputs(config.data))

    def init(key, batch):
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))
        return {"router": {}, "experts": jax.vmap(lambda k: member.init(k, batch.tokens[:1])["params"])(keys)}, {}

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        del rule, dispatch, step

        def logits_of(member_params):
            return alone(lambda params, x: member.apply({"params": params}, x), member_params, batch.tokens)

        logits = jax.lax.map(logits_of, params["experts"])
        if key is not None:
            return Outputs(logits.reshape(-1, logits.shape[-1]), {}, state)
        mean = jax.nn.logsumexp(jax.nn.log_softmax(logits), axis=0) - jnp.log(count)
        return Outputs(mean, {}, state)

    return Model(init, apply)


#: All experts compute every sample, each expert with its own loss.
ENSEMBLE = ModelPart(
    ensemble,
    every=True,
    targets=("class",),
    uses=("experts.name",),
    reads=("experts.count", "experts.learning_rate"),
)
