"""One training step as a pure function, with freezing as a traced flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


def optimiser(config: ConfigDict, settings) -> optax.GradientTransformation:
    """SGD with momentum, Adam or Adafactor, with rates of their own for router and experts, all traced.

    Weight decay is decoupled (AdamW's order: p -= rate (direction + decay p)) and applies to both groups. Adafactor without
    its own steps relative to the parameters' scale; its second moments are factored, its updates clipped at 1 (root mean
    square). A clipped gradient is clipped by the norm over both groups.
    """
    o = config.optimizer

    def direction():
        if o.name == "adafactor":
            return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
        return optax.trace(o.momentum) if o.name == "sgd" else optax.scale_by_adam(o.b1, o.b2, o.eps)

    def schedule(step):
        warmup = max(o.warmup, 1)
        warmed = jnp.minimum(1.0, (step + 1) / warmup)
        if o.schedule == "linear":  # 0 after the last step, so that step still learns
            return warmed * jnp.clip((config.steps - step) / max(config.steps - warmup, 1), 0.0, 1.0)
        return warmed * jnp.sqrt(warmup / jnp.maximum(step + 1, warmup)) if o.schedule == "rsqrt" else warmed

    def group(rate, before):
        parts = [
            *before,
            *([optax.add_decayed_weights(o.l2)] if o.l2 else []),
            direction(),
            optax.add_decayed_weights(settings["optimizer.weight_decay"]),
            optax.scale(-rate * settings["optimizer.rate_scale"]),
        ]
        scheduled = o.warmup or o.schedule != "constant"
        return optax.chain(*parts, *([optax.scale_by_schedule(schedule)] if scheduled else []))

    rates = {"router": settings["router.learning_rate"], "experts": settings["experts.learning_rate"]}
    # Normalised before l2 is added, as momentum and decay come after the gradient.
    before = {"experts": [normalised(o.normalise)] if o.normalise != "none" else [], "router": []}
    parts = {name: group(rate, before[name]) for name, rate in rates.items()}
    groups = optax.multi_transform(parts, {name: name for name in rates})
    return optax.chain(optax.clip_by_global_norm(o.clip), groups) if o.clip else groups


#: name -> the norm that divides a gradient, from the norms of an expert's tensors; None: each tensor's own.
NORMALISED: dict[str, Callable[[Any], Any] | None] = {
    "expert": lambda norms: jnp.sqrt(sum(norm**2 for norm in norms)),
    "expert_sum": sum,
    "tensor": None,
}


def normalised(by: str) -> optax.GradientTransformation:
    """Normalised gradient descent for each expert (Chen et al. 2022, Algorithm 1): its gradient, divided by its Frobenius norm.

    Every leaf has a leading axis of experts. An expert without a gradient (no sample) stays where it is. `expert_sum` and
    `tensor` are what the released code does.
    """

    def divided(gradients, state, params=None):
        del params
        leaves, tree = jax.tree.flatten(gradients)
        norms = [jnp.sqrt((leaf.reshape(len(leaf), -1) ** 2).sum(1)) for leaf in leaves]
        joint = NORMALISED[by]
        over = norms if joint is None else [joint(norms)] * len(norms)
        scales = [jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1.0), 0.0) for norm in over]
        made = [leaf * scale.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf, scale in zip(leaves, scales, strict=True)]
        return tree.unflatten(made), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), divided)


def update(transform: optax.GradientTransformation, params: Any, grads: Any, opt_state: Any, frozen) -> tuple[Any, Any]:
    """Applies one optimiser step; where `frozen`, the router stays bit for bit what it was.

    The router's gradient is zeroed first, so that no statistic across parameters (a global norm) sees it, and its new
    value is discarded last, after weight decay. `where`, not a product: 0 x NaN is NaN.
    """
    keep = lambda old, new: jax.tree.map(lambda a, b: jnp.where(frozen, a, b), old, new)  # noqa: E731
    grads = grads | {"router": keep(jax.tree.map(jnp.zeros_like, grads["router"]), grads["router"])}
    updates, opt_state = transform.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates)
    return new | {"router": keep(params["router"], new["router"])}, opt_state
