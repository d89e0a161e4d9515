"""Supervises one process of a multi-host run, so that a dead peer ends in one readable line and not in a stack trace.

When a peer dies, JAX's coordination service ends the survivors inside C++ (`LOG(FATAL)`), where no Python handler runs.
So each process of such a run is the child of a small process, which does not import JAX, passes signals down and lines
up, and reads the last lines when the child ends.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import signal
import subprocess
import sys

from routed.system.signals import DIVERGED

#: The environment variable that marks the child.
MARK = "ROUTED_SUPERVISED"

#: Lines of routed's log, and the line with the number of the child's process.
LOG_LINE, JOINED = re.compile(r"\d\d:\d\d:\d\d "), re.compile(r"process (\d+) of \d+")

#: The start of the messages of XLA and Python on a failure: glog's lines, stack traces. From there on all lines but
#: those of routed's log are withheld.
ENDING = re.compile(r"[EF]\d{4} \d\d:\d\d:\d\d|Traceback \(most recent call last\)|\*\*\* Check failure")

#: Messages of the coordination service on lost processes: the first that left on its own; one that stopped answering;
#: one that missed the end after its connection broke; and a failed start.
LEFT = re.compile(r"The first task at the barrier: (\d+)\.")

SILENT = re.compile(r"(?:Task |stopped sending heartbeats\):\n)(\d+)")

MISSING = re.compile(r"timed out task names:\n(\d+)")

UNMET = re.compile(r"CoordinationService/RegisterTask")

#: Linux's PR_SET_PDEATHSIG: the child gets a signal when its parent dies.
PARENT_DEATH = 1


def supervise(command: list[str], coordinator: str) -> int:
    """Runs `command` as a child and returns its exit code; if a peer was lost, prints that and returns 1."""
    child = subprocess.Popen(
        command,
        env=os.environ | {MARK: "1"},
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # a terminal's signals reach this process only, which passes each down once
        preexec_fn=lambda: ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGTERM),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    withheld: collections.deque[str] = collections.deque(maxlen=400)
    explained, process = False, -1
    assert child.stderr is not None
    for line in child.stderr:
        time = LOG_LINE.match(line)
        if time is None and (withheld or ENDING.match(line)):
            withheld.append(line)
            continue
        sys.stderr.write(line)
        sys.stderr.flush()
        explained |= time is not None and line[time.end() :].startswith("error: ")
        process = int(joined[1]) if (joined := JOINED.search(line)) else process
    code = child.wait()
    if code in (0, DIVERGED) or (explained and code != -signal.SIGKILL):
        return code if code >= 0 else 2
    problem = diagnosis(code, "".join(withheld), process, coordinator)
    sys.stderr.write(f"error: {problem}\n" if problem else "".join(withheld))
    return 1 if code < 0 else code


def diagnosis(code: int, ending: str, process: int, coordinator: str) -> str:
    """The cause of the end of a process, in one line; empty if its own last lines explain it.

    `process` is its number, -1 if it never joined the others.
    """
    resume = "the same command, started on every host again, goes on from the last checkpoint"
    name = f"process {process}" if process >= 0 else "this process"
    if code < 0 and code != -signal.SIGABRT:
        reason = signal.Signals(-code).name
        return f"{name} was killed ({reason}{'; out of memory?' if reason == 'SIGKILL' else ''}): {resume}"
    if UNMET.search(ending):
        return (
            f"{name} met nobody, or not all, at {coordinator}: start all processes of the run, with the same"
            " --coordinator and --num_processes, where that host and port can be reached"
        )
    is_broken = "Gloo" in ending  # a connection between CPUs: then processes that still live leave first
    if (left := None if is_broken else LEFT.search(ending)) and int(left[1]) != process:
        return f"process {left[1]} ended with an error of its own (see its last line), so {name} stopped: {resume}"
    lost = SILENT.findall(ending) + (MISSING.findall(ending) if is_broken else [])
    if dead := [number for number in lost if int(number) != process]:
        return f"process {dead[0]} died, so {name} stopped: {resume}"
    if "Socket closed" in ending or "UNAVAILABLE" in ending:
        return f"process 0, which coordinates, died, so {name} stopped: {resume}"
    return ""
