"""Optimisers of parameters in groups, each group with a learning rate of its own; freezing is a traced flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.settings.setting import FRACTION, POSITIVE, Setting, accept, at_least, refuse
from routed.settings.tree import value_of

#: group -> the setting that is its learning rate. The group `fixed` has none: it is never trained.
RATES = {
    "router": "router.learning_rate",
    "experts": "experts.learning_rate",
    "trunk": "transformer.learning_rate",
    "head": "transformer.learning_rate",
}


class Optimiser(NamedTuple):
    """The direction of a step, from the config node `optimizer`; rates, decay and schedules come after it.

    A `factored` one keeps second moments by rows and columns of the two largest axes of a tensor.
    """

    direction: Callable[[Any], optax.GradientTransformation]
    factored: bool = False
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


#: The size from which `optax.scale_by_factored_rms` factors the two largest axes of a leaf: its default.
FACTORED = 128


def refuse_factored_experts(config: ConfigDict) -> None:
    """Raises if the axis of experts of a model is long enough to be factored: experts would share second moments.

    Raises:
      UserError: names the optimiser, and the number of experts.
    """
    if OPTIMISERS[config.optimizer.name].factored and config.experts.count >= FACTORED:
        refuse(
            "optimizer.name",
            config.optimizer.name,
            f"factors axes of {FACTORED} and more, and experts.count={config.experts.count} is one; use 'adam', or"
            " fewer experts",
        )


#: name -> optimiser. Adafactor without its own steps relative to the parameters' scale: its second moments are
#: factored, for each layer and expert, its updates clipped at 1 (root mean square of a leaf: of all layers and
#: experts that are stacked in it).
OPTIMISERS: dict[str, Optimiser] = {
    "sgd": Optimiser(
        lambda settings: optax.trace(settings.momentum),
        settings={"momentum": Setting(0.9, "of the gradient", FRACTION)},
    ),
    "adam": Optimiser(
        lambda settings: optax.scale_by_adam(settings.b1, settings.b2, settings.eps),
        settings={
            "b1": Setting(0.9, "decay of the first moment", FRACTION),
            "b2": Setting(0.999, "decay of the second moment", FRACTION),
            "eps": Setting(1e-8, "added to the root of the second moment", POSITIVE),
        },
    ),
    "adafactor": Optimiser(
        lambda settings: optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED), optax.clip_by_block_rms(1.0)
        ),
        factored=True,
    ),
}


class Schedule(NamedTuple):
    """Rates over the steps, after `optimizer.warmup` steps in which they grow linearly from 0.

    `factor(step, warmup, steps)` multiplies all rates; steps count from 0, and `warmup` is at least 1. None: they stay.
    """

    factor: Callable[[Int[Array, ""], int, int], Float[Array, ""]] | None = None
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


#: name -> schedule. Linear and cosine (Loshchilov and Hutter 2017): 0 after the last step, so that step still learns;
#: rsqrt: the Transformer's (Vaswani et al. 2017), which is T5's after the warm-up, through which T5 holds the rate.
SCHEDULES: dict[str, Schedule] = {
    "constant": Schedule(),
    "linear": Schedule(lambda step, warmup, steps: jnp.clip((steps - step) / max(steps - warmup, 1), 0.0, 1.0)),
    "cosine": Schedule(
        lambda step, warmup, steps: (
            0.5 + 0.5 * jnp.cos(jnp.pi * jnp.clip((step - warmup) / max(steps - warmup, 1), 0.0, 1.0))
        )
    ),
    "rsqrt": Schedule(lambda step, warmup, steps: jnp.sqrt(warmup / jnp.maximum(step + 1, warmup))),
}


class Normalisation(NamedTuple):
    """The divisor of an expert's gradient: one norm from its tensors, or each tensor's own (`joint` is None)."""

    divides: bool = True
    joint: Callable[[Any], Any] | None = None
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


#: name -> normalisation: none; expert: by the expert's norm; expert_sum: by the sum of its tensors' norms; tensor.
NORMALISATIONS: dict[str, Normalisation] = {
    "none": Normalisation(divides=False),
    "expert": Normalisation(joint=lambda norms: jnp.sqrt(sum(norm**2 for norm in norms))),
    "expert_sum": Normalisation(joint=sum),
    "tensor": Normalisation(),
}

#: Settings of the node `optimizer` that every optimiser reads.
SHARED: dict[str, Setting] = {
    "weight_decay": Setting(
        0.0, "decoupled: times the learning rate; on every group that is trained", at_least(0), traced=True
    ),
    "l2": Setting(0.0, "coupled weight decay: times the weights, added to the gradient", at_least(0)),
    "rate_scale": Setting(1.0, "times all learning rates", POSITIVE, traced=True),
    "warmup": Setting(0, "steps in which the rates grow linearly from 0; the schedule comes after them", at_least(0)),
    "clip": Setting(
        0.0, "largest global norm of the gradient, without the router's where it is frozen; 0: none", at_least(0)
    ),
}


def optimiser(
    config: Any,
    params: Mapping[str, Any],
    normalisation: Normalisation = NORMALISATIONS["none"],
    router_decays: bool = True,
) -> optax.GradientTransformation:
    """Returns the optimiser of a config for the groups of `params`, with a rate for each; rates are traced.

    Weight decay is decoupled (AdamW's order: p -= rate (direction + decay p)). A gradient is clipped by the norm over
    all groups. A router whose parameters no gradient trains must not decay: its parameters are its choices.
    """
    settings = config.optimizer

    def group(name: str) -> optax.GradientTransformation:
        if name not in RATES or not jax.tree.leaves(params[name]):
            return optax.set_to_zero()
        # Normalised before l2 is added, as momentum and decay come after the gradient.
        before = [normalised(normalisation)] if name == "experts" and normalisation.divides else []
        rate, decays = value_of(config, RATES[name]), name != "router" or router_decays
        return optax.chain(
            *before,
            *([optax.add_decayed_weights(settings.l2 if decays else 0.0)] if settings.l2 else []),
            OPTIMISERS[settings.name].direction(settings),
            optax.add_decayed_weights(settings.weight_decay if decays else 0.0),
            optax.scale(-rate * settings.rate_scale),
        )

    def schedule(step):
        warmup = max(settings.warmup, 1)
        warmed, factor = jnp.minimum(1.0, (step + 1) / warmup), SCHEDULES[settings.schedule].factor
        return warmed if factor is None else warmed * factor(step, warmup, config.steps)

    scheduled = settings.warmup or SCHEDULES[settings.schedule].factor is not None
    return optax.chain(
        *([optax.clip_by_global_norm(settings.clip)] if settings.clip else []),
        optax.multi_transform({name: group(name) for name in params}, {name: name for name in params}),
        *([optax.scale_by_schedule(schedule)] if scheduled else []),
    )


def normalised(by: Normalisation) -> optax.GradientTransformation:
    """Returns normalised gradient descent for each expert (Chen et al. 2022, Algorithm 1).

    The gradient is divided by its norm. Every leaf has a leading axis of experts. An expert without a gradient (no
    sample) does not move. The released code uses `expert_sum` and `tensor`.
    """

    def divided(gradients, state, params=None):
        leaves, tree = jax.tree.flatten(gradients)
        norms = [jnp.sqrt((leaf.reshape(len(leaf), -1) ** 2).sum(1)) for leaf in leaves]
        over = norms if by.joint is None else [by.joint(norms)] * len(norms)
        scales = [jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1.0), 0.0) for norm in over]
        scaled = [leaf * scale.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf, scale in zip(leaves, scales, strict=True)]
        return tree.unflatten(scaled), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), divided)


def update(
    transform: optax.GradientTransformation,
    params: dict[str, Any],
    grads: dict[str, Any],
    opt_state: Any,
    frozen,
    trained: tuple[str, ...] | None = None,
    keep: Callable[[Any, Any], Any] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Applies one optimiser step; where `frozen`, the router keeps every bit.

    The router's gradient is zeroed first, so that no statistic across parameters (a global norm) includes it, and its
    new value is discarded last, after weight decay. `where`, not a product: 0 x NaN is NaN. Groups outside of
    `trained` (None: all are trained) have neither gradient nor step, and their optimiser state stays. `keep` takes the
    place of `frozen` where layers differ: (old, new) -> new, but old where it is frozen.
    """
    keep = keep or (lambda old, new: jax.tree.map(lambda a, b: jnp.where(frozen, a, b), old, new))
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)  # noqa: E731
    resting = [] if trained is None else [name for name in params if name not in trained]
    grads = grads | {"router": keep(zeros(grads["router"]), grads["router"])}
    grads |= {name: zeros(grads[name]) for name in resting}
    updates, moved = transform.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates)
    new |= {"router": keep(params["router"], new["router"])}
    return new | {name: params[name] for name in resting}, _waiting(opt_state, moved, resting)


def _waiting(old: Any, new: Any, groups: list[str]) -> Any:
    """Returns the optimiser's new state with the old state of some groups."""
    if not groups:
        return new
    return tuple(
        after._replace(inner_states=after.inner_states | {name: before.inner_states[name] for name in groups})
        if hasattr(after, "inner_states")
        else after
        for before, after in zip(old, new, strict=True)
    )
