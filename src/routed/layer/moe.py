"""The Mixture-of-Experts layer: router, noise, selection, dispatch and experts joined in one Flax module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import logging as log
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from routed.contracts import Contest, Places, Routing, SoftRouting
from routed.layer import competition, dispatch
from routed.layer.model_rules import scaled_inputs
from routed.layer.rule import Rule
from routed.layer.selection import SELECTIONS, capacity, select
from routed.metrics import load
from routed.routers.noise import NOISES, ScoreNoise
from routed.settings.tree import from_flat
from routed.system.platform import platform

#: The collection of what a comparison does to a layer from outside: `sharpness`, a factor on the scores of any router.
CONTROL = "control"


def over_experts(params: Any) -> Any:
    """Names the leading axis of every leaf `expert`, as Flax metadata that `nn.get_partition_spec` and `nn.scan` read."""
    return jax.tree.map(lambda a: nn.LogicallyPartitioned(a, ("expert", *[None] * (a.ndim - 1))), params)


class Toss(NamedTuple):
    """Does a layer compete; its scores, of inputs that get no gradient; those that the contest teaches; and a key for its draws."""

    held: Bool[Array, ""]
    heard: Float[Array, "T E"]
    taught: Float[Array, "T E"]
    key: Any


class MoE(nn.Module):
    """y = sum_e w_e(x) f_e(x); returns y and the routing that produced it.

    Parameters are `router` and `experts`; every leaf of `experts` has a leading logical axis `expert` (Flax metadata:
    `nn.get_partition_spec`, `nn.meta.unbox`), and expert e is initialised with a key folded from e, so 8 experts are a
    prefix of 16. The router scores the tokens, or what `routed_by` says of them; keyword context is passed on to it.

    A router may hold variables of its own collections, which move in calls in which these are mutable, and the collection
    `control` may hold a `sharpness` that multiplies the scores. Noise needs the random stream `noise` (none without it). With `balance_rate` the collection `balance` holds a bias per
    expert that only chooses; each call in which the collection is mutable moves it by that rate towards equal load
    (auxiliary-loss-free balancing, Wang et al. 2024).

    Raises:
      TypeError: a dispatch that cannot serve the selection, or the mesh; it names one that can.
    """

    router: nn.Module
    expert: nn.Module
    num_experts: int
    rule: Rule
    dispatch: str = "auto"
    noise: str = "none"
    noise_scale: float = 1.0
    noise_in_weights: bool = False
    balance_rate: float = 0.0
    dtype: Any = None  # of the experts' inputs and weights; None: as they are. Scores are float32 always
    shared: nn.Module | None = (
        None  # an expert of every token, of weight 1 (DeepSeek, Llama 4); its parameters are `shared`
    )
    weigh_inputs: bool = False  # the weight scales the input of a token's one expert, not its output (Llama 4)
    mesh: Mesh | None = None  # with axes `data` and `expert`: experts are shared out over the latter

    def __post_init__(self):
        settings = SELECTIONS[self.rule.name].settings
        if self.rule.own is None and settings:  # a rule that no config made: its own settings at their defaults
            self.rule = self.rule._replace(own=from_flat({name: one.default for name, one in settings.items()}))
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "T ..."],
        *,
        mask: Bool[Array, " T"] | None = None,
        routed_by: Float[Array, "T ..."] | None = None,
        **context,
    ) -> tuple[Float[Array, "T O"], Routing | SoftRouting]:
        contested = SELECTIONS[self.rule.name].contested
        toss = self._tossed(x if routed_by is None else routed_by, context) if contested else None
        routing = self._route(x if routed_by is None else routed_by, mask, context, toss)
        common = 0.0 if self.shared is None else self.shared(x)
        if self.weigh_inputs or SELECTIONS[self.rule.name].weighs_inputs:
            x, routing = scaled_inputs(x, routing, self.rule.name)
        expert = self.expert.clone(parent=None)  # unbound: its parameters are stacked and held here

        params = self.param("experts", partial(_initialise, expert, self.num_experts, x[:1]))
        if self.dtype is not None:
            x, params = jax.tree.map(lambda a: a.astype(self.dtype), (x, params))
        places = Places(
            group_size=self.rule.group_size or len(x),
            capacity=capacity(self.rule, self.rule.group_size or len(x), self.num_experts),
        )

        run = partial(_apply, expert)
        if toss is not None:
            y, routing = self._contested(run, params, x, mask, routing, places, toss)
            return common + y, routing
        return common + self._dispatched(run, params, x, routing, places), routing

    def _dispatched(self, run, params, x, routing, places) -> Float[Array, "T O"]:
        chosen = dispatch.DISPATCHES[self._dispatch(x, params, places)].run
        if self.mesh is None or isinstance(routing, SoftRouting):
            return chosen(run, params, x, routing, places)
        return dispatch.parallel(chosen, run, params, x, routing, places, self.mesh)

    def _tossed(self, x, context) -> Toss:
        """Whether a layer competes; without random numbers, as at an evaluation, it does."""
        key = self.make_rng("noise") if self.has_rng("noise") else None
        coin, draws = jax.random.split(key) if key is not None else (None, None)
        took_part = jnp.array(True) if coin is None else competition.held(self.rule, coin, context.get("step", 0))
        heard = self._scores(jax.lax.stop_gradient(x), context)
        return Toss(took_part, heard, self._scores(x, context) if self.rule.own.distil_trunk else heard, draws)

    def _contested(self, run, params, x, mask, routing, places, toss: Toss) -> tuple[Float[Array, "T O"], Routing]:
        """The layer where its experts may compete."""
        took_part, _, scores, draws = toss
        pick = partial(self._select(), mask=mask)
        if self.mesh is None and competition.is_elected(self.rule) and self._dispatch(x, params, places) == "ragged":
            outputs, routing, norms = competition.elected(
                self.rule,
                pick,
                lambda: dispatch.one_by_one(run, *jax.lax.stop_gradient((params, x)), competition.norms_of),
                partial(dispatch.sorted_outputs, run, params, x),
                routing,
                took_part,
                draws,
                mask,
            )
            y = outputs.combined(routing.weight, len(x))
            return y, routing._replace(contest=Contest(took_part, scores, norms, mask))

        def compete():
            if self.mesh is None:
                outputs, combined = jax.vmap(run, in_axes=(0, None))(params, x), dispatch.combined
            else:
                outputs = dispatch.parallel_outputs(run, self.mesh, params, x)
                combined = partial(dispatch.parallel_combined, self.mesh)
            return competition.contest(self.rule, pick, combined, outputs, routing, draws, mask)

        def route():
            return self._dispatched(run, params, x, routing, places), routing, jnp.zeros_like(scores)

        y, routing, norms = jax.lax.cond(took_part, jax.checkpoint(compete), route)
        return y, routing._replace(contest=Contest(took_part, scores, norms, mask))

    def _route(self, x, mask, context, toss: Toss | None) -> Routing | SoftRouting:
        routed_input = x
        noise = NOISES[self.noise]
        if noise.on_input is not None and self.has_rng("noise"):
            routed_input = noise.on_input(self.make_rng("noise"), x, self.noise_scale)
        scores = self._scores(routed_input, context)
        preference = scores
        if noise.draw is not None:
            preference = scores + ScoreNoise(
                noise.draw, self.noise_scale, self.num_experts, noise.learned, name="noise"
            )(x)
        plain = weighing = preference if self.noise_in_weights else scores
        if toss is not None and not self.rule.own.forward:
            weighing = competition.weighed(self.rule, toss.held, plain, toss.heard)
        pick = self._select()
        if not self.balance_rate:
            # Auxiliary losses hear of the scores as they are.
            return pick(weighing, preference=preference, mask=mask)._replace(scores=plain)
        bias = self.variable("balance", "bias", jnp.zeros, self.num_experts)
        routing = pick(weighing, preference=preference, mask=mask, bias=bias.value)
        if self.is_mutable_collection("balance") and not self.is_initializing():
            bias.value = load.rebalanced(bias.value, load.load_of(routing, mask)[0], self.balance_rate)
        return routing._replace(scores=plain)

    def _scores(self, x, context) -> Float[Array, "T E"]:
        scores = self.router(x, **context)
        return scores * self.get_variable(CONTROL, "sharpness") if self.has_variable(CONTROL, "sharpness") else scores

    def _select(self) -> Callable[..., Routing | SoftRouting]:
        if self.mesh is None:
            return partial(select, self.rule)
        return partial(dispatch.parallel_select, self.rule, self.mesh)

    def _dispatch(self, x, params, places: Places) -> str:
        devices = 1 if self.mesh is None else self.mesh.size
        apart = self.mesh is not None and self.mesh.shape[dispatch.EXPERT] > 1 and SELECTIONS[self.rule.name].sparse
        if self.dispatch != dispatch.AUTO:
            if reason := dispatch.misfit(self.dispatch, self.rule.name):
                raise TypeError(reason)
            if apart and not dispatch.DISPATCHES[self.dispatch].exchanged:
                raise TypeError(f"dispatch {self.dispatch!r} cannot share experts over a mesh; use 'slots' or 'auto'")
            return self.dispatch
        if apart:
            return next(name for name, one in dispatch.DISPATCHES.items() if one.exchanged)
        name, reason = dispatch.choose(
            self.rule.name,
            len(x) // devices,
            self.rule.k,
            self.num_experts,
            not self.rule.capacity_factor,
            platform(),
            taken=self.num_experts * places.capacity / places.group_size,
            width=sum(leaf.size for leaf in jax.tree.leaves(params)) / self.num_experts / x[0].size,
        )
        tell_choice(name, reason)
        return name


@functools.cache
def tell_choice(name: str, reason: str) -> None:
    """Says once of each dispatch why `auto` is it: training and evaluations may have another."""
    log.info("dispatch auto is %s: %s", name, reason)


def _initialise(expert: nn.Module, experts: int, token: Float[Array, "1 ..."], key):
    """Parameters of so many experts, each drawn with the key folded from its number."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(experts))
    return over_experts(jax.vmap(lambda key: expert.init(key, token)["params"])(keys))


def _apply(expert: nn.Module, params: Any, tokens: Any) -> Any:
    return expert.apply({"params": params}, tokens)
