"""The problem of samples: a task that draws its own data, a layer on it, and a target for each sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Scalar
from ml_collections import ConfigDict

from routed.contracts import Batch, Routing
from routed.experts import EXPERTS, Expert
from routed.layer.moe import CONTROL
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import SELECTIONS, gate_rows, group_of
from routed.metrics import router
from routed.models.dense import SAMPLE_MODELS
from routed.models.single_layer import SITE
from routed.routers import CLUSTERS, ROUTERS
from routed.routers.features import IMAGES
from routed.routers.noise import NOISES
from routed.routers.router import initial_parameters
from routed.routers.scores import sharpness_of
from routed.settings.setting import refuse
from routed.settings.tree import node_of
from routed.tasks import TASKS, worlds
from routed.tasks.task import Task, World
from routed.training.optimiser import NORMALISATIONS, Normalisation
from routed.training.probes import Block, Evaluation, look, measure
from routed.training.problem import Inputs, Problem
from routed.training.task_losses import TASK_LOSSES, TaskLoss, correct

#: Training samples on which the entropy of gates is measured, and to whose entropy gates are sharpened.
CALIBRATION_SAMPLES = 1024

#: The most training samples that k-means reads, so that images fit into memory; and the number that is folded into
#: the key of the initial weights for k-means.
CLUSTERED, CLUSTERING = 16384, 1

#: The dispatch of evaluations, whatever the dispatch of training: the soft mixture needs every expert anyway.
EVALUATION_DISPATCH = "dense"


@dataclass(frozen=True, eq=False)
class SampleProblem(Problem):
    """A task, a loss, and a model on samples; the world holds `pool` training samples."""

    task: Task
    loss: TaskLoss
    pool: int

    @property
    def experts(self) -> Expert | None:
        """The experts of the table EXPERTS; None for a model that brings its own."""
        return EXPERTS[self.config.experts.name] if self.part.named_experts else None

    @property
    def experts_choose(self) -> bool:
        """True if experts take patches of each sample when the model is evaluated."""
        return (
            self.part.routed and SELECTIONS[selection_rule(self.config.selection, evaluation=True).name].within_samples
        )

    @property
    def tokens_choose(self) -> bool:
        """True if tokens choose among experts by scores that the model can compute again."""
        return self.model.scores is not None and not self.experts_choose

    @property
    def normalisation(self) -> Normalisation:
        return NORMALISATIONS[self.config.optimizer.normalise]

    def world(self, inputs: Inputs) -> World:
        """Returns the drawn world with the arrays that all runs share."""
        return inputs.world._replace(shared=inputs.shared)

    def draw_world(self, keys, config) -> World:
        return worlds.draw_world(self.task, keys["world"], config.data, self.pool)

    def init(self, inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns fresh parameters; a router is scaled, filled from examples and sharpened as the config says."""
        config, world = self.config, self.world(inputs)
        params, state = self.model.init(inputs.keys["init"], worlds.test_batch(self.task, world, inputs.config.data))
        if self.model.scores is None:
            return params, state
        count, kind = config.experts.count, ROUTERS[config.router.name]
        examples = worlds.examples(self.task, world, count, inputs.config.data)
        module = kind.make(node_of(config).router, count)
        clustered = _clustered(self, inputs) if config.router.init_rows == CLUSTERS else None
        router_params = initial_parameters(
            kind, module, params["router"], examples.tokens[:count], inputs.config.router, clustered
        )
        params = params | {"router": router_params}
        # At the last step, where arms are compared: scores may depend on the step.
        scores = calibration_scores(self, inputs, world, params, state, config.steps)
        return params, state | {CONTROL: {"sharpness": sharpness_of(scores, inputs.config.router.initial_entropy)}}

    def batch(self, inputs: Inputs, feed, step) -> Batch:
        order, data = inputs.keys["order"], inputs.config.data
        return worlds.train_batch(self.task, self.world(inputs), order, self.config.batch_size, data, step)

    def task_loss(self, config, outputs, batch) -> tuple[Scalar, Scalar]:
        loss, prediction = TASK_LOSSES[config.loss], outputs.prediction
        if loss.of_scores is not None:
            prediction = loss.of_scores(outputs.sites[SITE].routing.scores, len(batch.y))
        members = len(prediction) // len(batch.y)  # more than one in an ensemble, whose members each have a loss
        value = loss.value(prediction, jnp.tile(batch.y, (members, 1)) if members > 1 else batch.y).mean()
        return value, value

    def wrong(self, config, outputs, batch) -> Int[Array, ""] | int:
        if not self.config.stop.errors:
            return 0
        return (~correct(outputs.prediction, batch.y, config.losses.threshold)).sum()

    def unit(self, inputs: Inputs) -> Scalar | float:
        """Returns the loss of the best constant prediction; 1 for losses in nats."""
        return 1.0 if self.loss.labelled else worlds.variance(self.task, self.world(inputs), inputs.config.data)

    def right(self, inputs: Inputs, prediction: Float[Array, "B O"], batch: Batch) -> Bool[Array, " B"]:
        """Returns True for each sample that is predicted rightly, by the threshold of the config's loss."""
        threshold = inputs.config.losses.threshold if "threshold" in self.loss.settings else 0.0
        return correct(prediction, batch.y, threshold)

    def evaluate(self, inputs: Inputs, params, state, step, memory) -> dict[str, Array]:
        world = self.task.at(self.world(inputs), step, inputs.config.data)
        test = worlds.test_batch(self.task, world, inputs.config.data)
        evaluation = Evaluation(self, inputs, params, state, step, memory, test, world, self.unit(inputs))
        rule = selection_rule(inputs.config.selection, evaluation=True) if self.part.routed else SelectionRule()
        noise = NOISES[self.config.router.noise] if self.part.noisy else None
        noisy = noise is not None and noise.optional_at_eval and inputs.config.router.noise_at_eval

        def forward(number, batch: Batch):
            key = jax.random.fold_in(inputs.keys["noise"], number) if noisy else None
            block_rule = rule._replace(group_size=group_of(rule.group_size, len(batch.tokens)))
            outputs = self.model.apply(params, state, batch, block_rule, EVALUATION_DISPATCH, key, step)
            routing: Any = outputs.sites[SITE].routing if outputs.sites else None
            if isinstance(routing, Routing):  # tokens are numbered over all blocks
                routing = routing._replace(token=routing.token + number * len(routing.scores))
            width, outputs_of_task = outputs.prediction.shape[-1], self.task.outputs(self.config.data)
            if self.experts is not None and width != outputs_of_task:
                shapes = f"it makes [T, {width}]; must be outputs [T, {outputs_of_task}]"
                refuse("experts.name", self.config.experts.name, shapes)
            return outputs.prediction, routing, look(evaluation, Block(batch, block_rule, outputs, key))

        # Fewer images at once where experts are networks on images: the windows of all experts are in memory.
        networks = self.experts is not None and self.experts.flops is not None
        prediction, routing, blocks = in_blocks(forward, test, IMAGES if networks else 640)
        gate: Any = None
        if self.tokens_choose and routing is not None:
            gate = router.gate_of(routing, test.label, self.task.labels(inputs.config.data), test, params["router"])
        return measure(evaluation._replace(prediction=prediction, routing=routing, gate=gate), blocks)


def build(config: ConfigDict, pool: int, mesh: Mesh | None = None) -> SampleProblem:
    """Returns the problem of a config with `pool` training samples in its world, at least every `data.samples`."""
    part = SAMPLE_MODELS[config.model]
    model = part.build(config, mesh)
    return SampleProblem(config, part, model, TASKS[config.data.name], TASK_LOSSES[config.loss], pool)


def calibration_scores(
    problem: SampleProblem, inputs: Inputs, world: World, params, state, step
) -> Float[Array, "N M"]:
    """Returns router scores on calibration samples, one row per gate.

    Fewer samples where a sample has several gates.
    """
    task, data = problem.task, inputs.config.data
    rule, positions = selection_rule(problem.config.selection), task.positions(data)
    several = SELECTIONS[rule.name].within_samples
    count = max(1, CALIBRATION_SAMPLES // positions) if several else CALIBRATION_SAMPLES
    samples = worlds.examples(task, world, count, data)
    assert problem.model.scores is not None
    return gate_rows(rule, problem.model.scores(params, state, SITE, samples.tokens[None], samples, step)[0], positions)


def _clustered(problem: SampleProblem, inputs: Inputs):
    """Returns the tokens for k-means, weights (0 for samples of the pool beyond `data.samples`), a key, and starts."""
    data, count = inputs.config.data, min(problem.pool, CLUSTERED)
    tokens = worlds.examples(problem.task, problem.world(inputs), count, data).tokens
    weight = (jnp.arange(len(tokens)) < data.samples * (len(tokens) // count)).astype(jnp.float32)
    starts = problem.config.router.init_starts
    return tokens, weight, jax.random.fold_in(inputs.keys["init"], CLUSTERING), *([starts] if starts > 1 else [])


def in_blocks(forward: Callable[[Any, Batch], Any], batch: Batch, largest: int) -> Any:
    """Applies `forward` to numbered blocks of samples one by one, which keeps the experts' activations in cache.

    Leaves come back joined, [blocks * block, ...].
    """
    size = len(batch.x)
    block = max(b for b in range(1, min(size, largest) + 1) if size % b == 0)
    blocks = jax.tree.map(lambda a: a.reshape(size // block, block, *a.shape[1:]), batch)
    results = jax.lax.map(lambda item: forward(*item), (jnp.arange(size // block), blocks))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)
