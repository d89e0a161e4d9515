"""A problem: what the training program and the engine need to know of one shape of data and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar
from ml_collections import ConfigDict

from routed.contracts import Column
from routed.models.model import Model, ModelPart, Outputs
from routed.settings.setting import Setting, accept


class Inputs(NamedTuple):
    """What a run is given: a key for each random stream, its config with arrays for traced settings, world, shared arrays."""

    keys: dict[str, PRNGKeyArray]
    config: Any
    world: Any
    shared: Any


class DrawWorld(Protocol):
    """What is drawn once per run, before anything trains. The keys are those of the run's streams."""

    def __call__(self, keys: dict[str, PRNGKeyArray], config: Any) -> Any: ...


class Init(Protocol):
    """The parameters by group, and the model's state, at step 0."""

    def __call__(self, inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]: ...


class MakeBatch(Protocol):
    """The batch of a training step; `feed` holds the batches of the steps among which it is, where the host makes them."""

    def __call__(self, inputs: Inputs, feed: Any, step: Int[Array, ""]) -> Any: ...


class TaskLoss(Protocol):
    """(what is minimised, what is reported) of a batch, under the config of a phase."""

    def __call__(self, config: Any, outputs: Outputs, batch: Any, /) -> tuple[Scalar, Scalar]: ...


class Wrong(Protocol):
    """How many samples of a batch the outputs are wrong about, under the config of a phase."""

    def __call__(self, config: Any, outputs: Outputs, batch: Any, /) -> Int[Array, ""] | int: ...


class Evaluate(Protocol):
    """All metrics of one moment, as scalars and arrays by name. `memory` is what `remember` kept at the last evaluation."""

    def __call__(
        self, inputs: Inputs, params: dict[str, Any], state: dict[str, Any], step: Int[Array, ""], memory: Any
    ) -> dict[str, Array]: ...


class Problem(NamedTuple):
    """A model and its data as pure functions of a run's inputs, for one config."""

    model: Model
    draw_world: DrawWorld
    init: Init
    batch: MakeBatch
    task_loss: TaskLoss
    evaluate: Evaluate
    #: What divides the reported training loss; and what an evaluation wants to know of the one before it.
    unit: Callable[[Inputs], Scalar | float] = lambda inputs: 1.0
    remember: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda params, state: ()
    #: Of samples that are right or wrong; asked for where a run stops when none is wrong any more.
    wrong: Wrong = lambda config, outputs, batch: 0


class Cost(NamedTuple):
    """A training step of a run: its tokens, the FLOPs of its model, and what else takes time, in FLOPs that take as long."""

    tokens: int
    flops: float
    other: float = 0.0
    #: Counts the parameters of the whole model, which may take a second; None where nobody does.
    parameters: Callable[[], int] | None = None

    @property
    def work(self) -> float:
        """As good a measure of time as FLOPs."""
        return self.flops + self.other


class ProblemPart(NamedTuple):
    """A shape of problem as a part, and what the engine asks of it.

    `build(config, pool, mesh)` has `pool` training samples in its world and, with a mesh, devices that share a run. It is the problem of
    a config whose `data.name` is in `data` and whose model is in `models`.
    """

    build: Callable[[ConfigDict, int, Mesh | None], Problem]
    data: Mapping[str, Any]
    models: Mapping[str, ModelPart]
    #: The column that validates a run, and how the problem's columns are shown, by config.
    loss: str
    columns: Callable[[ConfigDict], dict[str, Column]]
    #: Arrays that all runs of a config share; `feed(config, seed, rows)` -> (first, steps) -> `rows` of these steps' batches.
    shared_arrays: Callable[[ConfigDict], Any]
    feed: Callable[..., Callable[[int, int], Any]]
    feed_shape: Callable[[ConfigDict, int], Any]
    #: Further columns of a finished run's history: those that need several evaluations at once, or the host.
    offline: Callable[[ConfigDict, dict[str, np.ndarray]], dict[str, np.ndarray]]
    #: What config.json keeps of the data; what the report says of them.
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
    #: By the name of an array of choices [evaluations, (layers,) T, k]: what `routed.trace.write` takes of its tokens.
    traced: Callable[[ConfigDict], dict[str, dict[str, Any]]] = lambda config: {}
    #: The SentencePiece model of a config's tokens; empty where they are made by none.
    pieces: Callable[[ConfigDict], bytes] = lambda config: b""
    #: The column by which a report compares arms, where that is not the one that validates.
    compared: str = ""
    #: What XLA's YNNPACK may fuse on a CPU.
    fuse: str = ""
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


__all__ = ["Float", "Inputs", "Problem", "ProblemPart"]
