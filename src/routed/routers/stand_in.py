"""Routers that learn until a step, from which on another decides: surgery on a model of one's own, during its training.

What takes the learned router's place are controls that `routed trace surgery` has for models trained elsewhere, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.routers.features import Flat
from routed.routers.fixed import RandomRouter, check_table
from routed.routers.product import ProductRouter
from routed.routers.router import Router, kernel_from_clusters, kernel_from_examples, scale_kernel
from routed.routers.sharpness import sharpness_for
from routed.settings.setting import refuse

#: The collection of what a stand-in learns of the router whose place it takes: it moves in training.
STAND_IN = "stand_in"
#: The least load of an expert in a table, so that its logarithm is finite.
LEAST = 1e-6


class StandInRouter(nn.Module):
    """The linear router in steps before `replaced_at`, and a stand-in from there on, in evaluations too.

    Parameters are the linear router's, so is their initial draw. Subclasses say what stands in, and may watch the router while it
    learns. Scores of a stand-in that is `sharpened` are multiplied so that on the last batch before the step the mean entropy of
    their softmax is that of the router's.
    """

    linear: ProductRouter
    replaced_at: int
    num_experts: int

    sharpened = True

    def setup(self):
        nn.share_scope(self, self.linear)
        if self.sharpened:
            self.factor = self.variable(STAND_IN, "factor", lambda: jnp.float32(1))
        self.prepare()

    def prepare(self) -> None:
        """Variables of the stand-in."""

    def __call__(self, x: Float[Array, "T ..."], *, step: Int[Array, ""] | int = 0, **context) -> Float[Array, "T E"]:
        scores = self.linear(x, **context)
        if self.sharpened and self.is_mutable_collection(STAND_IN) and not self.is_initializing():
            self._follow(jax.lax.stop_gradient(scores), x, step, context)
        other = self.stand_in(scores, x, context) * (self.factor.value if self.sharpened else 1)
        return jnp.where(step < self.replaced_at, scores, other)

    def _follow(self, scores, x, step, context) -> None:
        """Moves what the stand-in has of the router: in a training step."""
        self.watch(scores, step < self.replaced_at, context)
        probs = jax.nn.softmax(scores)
        entropy = -jax.scipy.special.xlogy(probs, probs).sum(-1).mean()
        self.factor.value = jax.lax.cond(
            step == self.replaced_at - 1,
            lambda other: sharpness_for(other, entropy),
            lambda other: self.factor.value,
            self.stand_in(scores, x, context),
        )

    def watch(self, scores: Float[Array, "T E"], learning: Any, context: dict[str, Any]) -> None:
        """What is kept of the router's scores of a training batch."""

    def stand_in(self, scores: Float[Array, "T E"], x: Any, context: dict[str, Any]) -> Float[Array, "T E"]:
        """Its scores of tokens that the router scores so."""
        raise NotImplementedError


class ShuffledRouter(StandInRouter):
    """Expert e gets the score of expert e - 1: the learned partition, dealt to other experts, of which none keeps its own."""

    sharpened = False

    def stand_in(self, scores, x, context):
        return jnp.roll(scores, 1, axis=1)


class NoiseRouter(StandInRouter):
    """Scores N(0, 1) by a token's bits: they know nothing of it, and are the same wherever it comes."""

    def stand_in(self, scores, x, context):
        return RandomRouter(self.num_experts, anew=False, parent=None).apply({}, x)


class TableRouter(StandInRouter):
    """By token id: log(n(id, e) + load of e), n the choices of the learned router for that id in training; unseen ids have the loads alone."""

    choices: int = 1
    vocabulary: int = 0

    def prepare(self):
        self.counts = self.variable(STAND_IN, "counts", jnp.zeros, (self.vocabulary, self.num_experts))

    def watch(self, scores, learning, context):
        chosen = jax.lax.top_k(scores, self.choices)[1]
        more = self.counts.value.at[context["token_id"][:, None], chosen].add(1.0)
        self.counts.value = jnp.where(learning, more, self.counts.value)

    def stand_in(self, scores, x, context):
        counts = self.counts.value
        load = jnp.maximum(counts.sum(0) / jnp.maximum(counts.sum(), 1), LEAST)
        return jnp.log(counts[context["token_id"]] + load[None])


def check_step(config: ConfigDict) -> None:
    """Refuses a step that no run reaches, or before which nothing has been learned."""
    if not 0 < config.router.replaced_at < config.steps:
        refuse("router.replaced_at", config.router.replaced_at, f"must be in 1 to steps - 1 = {config.steps - 1}")


def _check_table(config: ConfigDict) -> None:
    check_step(config)
    check_table(config)


def _router(
    make: Callable[[Any, int, ProductRouter], nn.Module],
    needs: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    check: Callable[[ConfigDict], None] = check_step,
) -> Router:
    """A router that is linear until a step."""
    return Router(
        lambda own, experts: make(own, experts, ProductRouter(experts, Flat(), own.bias, own.measure)),
        tokens=("rows", "hidden"),
        needs=needs,
        scale=scale_kernel,
        from_examples=kernel_from_examples,
        from_clusters=kernel_from_clusters,
        reads=("bias", "measure", "replaced_at", *reads),
        check=check,
    )


#: name -> router.
STAND_INS: dict[str, Router] = {
    "then_shuffled": _router(lambda own, experts, linear: ShuffledRouter(linear, own.replaced_at, experts)),
    "then_noise": _router(lambda own, experts, linear: NoiseRouter(linear, own.replaced_at, experts)),
    "then_table": _router(
        lambda own, experts, linear: TableRouter(linear, own.replaced_at, experts, own.choices, own.vocabulary),
        needs=("token_id",),
        reads=("choices", "vocabulary"),
        check=_check_table,
    ),
}
