"""A compiled batch of runs, timed by its training steps and its evaluations."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from routed.bench.harness import Case, Work
from routed.engine.compilation import Compiled, compile_group, stack_traced
from routed.engine.devices import make_mesh
from routed.plan.config import canonical, problem_of, traced
from routed.settings.tree import override


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
        started = time.perf_counter()
        arguments = self.active, self.count, self.seeds, self.traced, self.worlds, self.states, (), self.shared
        self.states = jax.block_until_ready(self.compiled.advance(*arguments))
        return time.perf_counter() - started

    def step(self) -> float:
        """Trains; returns the seconds of a step of one run."""
        return self.train() / self.steps / self.runs

    def evaluation(self) -> float:
        """Evaluates; returns the seconds of the whole batch."""
        started = time.perf_counter()
        arguments = self.active, self.seeds, self.traced, self.worlds, self.states, self.shared
        self.states = jax.block_until_ready(self.compiled.record(*arguments))
        return time.perf_counter() - started


def batch_case(
    about: dict[str, Any], config: ConfigDict, steps: int, work: Work, peer: str = "", column: str = "ms_per_step"
) -> Case:
    """Compiles about["runs"] runs of a config and trains once; returns the case of a step of one run."""
    batch = Batch(canonical(config), about["runs"], steps)
    batch.train()  # the first call touches the memory
    return Case(about, {column: batch.step}, work, peer)
