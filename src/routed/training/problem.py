"""A problem: one shape of data and models, as the training program and the engine see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray, Scalar
from ml_collections import ConfigDict

from routed.contracts import Column
from routed.models.model import Model, ModelPart, Outputs
from routed.routers import ROUTERS
from routed.settings.setting import Setting, accept
from routed.training.optimiser import NORMALISATIONS, Normalisation


class Inputs(NamedTuple):
    """Inputs of a run: a key for each random stream, its config with traced arrays, its world, and shared arrays."""

    keys: dict[str, PRNGKeyArray]
    config: Any
    world: Any
    shared: Any


@dataclass(frozen=True, eq=False)
class Problem:
    """A model and its data under one config: pure functions of a run's inputs."""

    config: ConfigDict
    part: ModelPart
    model: Model

    @property
    def router_learns(self) -> bool:
        """True if the router has parameters that gradients train, or the model brings a router of its own."""
        if self.model.layers is not None:
            return any(self.model.layers.learns)
        return not self.part.routed or ROUTERS[self.config.router.name].learns

    @property
    def normalisation(self) -> Normalisation:
        """The normalisation of the gradients of experts."""
        return NORMALISATIONS["none"]

    def draw_world(self, keys: dict[str, PRNGKeyArray], config: Any) -> Any:
        """Draws the data of a run once, before training. The keys are those of the run's streams."""
        raise NotImplementedError

    def init(self, inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the parameters by group, and the model's state, at step 0."""
        raise NotImplementedError

    def batch(self, inputs: Inputs, feed: Any, step: Int[Array, ""] | int) -> Any:
        """Returns the batch of a training step. `feed` holds batches that the host made, the step's own among them."""
        raise NotImplementedError

    def task_loss(self, config: Any, outputs: Outputs, batch: Any) -> tuple[Scalar, Scalar]:
        """Returns the minimised and the reported loss of a batch under the config of a phase."""
        raise NotImplementedError

    def evaluate(
        self, inputs: Inputs, params: dict[str, Any], state: dict[str, Any], step: Int[Array, ""], memory: Any
    ) -> dict[str, Array]:
        """Returns all metrics of one evaluation; `memory` is the result of `remember` at the one before."""
        raise NotImplementedError

    @property
    def fit_step(self) -> int | None:
        """Returns the step at whose evaluation the router is fitted; None: it is not."""
        return None

    def fit(self, inputs: Inputs, params: dict[str, Any], state: dict[str, Any], step: Any, teacher: Any) -> Any:
        """Returns the parameters with the fitted router; `teacher` as the engine has filled it."""
        raise NotImplementedError

    def teacher(self, inputs: Inputs, params: dict[str, Any], state: dict[str, Any]) -> dict[str, Array]:
        """Returns arrays for what a router is taught, which the engine fills; empty: nobody teaches it."""
        return {}

    def remember(self, params: dict[str, Any], state: dict[str, Any]) -> Any:
        """Returns what the next evaluation needs of this one."""
        return ()

    def unit(self, inputs: Inputs) -> Scalar | float:
        """Returns the divisor of reported losses."""
        return 1.0

    def wrong(self, config: Any, outputs: Outputs, batch: Any) -> Int[Array, ""] | int:
        """Counts the wrong samples of a batch, for runs that stop when no sample is wrong (`stop.errors`)."""
        return 0


class Cost(NamedTuple):
    """A training step of a run: its tokens, the FLOPs of its model, and other work in FLOPs that take as long."""

    tokens: int
    flops: float
    other: float = 0.0
    #: Counts the parameters of the whole model, which may take a second.
    parameters: Callable[[], int] | None = None

    @property
    def work(self) -> float:
        """A measure of time in FLOPs."""
        return self.flops + self.other


class ProblemPart(NamedTuple):
    """A shape of problem as a part, with all that the engine asks of it.

    `build(config, pool, mesh)` has `pool` training samples in its world; with a mesh, devices share a run. The part
    trains configs whose `data.name` is in `data` and whose model is in `models`.
    """

    build: Callable[[ConfigDict, int, Mesh | None], Problem]
    data: Mapping[str, Any]
    models: Mapping[str, ModelPart]
    #: The column that validates a run, and the columns of a config.
    loss: str
    columns: Callable[[ConfigDict], dict[str, Column]]
    #: Arrays that all runs of a config share; `feed(config, seed, rows)` -> (first, steps) -> `rows` of these steps'
    #: batches.
    shared_arrays: Callable[[ConfigDict], Any]
    feed: Callable[..., Callable[[int, int], Any]]
    feed_shape: Callable[[ConfigDict, int], Any]
    #: Columns of a finished run that need several evaluations, or the host.
    offline: Callable[[ConfigDict, dict[str, np.ndarray]], dict[str, np.ndarray]]
    #: The digest of the data that config.json keeps; the sentence about the data in the report.
    digest: Callable[[ConfigDict], str]
    about: Callable[[ConfigDict], str]
    cost: Callable[[ConfigDict], Cost]
    #: The model has a decoder, whose routing must not depend on later tokens.
    causal: bool = False
    #: Event files for TensorBoard are written while a run trains, as its runs are few and long.
    watched: bool = False
    #: Devices may share one run.
    shareable: bool = False
    #: Tokens of a sample that are routed one by one.
    positions: Callable[[ConfigDict], int] = lambda config: 1
    #: Arguments of `routed.trace.write` by the name of an array of choices [evaluations, (layers,) T, k].
    traced: Callable[[ConfigDict], dict[str, dict[str, Any]]] = lambda config: {}
    #: The SentencePiece model of a config's tokens; empty for other tokens.
    pieces: Callable[[ConfigDict], bytes] = lambda config: b""
    #: The column by which a report compares arms; empty: the column that validates.
    compared: str = ""
    #: The operations that XLA's YNNPACK may fuse on a CPU.
    fuse: str = ""
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept
    #: Refuses data of a user's part that are not what the part declares; called before programs are compiled.
    check_values: Callable[[ConfigDict], None] = accept
