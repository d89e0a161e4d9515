"""The Mixture-of-Experts layer: router, noise, selection, dispatch and experts joined in one Flax module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging as log
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from routed.contracts import ExpertFunction, Queues, Routing, SoftRouting, UserError, nearest
from routed.layer import dispatch
from routed.layer.dispatch.parallel import EXCHANGED, EXPERT, group_size_of, parallel, parallel_select
from routed.layer.layer_rules import LayerRules, select_in_layer
from routed.layer.model_rules import scaled_inputs
from routed.layer.rule import QUEUES, SelectionRule
from routed.layer.selection import SELECTIONS, capacity, select
from routed.layer.selection_settings import SHARED
from routed.metrics import load
from routed.routers.noise import NOISES, ScoreNoise
from routed.routers.scores import check_scores, layer_scores
from routed.settings.tree import from_flat
from routed.system.platform import platform

#: Tokens of a caller outside of jit may be NumPy's, as for any Flax module.
AnyArray = Array | np.ndarray

#: The collection of what a measurement does to a layer from outside: `sharpness`, a factor on the scores of any router,
#: `offset`, which is added to the scores, and `choice`, which is added for the choice of experts alone.
CONTROL = "control"


class Tokens(NamedTuple):
    """Tokens of a call: `x` for experts, `scored` for the router; `mask` is False for padding; the router's context."""

    x: Float[Array, "T ..."]
    scored: Float[Array, "T ..."]
    mask: Bool[Array, " T"] | None
    context: dict[str, Any]


class Experts(NamedTuple):
    """All experts of a layer and their tokens: `run` is ONE expert; leaves of `params` lead with the expert axis."""

    run: ExpertFunction
    params: Any
    x: Float[Array, "T ..."]
    queues: Queues


class MoE(nn.Module):
    """y = sum_e w_e(x) f_e(x); returns y and the routing that produced it.

    Parameters are `router` and `experts`; every leaf of `experts` has a leading logical axis `expert` (Flax metadata:
    `nn.get_partition_spec`, `nn.meta.unbox`), and expert e is initialised with a key folded from e, so 8 experts are a
    prefix of 16. The router scores the tokens, or `routed_by` in their place; keyword context is passed on to it.

    A router may hold variables of its own collections, which move in calls in which these are mutable, and the
    collection `control` may change the scores (`CONTROL`). Noise needs the random stream `noise` (none without it).
    With `balance_rate` the collection `balance` holds a bias per expert that only chooses; each call in which the
    collection is mutable moves the bias by that rate towards equal load (auxiliary-loss-free balancing, Wang et al.
    2024). A selection may bring a forward of its own (`Selection.forward`), which calls the methods below.

    Raises:
      UserError: no such rule or dispatch, an impossible k or capacity, or tokens or a mask of another shape.
      TypeError: a dispatch that cannot serve the selection, or the mesh; it names one that can.
    """

    router: nn.Module | Callable[..., Array]
    expert: nn.Module
    num_experts: int
    rule: SelectionRule
    dispatch: str = "auto"
    noise: str = "none"
    noise_scale: float = 1.0
    noise_in_weights: bool = False
    balance_rate: float = 0.0
    dtype: Any = None  # of experts' inputs and weights (a shared one's output); None: as they are. Scores are float32
    shared: nn.Module | None = None  # an expert of every token, of weight 1 (DeepSeek, Llama 4)
    mesh: Mesh | None = None  # with axes `data` and `expert`: experts are shared out over the latter
    layer_rules: LayerRules | None = None  # of the layers of a scan; the context has the number `layer` then

    def __post_init__(self):
        check_layer(self.rule, self.num_experts, self.dispatch, self.noise, self.noise_in_weights)
        selection, given = SELECTIONS[self.rule.name], self.rule.settings or {}
        if selection.settings and isinstance(given, Mapping):  # a rule that no config made has the defaults
            defaults = {name: setting.default for name, setting in selection.settings.items()}
            self.rule = self.rule._replace(settings=from_flat(defaults | dict(given)))
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Float[AnyArray, "T ..."],
        *,
        mask: Bool[AnyArray, " T"] | None = None,
        routed_by: Float[AnyArray, "T ..."] | None = None,
        **context,
    ) -> tuple[Float[Array, "T O"], Routing | SoftRouting]:
        tokens = jnp.asarray(x)
        _check_tokens(self.expert, tokens)
        scored = tokens if routed_by is None else jnp.asarray(routed_by)
        forward = SELECTIONS[self.rule.name].forward or route_and_dispatch
        common = None if self.shared is None else self.shared(tokens)
        real = None if mask is None else jnp.asarray(mask)
        if len(scored) != len(tokens) or (real is not None and real.shape != tokens.shape[:1]):
            raise UserError(f"tokens {[*tokens.shape]}: `mask` is [T], and `routed_by` [T, ...], of the same T tokens")
        y, routing = forward(self, Tokens(tokens, scored, real, context))
        return y if common is None else common.astype(self.dtype or common.dtype) + y, routing

    def scores(self, x: Float[Array, "T ..."], context: dict[str, Any], moves: bool = True) -> Float[Array, "T E"]:
        """Returns scores times the sharpness, plus the offset, without noise; `moves` the router's state, or not."""
        router: Callable[..., Array] = self.router
        if not moves and isinstance(self.router, nn.Module) and not self.is_initializing():
            alone, variables = self.router.unbind()
            router = partial(alone.apply, variables)  # type: ignore[assignment]

        def checked(x: Array, **context) -> Array:
            scores = router(x, **context)
            check_scores(scores, x.shape, self.num_experts, type(self.router).__name__)
            return scores.astype(jnp.float32)

        return self.moved(layer_scores(checked, x, context, self.get_variable(CONTROL, "sharpness")), "offset")

    def moved(self, scores: Float[Array, "T E"], name: str) -> Float[Array, "T E"]:
        """Returns the scores plus the variable of that name in the collection `control`, if any."""
        added: Array | None = self.get_variable(CONTROL, name)
        return scores if added is None else scores + added

    def route(self, tokens: Tokens, reweigh: Callable[[Array], Array] | None = None) -> Routing | SoftRouting:
        """Routes the tokens; `reweigh` changes the scores that weights are made of."""
        scored, noise = tokens.scored, NOISES[self.noise]
        if noise.on_input is not None and self.has_rng("noise"):
            scored = noise.on_input(self.make_rng("noise"), scored, self.noise_scale)
        preference = scores = self.scores(scored, tokens.context)
        if noise.draw is not None:
            drawn = ScoreNoise(noise.draw, self.noise_scale, self.num_experts, noise.learned, name="noise")
            preference = scores + drawn(tokens.scored)
        plain = preference if self.noise_in_weights else scores
        weighing = plain if reweigh is None else reweigh(plain)
        preference = self.moved(preference, "choice")
        layer, rules = tokens.context.get("layer"), self.layer_rules
        pick = partial(self.select, weighing, layer=layer, preference=preference, mask=tokens.mask)
        rates = [self.balance_rate if rate is None else rate for rate in (rules.rates if rules else (None,))]
        if not any(rates) and not self.has_variable("balance", "bias"):
            return pick()._replace(scores=plain)  # auxiliary losses read the scores as they are
        if self.balance_rate and self.is_mutable_collection("balance") and not SELECTIONS[self.rule.name].biased:
            biased = ", ".join(name for name, part in SELECTIONS.items() if part.biased)
            raise UserError(f"balance_rate={self.balance_rate}: {self.rule.name} takes no bias; use 0, or {biased}")
        bias = self.variable("balance", "bias", jnp.zeros, self.num_experts)
        routing = pick(bias=bias.value)
        if self.is_mutable_collection("balance") and not self.is_initializing():
            rate = rates[0] if rules is None else jnp.asarray(rates)[layer]
            bias.value = load.rebalanced(bias.value, load.load_of(routing, tokens.mask)[0], rate)
        return routing._replace(scores=plain)

    def select(self, scores: Float[Array, "T E"], *, layer: Any = None, **options) -> Routing | SoftRouting:
        """Applies the rule (of this `layer`) to scores; over a mesh each device selects for its own tokens."""

        def pick(rule: SelectionRule) -> Any:
            if self.mesh is None:
                return select(rule, scores, **options)
            return parallel_select(rule, self.mesh, scores, **options)

        rules = self.layer_rules
        return pick(self.rule) if rules is None else select_in_layer(rules, self.rule, layer, pick)

    def experts_for(self, tokens: Tokens, routing: Any) -> tuple[Experts, Any]:
        """Returns all experts beside their inputs, and the routing whose weights are left for their outputs."""
        x = tokens.x
        if SELECTIONS[self.rule.name].weighs_inputs:
            x, routing = scaled_inputs(x, routing, self.rule.name)
        expert = self.expert.clone(parent=None)  # unbound: its parameters are stacked and held here
        params = self.param("experts", partial(_initialise, expert, self.num_experts, x[:1]))
        if self.dtype is not None:
            x, params = jax.tree.map(lambda a: a.astype(self.dtype), (x, params))
        size = group_size_of(self.rule, len(x), self.mesh)
        queues = Queues(group_size=size, capacity=capacity(self.rule, size, self.num_experts))

        def run(params: Any, x: Any) -> Any:
            return expert.apply({"params": params}, x)

        return Experts(run, params, x, queues), routing

    def run(self, experts: Experts, routing: Routing | SoftRouting) -> Float[Array, "T O"]:
        """Runs the experts that a routing names, and adds up their weighted outputs."""
        name = dispatch_of(self, experts)
        run = dispatch.DISPATCHES[name].run
        if self.mesh is None or isinstance(routing, SoftRouting):
            return run(experts.run, experts.params, experts.x, routing, experts.queues)
        run = EXCHANGED[name] if self.mesh.shape[EXPERT] > 1 else run
        return parallel(run, experts.run, experts.params, experts.x, routing, experts.queues, self.mesh)


def check_layer(rule: SelectionRule, experts: int, name: str, noise: str, in_weights: bool) -> None:
    """Refuses a rule, a dispatch (`name`) or a noise that no layer of so many experts can have.

    Raises:
      UserError: names the argument, its value, and what is allowed.
    """
    if not isinstance(rule, SelectionRule):
        raise UserError(f"rule={rule!r}: must be a rule, such as SelectionRule('top_k', k=2)")
    dispatches = [dispatch.AUTO, *dispatch.DISPATCHES]
    given = (("rule", rule.name, [*SELECTIONS]), ("dispatch", name, dispatches), ("noise", noise, [*NOISES]))
    for argument, value, names in given:
        if value not in names:
            raise UserError(f"{argument} {value!r} is unknown{nearest(value, names)}; known: {', '.join(names)}")
    if "k" in SELECTIONS[rule.name].reads and not (isinstance(rule.k, int | np.integer) and 1 <= rule.k <= experts):
        raise UserError(f"k={rule.k}: a token has 1 to {experts} of {experts} experts")
    kind, chooses = NOISES[noise], SELECTIONS[rule.name].chooses
    if kind.draw and not in_weights and (kind.learned or not chooses):
        reason = "a choice has no gradient" if chooses else f"{rule.name} chooses no experts"
        raise UserError(f"noise={noise!r}: without effect, as {reason}: set noise_in_weights=True")
    for argument in QUEUES:
        value, setting = getattr(rule, argument), SHARED[argument]
        expected = type(setting.default)
        if not (isinstance(value, expected | int | np.integer) and setting.allowed.holds(value)):
            raise UserError(f"{argument}={value!r}: {setting.allowed.description()}, of type {expected.__name__}")


def _check_tokens(expert: nn.Module, x: Array) -> None:
    """Refuses no tokens, and tokens of which an expert makes no [T, O], by their rank or the expert's output.

    Raises:
      UserError: names the tokens, and what the expert makes of one.
    """
    alone, token = expert.clone(parent=None), jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    output = jax.eval_shape(lambda x: alone.init_with_output(jax.random.key(0), x)[0], token)
    if not x.size:
        raise UserError(f"tokens {list(x.shape)}: a layer needs at least one token of one number")
    if (shape := getattr(output, "shape", ())) == (1, *shape[1:2]) and len(shape) == 2:
        return
    raise UserError(
        f"tokens {list(x.shape)}: {type(expert).__name__} returns {list(shape) or type(output).__name__} for one token,"
        " not [1, outputs]: give a layer tokens [T, ...] (x.reshape(-1, D)), and let an expert return [T, outputs]"
    )


def route_and_dispatch(layer: MoE, tokens: Tokens) -> tuple[Float[Array, "T O"], Routing | SoftRouting]:
    """Computes the layer by the router's scores alone: the forward of every selection that has none of its own."""
    experts, routing = layer.experts_for(tokens, layer.route(tokens))
    return layer.run(experts, routing), routing


def dispatch_of(layer: MoE, experts: Experts) -> str:
    """Returns the dispatch of a layer: the named one, or for `auto` the best one for the experts and the platform."""
    devices = 1 if layer.mesh is None else layer.mesh.size
    sparse = SELECTIONS[layer.rule.name].sparse
    exchanges = layer.mesh is not None and layer.mesh.shape[EXPERT] > 1 and sparse
    if layer.dispatch != dispatch.AUTO:
        if reason := dispatch.reason_against(layer.dispatch, layer.rule.name):
            raise TypeError(reason)
        if exchanges and not dispatch.DISPATCHES[layer.dispatch].exchanged:
            fits = ", ".join(map(repr, EXCHANGED))
            raise TypeError(f"dispatch {layer.dispatch!r} cannot share experts over a mesh; use {fits} or 'auto'")
        return layer.dispatch
    name, reason = dispatch.choose(
        layer.rule.name,
        len(experts.x) // devices,
        layer.rule.k,
        layer.num_experts,
        not layer.rule.capacity_factor,
        platform(),
        taken=layer.num_experts * experts.queues.capacity / experts.queues.group_size,
        width=sum(leaf.size for leaf in jax.tree.leaves(experts.params)) / layer.num_experts / experts.x[0].size,
        shared=exchanges,
    )
    tell_choice(name, reason)
    return name


@functools.cache
def tell_choice(name: str, reason: str) -> None:
    """Logs why `auto` is this dispatch, once for each: training and evaluations may have different ones."""
    log.info("dispatch auto is %s: %s", name, reason)


def over_experts(params: Any) -> Any:
    """Names the leading axis of every leaf `expert`: Flax metadata that `nn.get_partition_spec` and `nn.scan` read."""

    def named(leaf: Any) -> Any:
        boxed = leaf if has_names(leaf) else nn.LogicallyPartitioned(leaf, (None,) * (leaf.ndim - 1))
        return boxed.add_axis(0, {nn.PARTITION_NAME: "expert"})

    has_names = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)  # noqa: E731
    return jax.tree.map(named, params, is_leaf=has_names)


def _initialise(expert: nn.Module, experts: int, token: Float[Array, "1 ..."], key):
    """Returns the parameters of all experts, each drawn with the key folded from its number."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(experts))
    return over_experts(jax.vmap(lambda key: expert.init(key, token)["params"])(keys))
