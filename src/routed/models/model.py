"""The interface of a model: pure functions on groups of parameters, and the declaration of the model as a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray
from ml_collections import ConfigDict

from routed.contracts import Column, Routing, SoftRouting, TextBatch
from routed.settings.setting import Setting, accept
from routed.tasks.task import Watch, watch_nothing

#: Parts that a layer with a router uses in any model; settings that the layer reads; settings of a fresh router.
ROUTED = ("router.name", "router.noise", "experts.name", "selection.name", "selection.eval.name", "dispatch")
LAYER = ("experts.count", "selection.balance_rate", "selection.no_gradient", "router.frozen", "router.learning_rate")
INITIAL = (
    "router.init_scale",
    "router.init_from_data",
    "router.init_rows",
    "router.init_starts",
    "router.initial_entropy",
)


class Site(NamedTuple):
    """Decisions of the gates of one site of a model, and the tokens that the experts of the site received.

    A stack of sparse layers is one site: every leaf has a leading axis [S]. A model of a single layer has no such axis.
    """

    routing: Routing | SoftRouting
    features: Float[Array, "*S T D"]


class Outputs(NamedTuple):
    """Predictions [B, O] or logits [B, M, V], the sites by name (empty without a router), and the state."""

    prediction: Float[Array, "B ..."]
    sites: dict[str, Site]
    state: Any


#: stack -> function of a batch of text that returns the ids that the stack reads.
Read = Mapping[str, Callable[[TextBatch], Int[Array, "B L"]]]


class Model(NamedTuple):
    """A model as pure functions.

    `scores` and `responses` exist only for models with a router. `watch` computes the model's columns at an evaluation.
    """

    #: (params by group, state) of (key, batch). Rules of the model update the state, not gradients.
    init: Callable[[PRNGKeyArray, Any], tuple[dict[str, Any], Any]]
    #: Applies (params, state, batch, rule, dispatch, key=None, step=0). With a key, as in training, noise is added and
    #: the returned state is updated.
    apply: Callable[..., Outputs]
    #: Scores [S, T, E] of a site's gates, of (params, state, site, features [S, T, ...], batch, step=0).
    scores: Callable[..., Array] | None = None
    #: Outputs [S, T, E, O] of every expert on every token, of (params, site, features [S, T, ...]).
    responses: Callable[[Any, str, Array], Array] | None = None
    watch: Watch = watch_nothing
    #: The sparse layers of a stack (`models.router_layers.Layers`), where they differ.
    layers: Any = None


class ModelPart(NamedTuple):
    """The declaration of a model: `build(config, mesh)`, needs of the data, columns and settings.

    routed: the model has routers, and its experts are a group of parameters.
    every: the model has no router; each expert computes every sample and has its own loss, and the gradients of all
    experts are divided as in a mixture.
    needs, targets: properties of the task, and kinds of targets that the model can be trained on (empty: any).
    inner(config): routed tokens of a sample, if the layer routes hidden tokens instead of the task's tokens.
    flops(config): forward FLOPs of a sample, if the number of parameters does not determine these FLOPs.
    """

    build: Callable[[ConfigDict, Mesh | None], Model]
    routed: bool = False
    every: bool = False
    needs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    inner: Callable[[ConfigDict], int] | None = None
    flops: Callable[[ConfigDict], float] | None = None
    columns: Mapping[str, Column] = {}
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept

    @property
    def named_experts(self) -> bool:
        """True if the experts are a part of the table EXPERTS."""
        return "experts.name" in self.uses

    @property
    def counts_experts(self) -> bool:
        """True if the parameters have an axis of `experts.count` experts."""
        return "experts.count" in self.reads

    @property
    def noisy(self) -> bool:
        """True if a kind of noise is chosen for the router."""
        return "router.noise" in self.uses

    @property
    def freezable(self) -> bool:
        """True if the router may be frozen."""
        return "router.frozen" in self.reads
