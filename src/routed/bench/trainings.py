"""Compiled trainings that are timed: a batch of runs of any problem, and a language model on random tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from routed.bench.harness import Case, Work, seconds_of
from routed.contracts import TextBatch
from routed.engine.compilation import Compiled, compile_group, compile_lowered, stack_traced
from routed.engine.devices import make_mesh
from routed.layer.dispatch.parallel import DATA, EXPERT
from routed.layer.rule import selection_rule
from routed.plan.config import canonical, problem_of, traced
from routed.settings.tree import override
from routed.training import ProblemPart
from routed.training.objective import selection_loss


class Batch:
    """A compiled batch of equal runs with different seeds, of which the first `active` (0: all) are trained."""

    def __init__(self, config: ConfigDict, runs: int, steps: int, active: int = 0):
        mesh = make_mesh(config) if runs > 1 else make_mesh(override(config, {"mesh.run": 1}))
        self.runs, self.steps = runs, steps
        self.compiled: Compiled = compile_group(config, config.data.samples, runs, mesh)
        to_devices = self.compiled.place
        self.seeds = to_devices(np.arange(runs, dtype=np.uint32))
        self.traced = to_devices(stack_traced([traced(config)] * runs))
        self.active = to_devices(np.arange(runs) < (active or runs))
        self.count = self.compiled.place_shared(np.int32(steps))
        self.shared = self.compiled.place_shared(problem_of(config).shared_arrays(config))
        self.start()

    def start(self) -> None:
        """Begins all runs anew."""
        self.worlds, self.states = jax.block_until_ready(self.compiled.start(self.seeds, self.traced, self.shared))

    def train(self) -> float:
        """Trains `steps` steps; returns their seconds."""
        runs = self.seeds, self.traced, self.worlds, self.states
        arguments = self.active, self.count, *runs, (), self.shared
        self.states, seconds = seconds_of(lambda: self.compiled.advance(*arguments))
        return seconds

    def step(self) -> float:
        """Trains; returns the seconds of a step of one run."""
        return self.train() / self.steps / self.runs

    def evaluation(self) -> float:
        """Evaluates; returns the seconds of the whole batch."""
        arguments = self.active, self.seeds, self.traced, self.worlds, self.states, self.shared
        self.states, seconds = seconds_of(lambda: self.compiled.record(*arguments))
        return seconds


def batch_case(
    about: dict[str, Any], config: ConfigDict, steps: int, work: Work, peer: str = "", column: str = "ms_per_step"
) -> Case:
    """Compiles about["runs"] runs of a config and trains once; returns the case of a step of one run."""
    batch = Batch(canonical(config), about["runs"], steps)
    batch.train()  # the first call touches the memory
    return Case(about, {column: batch.step}, work, peer)


class TextTraining:
    """Compiled training of one config: `steps` at once, or as many as take two seconds, as training runs them.

    Rows have `targets` target tokens. The devices of a mesh share the rows.
    """

    def __init__(
        self, config: ConfigDict, problem: ProblemPart, targets: int, steps: int = 0, mesh: Mesh | None = None
    ):
        self.config, self.mesh, self.targets, self.flops = config, mesh, targets, problem.cost(config).flops
        self.model, self.optimiser = problem.models[config.model].build(config, mesh), optax.adam(1e-3)
        batch = self._batch(targets)
        params, layer = jax.jit(self.model.init)(jax.random.key(0), batch)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.state = (params, layer, self.optimiser.init(params))
        started = time.perf_counter()
        lowered = jax.jit(self._steps, donate_argnums=0).lower(self.state, jnp.int32(1), batch)
        self.compiled = compile_lowered(lowered, problem.fuse)
        self.about = {"parameters": parameters, "compile_seconds": time.perf_counter() - started}
        self.run: Callable[[int], Any] = lambda count: self.compiled(self.state, jnp.int32(count), batch)
        self.count = 1
        self.step()  # the first call touches the memory
        self.count = steps or max(1, min(16, round(2 / self.step())))

    def step(self) -> float:
        """Trains `count` steps; returns the seconds of one."""
        self.state, seconds = seconds_of(lambda: self.run(self.count))
        return seconds / self.count

    def rates(self, seconds: float, tokens: int) -> dict[str, float]:
        """Returns the rates of a step of `tokens` tokens that takes `seconds`."""
        return {"tokens_per_second": tokens / seconds, "gflops_per_second": self.flops / seconds / 1e9}

    def _batch(self, targets: int) -> TextBatch:
        rng, rows, data = np.random.default_rng(0), self.config.batch_size, self.config.data

        def tokens(length: int) -> jax.Array:
            return jnp.asarray(rng.integers(2, data.vocabulary, (rows, length), np.int32))

        batch = TextBatch(tokens(data.input_length), tokens(targets), jnp.zeros(rows, jnp.int32))
        return batch if self.mesh is None else jax.device_put(batch, NamedSharding(self.mesh, P((DATA, EXPERT))))

    def _loss(self, params, layer, batch: TextBatch):
        rule = selection_rule(self.config.selection)
        logits, sites, layer = self.model.apply(params, layer, batch, rule, self.config.dispatch, jax.random.key(0))
        right = jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - right).mean() + selection_loss(rule, sites), layer

    def _steps(self, state, count, batch: TextBatch):
        def step(_, state):
            params, layer, moments = state
            grads, layer = jax.grad(self._loss, has_aux=True)(params, layer, batch)
            updates, moments = self.optimiser.update(grads, moments, params)
            return optax.apply_updates(params, updates), layer, moments

        return jax.lax.fori_loop(0, count, step, state)
