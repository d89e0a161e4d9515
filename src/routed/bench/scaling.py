"""How runs scale over devices: what the collectives of a step move, and the throughput of a sweep.

Measured: bytes of the T5's training step on 8 virtual devices, runs an hour of the Gaussian bench on 1 to 8 cores. What pods would take
is compiled for them: `bench pods`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Any

import jax

from routed.bench import gmm
from routed.bench.collectives import MESHES, SMALL, collectives
from routed.plan.config import base, canonical
from routed.settings.tree import override


def runs_per_hour(devices: int, rounds: int) -> float:
    """Runs an hour of the Gaussian bench with constant experts (4,000 steps of 512) on so many cores, a device each.

    For a process of its own, which it keeps to these cores: one device would use the others too.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:devices])
    jax.config.update("jax_num_cpu_devices", devices)
    changes, steps = gmm.CASES["constant"]
    timed = gmm.Timed(canonical(override(base(), gmm.COMMON | changes)), 32, steps)
    return 3600e3 / base().steps / statistics.median(timed() for _ in range(rounds))


def sweep(rounds: int) -> list[dict[str, Any]]:
    """Records {devices, cores, runs_per_hour, share_of_linear}; devices beyond the cores cannot be faster."""
    records: list[dict[str, Any]] = []
    for devices in (1, 2, 4, 8):
        code = f"from routed.bench import scaling; print(scaling.runs_per_hour({devices}, {rounds}))"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8", check=True)
        rate = float(done.stdout.split()[-1])
        share = rate / devices / (records[0]["runs_per_hour"] if records else rate)
        cores = len(os.sched_getaffinity(0))
        records.append({"devices": devices, "cores": cores, "runs_per_hour": rate, "share_of_linear": share})
    return records


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """Records of `collectives` and of `sweep`."""
    del baseline
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the sweep's processes
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # before anything asks JAX for its devices
    moved = [record for mesh in MESHES for record in collectives(override(base(), SMALL), *mesh)]
    return [*moved, *sweep(rounds)]
