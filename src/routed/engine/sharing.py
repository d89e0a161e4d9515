"""Cores of a CPU that share the rows of each run, where runs would leave them idle (`mesh.data=0`)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
from absl import logging as log
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed.contracts import TextBatch, UserError
from routed.engine.devices import contested, make_mesh
from routed.layer.selection import divisors
from routed.plan.config import parts_of, problem_of
from routed.plan.run import Run
from routed.plan.runs import groups
from routed.settings.tree import override
from routed.system.platform import platform
from routed.training.text_problem import in_blocks

#: The least FLOPs of a step for each parameter with which sharing is faster: every core updates all parameters and adds
#: up all gradients, and computes only its own tokens (docs/measurements/lm.md).
WORK = 10_000


def mesh_of(config: ConfigDict, runs: Sequence[Run]) -> Mesh:
    """Returns the mesh of a command's runs: that of its config, or of cores that share each run."""
    if config.mesh.data or config.mesh.run or config.mesh.expert > 1:
        return make_mesh(config)
    return make_mesh(override(config, {"mesh.data": cores_of_a_run(runs)}))


def log_shared(config: ConfigDict, mesh: Mesh) -> None:
    """Says in the log that cores share each run, if the program decided so."""
    if config.mesh.data + config.mesh.expert == 1 and mesh.size > mesh.shape["run"]:
        log.info("%d cores share the rows of each run (--config.mesh.data=1: a core for each run)", mesh.size)


def cores_of_a_run(runs: Sequence[Run]) -> int:
    """Returns how many cores share the rows of each run: 1 unless most would be idle, and it is faster for all runs.

    This looks at all runs of a command, so a command that goes on shares its runs as before.
    """
    cores, programs = min(len(jax.devices()), len(os.sched_getaffinity(0))), groups(list(runs))
    if platform() != "cpu" or jax.process_count() > 1 or any(2 * len(members) > cores for members in programs):
        return 1
    configs = [members[0].config for members in programs]
    if not (configs and all(map(is_faster, configs))):  # a part of a sweep may have no runs
        return 1
    fitting = [n for n in divisors(min(config.batch_size for config in configs)) if 1 < n <= cores]
    return max((n for n in fitting if all(can_share(config, n) for config in configs)), default=1)


def is_faster(config: ConfigDict) -> bool:
    """True if cores that share the rows of a step take less time than a core and its idle neighbours."""
    problem = problem_of(config)
    cost = problem.cost(config)
    if not problem.shareable or cost.parameters is None or contested(config):
        return False
    return cost.flops >= WORK * cost.parameters()


def can_share(config: ConfigDict, devices: int) -> bool:
    """True if these devices can share the batches of training, and the blocks of each evaluation."""
    shared = override(config, {"mesh.data": devices})
    try:
        for active in parts_of(shared):
            active.part.check(shared)
        for split, rows in problem_of(shared).shared_arrays(shared).items():
            if isinstance(rows, TextBatch):
                in_blocks(shared, rows, split)
    except UserError:
        return False
    return True
