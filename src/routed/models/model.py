"""A model: what is trained, as pure functions on parameters in groups, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray
from ml_collections import ConfigDict

from routed.contracts import Column, Routing, SoftRouting
from routed.layer.rule import Rule
from routed.settings.setting import Setting, accept
from routed.tasks.task import Watch, watch_nothing

#: Choices that a layer with a router uses, in any model; settings that the layer reads; and settings of a fresh router.
ROUTED = ("router.name", "router.noise", "experts.name", "selection.name", "selection.eval.name", "dispatch")
LAYER = ("experts.count", "selection.balance_rate", "selection.no_gradient", "router.frozen", "router.learning_rate")
INITIAL = ("router.init_scale", "router.from_data", "router.rows", "router.entropy")


class Site(NamedTuple):
    """What the gates at one place of a model decided, and the tokens that their experts got.

    A stack of sparse layers is one site: every leaf has a leading axis [S]. A model of a single layer has no such axis.
    """

    routing: Routing | SoftRouting
    features: Float[Array, "*S T D"]


class Outputs(NamedTuple):
    """Predictions [B, O] or logits [B, M, V], the sites by name (none without a router), and the state."""

    prediction: Float[Array, "B ..."]
    sites: dict[str, Site]
    state: Any


class Init(Protocol):
    """(params by group, state); state moves by rules of its own, not by gradients. The key is consumed."""

    def __call__(self, key: PRNGKeyArray, batch: Any) -> tuple[dict[str, Any], Any]: ...


class Apply(Protocol):
    """The model on a batch. With a key as in training: there is noise, and the state that is returned has moved."""

    def __call__(
        self,
        params: Any,
        state: Any,
        batch: Any,
        rule: Rule,
        dispatch: str,
        key: PRNGKeyArray | None = None,
        step: Int[Array, ""] | int = 0,
    ) -> Outputs: ...


class Scores(Protocol):
    """The scores of a site's gates on given features, in the context (clusters, token ids) of a batch."""

    def __call__(
        self, params: Any, state: Any, site: str, features: Float[Array, "S T ..."], batch: Any, step: Any = 0
    ) -> Float[Array, "S T E"]: ...


class Responses(Protocol):
    """The outputs of every expert of a site on every token of given features."""

    def __call__(self, params: Any, site: str, features: Float[Array, "S T ..."]) -> Float[Array, "S T E O"]: ...


class Model(NamedTuple):
    """Pure functions; `scores` and `responses` of models with a router only; `watch`: columns of its own at an evaluation."""

    init: Init
    apply: Apply
    scores: Scores | None = None
    responses: Responses | None = None
    watch: Watch = watch_nothing


class ModelPart(NamedTuple):
    """A model as a part: `build(config, mesh)`, what it needs of the data, and whether it has routers, and experts as a group.

    `targets` are the kinds of targets that it can be trained on (empty: any). `inner(config)` are the tokens of a
    sample that its layer routes, where these are hidden ones and not the task's; `flops(config)` those of a sample,
    forward, where parameters do not tell them. `every`: without a router all experts compute every sample, each with a
    loss of its own, and divide their gradients as in a mixture.
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
