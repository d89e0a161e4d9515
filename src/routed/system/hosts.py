"""Several hosts for one run: their connection, their agreement, and actions of one process for all.

With one process, every function works without communication.
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

Result = TypeVar("Result")

#: Seconds without a heartbeat after which a process counts as dead, and seconds that processes wait for each other at
#: the end.
HEARTBEAT, LEAVE = 30, 10

#: The port of the coordinator if the environment names hosts only.
PORT = 8476


def join(coordinator: str, processes: int, process: int, seconds: int) -> None:
    """Joins the run's other processes; `coordinator` is HOST:PORT, or `auto` if the cluster names the processes.

    Before JAX's first use only.

    Raises:
      UserError: an unknown host, no other processes, or hosts with different numbers of devices.
    """
    options = from_environment(os.environ) if coordinator == "auto" else _explicit(coordinator, processes, process)
    if options:
        form = "joining %s as process %s of %s; waiting for all at most %d s"
        address, count = options["coordinator_address"], options["num_processes"]
        log.info(form, address, options["process_id"], count, seconds)
    # JAX's handler of SIGTERM would replace `execution`'s handler, which saves first.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=LEAVE,
        )
    except (ValueError, RuntimeError) as error:
        if options:
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
        log.set_verbosity(log.WARNING)  # process 0 logs for all


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of jax.distributed.initialize from SkyPilot's variables; empty where JAX itself has to find them."""
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
            f"--coordinator={coordinator} --num_processes={processes} --process_id={process}: expected HOST:PORT, the"
            " number of processes, and this one's number, from 0"
        )
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise UserError(f"--coordinator={coordinator}: host {host!r} is not known here ({error.strerror})") from None
    return {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}


def is_first() -> bool:
    """True in the process that writes."""
    return jax.process_index() == 0


def fetch(tree: Any) -> Any:
    """Copies the whole arrays of `tree` to every host, wherever their shards are."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def any_process(flag: bool) -> bool:
    """True if the flag of any process is true; all processes must call it."""
    return bool(np.any(_gather(np.array(flag))))


def min_over_processes(number: int) -> int:
    """The smallest of the processes' numbers."""
    return int(np.min(_gather(np.array(number, np.float64))))


def _gather(value: np.ndarray) -> np.ndarray:
    return value if jax.process_count() == 1 else multihost_utils.process_allgather(value)


def broadcast_from_first(text: str) -> str:
    """Returns the text of process 0 on every process."""
    if jax.process_count() == 1:
        return text
    raw = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(raw.size)))
    content = raw if is_first() else np.zeros(size, np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(content)).decode(errors="surrogateescape") if size else ""


def require_equal(what: str, value: Any, remedy: str) -> None:
    """Refuses values that differ between processes, by their text.

    Raises:
      UserError: names the processes.
    """
    digest = np.frombuffer(hashlib.sha256(repr(value).encode()).digest()[:8], np.uint32)
    digests = np.atleast_2d(_gather(digest))
    different = np.flatnonzero((digests != digests[:1]).any(1)).tolist()
    if different:
        raise UserError(f"process {', '.join(map(str, different))} has another {what} than process 0: {remedy}")


def once(action: Callable[[], Any]) -> None:
    """Calls `action` in process 0; all processes wait for its end.

    Raises:
      UserError: in every process, if process 0 raised it.
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


def first_process_first(make: Callable[[], Result]) -> Result:
    """Returns `make()`; process 0 calls it first, and the other processes when its files are on the disk.

    Raises:
      UserError: in every process, if process 0 raised it.
    """
    results: list[Result] = []
    once(lambda: results.append(make()))
    return results[0] if results else make()
