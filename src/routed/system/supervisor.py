"""Supervises one process of a multi-host run, so that a dead peer ends in one readable line and not in a stack trace.

When a peer dies, JAX's coordination service ends the survivors inside C++ (`LOG(FATAL)`), where no Python handler runs. So each
process of such a run is the child of a small one, which imports nothing of JAX, passes signals down and lines up, and reads the
last ones when the child ends.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import signal
import subprocess
import sys

#: Set for the child.
MARK = "ROUTED_SUPERVISED"

#: Lines of our own log, and how the child says in them which process it is.
OWN, JOINED = re.compile(r"\d\d:\d\d:\d\d "), re.compile(r"process (\d+) of \d+")

#: Where what XLA and Python say of an end begins: glog's lines, stack traces. From there on all but our own lines are held back.
ENDING = re.compile(r"[EF]\d{4} \d\d:\d\d:\d\d|Traceback \(most recent call last\)|\*\*\* Check failure")

#: How the coordination service names who is gone: who left first, on its own; who stopped answering or, where the connection
#: to it broke first, did not come to the end; nobody, at the start.
LEFT = re.compile(r"The first task at the barrier: (\d+)\.")

SILENT = re.compile(r"(?:Task |stopped sending heartbeats\):\n)(\d+)")

MISSING = re.compile(r"timed out task names:\n(\d+)")

UNMET = re.compile(r"CoordinationService/RegisterTask")

#: Linux's PR_SET_PDEATHSIG: the child gets a signal when its parent dies.
PARENT_DEATH = 1


def supervise(command: list[str], coordinator: str) -> int:
    """Runs `command` as a child and returns its exit code; when a peer was lost says so, and returns 1."""
    child = subprocess.Popen(
        command, env=os.environ | {MARK: "1"}, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
        start_new_session=True,  # a terminal's signals reach this process only, which passes each down once
        preexec_fn=lambda: ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGTERM),
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    held: collections.deque[str] = collections.deque(maxlen=400)
    explained, me = False, -1
    assert child.stderr is not None
    for line in child.stderr:
        own = OWN.match(line)
        if own is None and (held or ENDING.match(line)):
            held.append(line)
            continue
        sys.stderr.write(line)
        sys.stderr.flush()
        explained |= own is not None and line[own.end() :].startswith("error: ")
        me = int(joined[1]) if (joined := JOINED.search(line)) else me
    code = child.wait()
    if code == 0 or (explained and code != -signal.SIGKILL):
        return code if code >= 0 else 2
    problem = diagnosis(code, "".join(held), me, coordinator)
    sys.stderr.write(f"error: {problem}\n" if problem else "".join(held))
    return 1 if code < 0 else code


def diagnosis(code: int, ending: str, me: int, coordinator: str) -> str:
    """What happened to process `me` (-1: it never knew its number), in one line; nothing if its own words are the best."""
    resume = "the same command, started on every host again, goes on from the last checkpoint"
    own = f"process {me}" if me >= 0 else "this process"
    if code < 0 and code != -signal.SIGABRT:
        name = signal.Signals(-code).name
        return f"{own} was killed ({name}{'; out of memory?' if name == 'SIGKILL' else ''}): {resume}"
    if UNMET.search(ending):
        return (
            f"{own} met nobody, or not all, at {coordinator}: start all processes of the run, with the same --coordinator"
            " and --num_processes, where that host and port can be reached"
        )
    broken = "Gloo" in ending  # a connection between CPUs: then the living leave first
    if (left := None if broken else LEFT.search(ending)) and int(left[1]) != me:
        return f"process {left[1]} ended with an error of its own (see its last line), so {own} stopped: {resume}"
    found = SILENT.findall(ending) + (MISSING.findall(ending) if broken else [])
    if gone := [number for number in found if int(number) != me]:
        return f"process {gone[0]} died, so {own} stopped: {resume}"
    if "Socket closed" in ending or "UNAVAILABLE" in ending:
        return f"process 0, which coordinates, died, so {own} stopped: {resume}"
    return ""
