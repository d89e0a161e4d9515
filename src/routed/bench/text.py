"""Compiled training of a language model on random tokens: forward, backward and Adam on one batch."""

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

from routed.contracts import TextBatch
from routed.engine.compilation import compile_lowered
from routed.layer.dispatch import DATA, EXPERT
from routed.layer.rule import rule_of
from routed.training import ProblemPart
from routed.training.objective import selection_loss


class TextTraining:
    """Compiled training of one config: `steps` at once, or as many as take two seconds, as training runs them.

    Rows have `targets` target tokens. The devices of a mesh share the rows.
    """

    def __init__(
        self, config: ConfigDict, problem: ProblemPart, targets: int, steps: int = 0, mesh: Mesh | None = None
    ):
        self.config, self.mesh, self.flops = config, mesh, problem.cost(config).flops
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
        started = time.perf_counter()
        self.state = jax.block_until_ready(self.run(self.count))
        return (time.perf_counter() - started) / self.count

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
        rule = rule_of(self.config.selection)
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
