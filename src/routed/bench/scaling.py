"""Scaling of runs over devices: bytes of the collectives of a step, and the throughput of a sweep.

Bytes of the T5's training step on 8 virtual devices, runs an hour of the Gaussian bench on 1 to 8 cores. `bench pods`
compiles for pods.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import jax

from routed.bench import gmm
from routed.bench.batch import Batch
from routed.bench.collectives import MESHES, SMALL, collectives
from routed.bench.harness import in_new_process
from routed.plan.config import base, canonical
from routed.settings.tree import override


def bench(rounds: int) -> list[dict[str, Any]]:
    """Returns the records of `collectives` and of `sweep`."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the sweep's processes
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # before anything asks JAX for its devices
    moved = [record for mesh in MESHES for record in collectives(override(base(), SMALL), *mesh)]
    return [*moved, *sweep(rounds)]


def sweep(rounds: int) -> list[dict[str, Any]]:
    """Returns records {devices, cores, runs_per_hour, share_of_linear}; more devices than cores cannot be faster."""
    records: list[dict[str, Any]] = []
    for devices in (1, 2, 4, 8):
        rate = in_new_process(f"from routed.bench import scaling; print(scaling.runs_per_hour({devices}, {rounds}))")
        share = rate / devices / (records[0]["runs_per_hour"] if records else rate)
        cores = len(os.sched_getaffinity(0))
        records.append({"devices": devices, "cores": cores, "runs_per_hour": rate, "share_of_linear": share})
    return records


def runs_per_hour(devices: int, rounds: int) -> float:
    """Returns the runs an hour of the Gaussian bench (constant experts, 4,000 steps of 512), a device for each core.

    Restricts this process to these cores, since one device would use the others too.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:devices])
    jax.config.update("jax_num_cpu_devices", devices)
    changes, steps, _ = gmm.CASES["constant"]
    batch = Batch(canonical(override(base(), gmm.COMMON | changes)), 32, steps)
    batch.train()  # the first call touches the memory
    return 3600 / base().steps / statistics.median(batch.step() for _ in range(rounds))
