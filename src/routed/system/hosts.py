"""Several hosts for one run: how they find each other, what they agree on, and what one of them does for all.

With one process every function does what it would do without hosts.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from absl import logging as log
from jax.experimental import multihost_utils

from routed.contracts import UserError

Made = TypeVar("Made")

#: Seconds without a sign of life after which a process counts as dead, and seconds that processes wait for each other at the end.
HEARTBEAT, LEAVE = 30, 10

#: The port of the coordinator where the environment names hosts only.
PORT = 8476


def join(coordinator: str, processes: int, process: int, seconds: int) -> None:
    """Joins the run's other processes; `coordinator` is HOST:PORT, or `auto`: TPU, Slurm, SkyPilot, Open MPI, Kubernetes say it.

    Before JAX's first use only.

    Raises:
      UserError: an unknown host, nothing found, or hosts with different numbers of devices.
    """
    where = from_environment(os.environ) if coordinator == "auto" else _explicit(coordinator, processes, process)
    if where:
        log.info(
            "joining %s as process %s of %s; waiting for all at most %d s",
            where["coordinator_address"], where["process_id"], where["num_processes"], seconds,
        )  # fmt: skip
    # Its handler of SIGTERM would take the place of ours, which saves first.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **where, initialization_timeout=seconds, heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=LEAVE
        )
    except (ValueError, RuntimeError) as error:
        if where:
            raise UserError(f"--coordinator={coordinator}: {error}") from error
        raise UserError(
            "--coordinator=auto: neither TPU, Slurm, SkyPilot, Open MPI nor Kubernetes named other processes"
            f" ({error}); give --coordinator=HOST:PORT --num_processes=N --process_id=I"
        ) from error
    log.info("process %d of %d is here", jax.process_index(), jax.process_count())
    devices = {i: sum(d.process_index == i for d in jax.devices()) for i in range(jax.process_count())}
    if len(set(devices.values())) > 1:
        counts = ", ".join(f"process {i} has {n}" for i, n in devices.items())
        raise UserError(f"every process needs the same number of devices: {counts}")
    if not is_first():
        log.set_verbosity(log.WARNING)  # process 0 speaks for all


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """What SkyPilot says, as arguments of jax.distributed.initialize; nothing where JAX itself has to find them."""
    if "SKYPILOT_NODE_RANK" not in environment:
        return {}
    hosts = environment["SKYPILOT_NODE_IPS"].split()
    return {
        "coordinator_address": f"{hosts[0]}:{PORT}",
        "num_processes": len(hosts),
        "process_id": int(environment["SKYPILOT_NODE_RANK"]),
    }


def _explicit(coordinator: str, processes: int, process: int) -> dict[str, Any]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 <= process < processes:
        raise UserError(
            f"--coordinator={coordinator} --num_processes={processes} --process_id={process}: expected HOST:PORT, the number"
            " of processes, and this one's number, from 0"
        )
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise UserError(f"--coordinator={coordinator}: host {host!r} is not known here ({error.strerror})") from None
    return {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}


def is_first() -> bool:
    """Is this the process that writes?"""
    return jax.process_index() == 0


def fetch(tree: Any) -> Any:
    """The whole arrays of `tree` on every host, wherever their shards are."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def any_process(flag: bool) -> bool:
    """Does any process say so? All ask together."""
    return bool(np.any(_all(np.array(flag))))


def min_over_processes(number: int) -> int:
    """The smallest of the processes' numbers."""
    return int(np.min(_all(np.array(number, np.float64))))


def _all(value: np.ndarray) -> np.ndarray:
    return value if jax.process_count() == 1 else multihost_utils.process_allgather(value)


def broadcast_from_first(text: str) -> str:
    """The text of process 0, on every process."""
    if jax.process_count() == 1:
        return text
    raw = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(raw.size)))
    own = raw if is_first() else np.zeros(size, np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(own)).decode(errors="surrogateescape") if size else ""


def require_equal(what: str, value: Any, remedy: str) -> None:
    """Raises unless `value` is equal, by its text, on all processes.

    Raises:
      UserError: it names the processes.
    """
    digest = np.frombuffer(hashlib.sha256(repr(value).encode()).digest()[:8], np.uint32)
    others = np.atleast_2d(_all(digest))
    odd = np.flatnonzero((others != others[:1]).any(1)).tolist()
    if odd:
        raise UserError(f"process {', '.join(map(str, odd))} has another {what} than process 0: {remedy}")


def once(action: Callable[[], Any]) -> None:
    """Process 0 does `action`, and all go on when it is done.

    Raises:
      UserError: in every process, where process 0 raised it.
    """
    if jax.process_count() == 1:
        action()
        return
    problem = ""
    if is_first():
        try:
            action()
        except UserError as error:
            problem = str(error)
    if problem := broadcast_from_first(problem):
        raise UserError(problem)


def first_process_first(make: Callable[[], Made]) -> Made:
    """What `make` returns here: process 0 calls it first, and the others when what it left on the disk is there.

    Raises:
      UserError: in every process, where process 0 raised it.
    """
    made: list[Made] = []
    once(lambda: made.append(make()))
    return made[0] if made else make()
