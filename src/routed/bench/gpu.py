"""One GPU in less than eight minutes: a table of MoE layers (`gpu_layers`), then seeds, the T5 and a sweep.

Every part has a process and a share of the budget; later parts get the time that it leaves. A case that fails, dies,
hangs or has no time left is a record that says so, and the others go on: cells of the column of a case that died come
last. This process asks for no device, which would take its memory.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from routed.bench.gpu_parts import PARTS, part_of
from routed.bench.gpu_table import Shares, aims, as_table

#: Seconds for everything.
BUDGET = 475.0
#: Beginning of a record among the lines of a process.
RECORD = '{"part":'


__all__ = ["as_table", "bench"]


def bench(rounds: int, topology: str = "") -> Iterator[dict[str, Any]]:
    """Yields a record {part, case, ...} of each case: measurements, or `failed` and `do`, or `left_out`; a summary.

    With a `topology` (h100:1) it compiles the table's cells for it and runs nothing.
    """
    started, records, shares = time.monotonic(), list[dict[str, Any]](), Shares()
    parts = {topology: math.inf} if topology else {name: part.seconds for name, part in PARTS.items()}
    later, budget = sum(parts.values()), math.inf if topology else BUDGET
    for name, seconds in parts.items():
        later = 0.0 if topology else later - seconds
        for record in part_records(name, rounds, started + budget - later):
            records.append(shares.add(record))
            yield records[-1]
    used = round(time.monotonic() - started, 1)
    named = {kind: [f"{r['part']}: {r['case']}" for r in records if kind in r] for kind in ("failed", "left_out")}
    yield {"part": "all", "budget_seconds": None if topology else budget, "seconds": used, **named} | (
        {} if topology else aims(records)
    )


class End(NamedTuple):
    """End of a process: exit code, last line of its errors, and True if its time was over."""

    code: int
    last: str
    late: bool


def part_records(part: str, rounds: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Yields the records of a part's cases, from processes that end at the deadline; a death costs its case alone."""
    about = part_of(part)
    waiting, alone = [*about.cases], f"alone: python -m routed.bench.gpu_parts {part}"
    share = max(deadline - time.monotonic(), 0.0)
    while waiting and (left := deadline - time.monotonic()) > 1:
        before = len(waiting)
        end = yield from child(command(part, waiting, rounds), left, about.patience, waiting)
        if end.late and time.monotonic() >= deadline - 0.5:
            break
        if waiting and (end.late or end.code or len(waiting) == before):
            reason = f"its process ended with {end.code}: {end.last}"
            reason = f"nothing came for {about.patience:.0f} s: {end.last}" if end.late else reason
            dead = waiting.pop(0)
            yield {"part": part, "case": dead, "failed": reason, "do": f"{about.memory or 'see above'}; {alone}"}
            waiting.sort(key=lambda case: column_of(case) == column_of(dead))
    for case in waiting:
        reason = f"the {share:.0f} s that the budget had for this part are over; {alone} {case!r}"
        yield {"part": part, "case": case, "left_out": reason}


def column_of(case: str) -> str:
    """Returns the column of a cell, or a case's name."""
    return case.rpartition(": ")[2]


class Alarm:
    """Kills a process after `seconds` of its start, or `patience` seconds behind the last `wait`."""

    def __init__(self, process: subprocess.Popen[str], seconds: float, patience: float):
        self.process, self.deadline, self.patience = process, time.monotonic() + seconds, patience
        self.late, self.timer = threading.Event(), threading.Timer(0, self.stop)

    def wait(self) -> None:
        """Starts to wait anew."""
        self.timer.cancel()
        seconds = min(self.patience, self.deadline - time.monotonic())
        if seconds < math.inf:
            self.timer = threading.Timer(max(seconds, 0.0), self.stop)
            self.timer.start()

    def stop(self) -> None:
        """Kills the process."""
        self.late.set()
        self.process.kill()


def child(
    arguments: list[str], seconds: float, patience: float, waiting: list[str]
) -> Generator[dict[str, Any], None, End]:
    """Yields the records that a process prints and removes their cases from `waiting`.

    Kills it after `seconds`, or `patience` seconds without a record.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8", errors="replace"
        ) as process,
    ):
        alarm = Alarm(process, seconds, patience)
        alarm.wait()
        try:
            for line in process.stdout or ():
                if line.startswith(RECORD):
                    record = json.loads(line)
                    alarm.wait()
                    waiting.remove(record["case"])
                    yield record
            code = process.wait()
        finally:
            alarm.timer.cancel()
            process.kill()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if lines:
        print("\n".join(lines[-20:]), file=sys.stderr)
    return End(code, " ".join(lines[-1].split())[:300] if lines else "nothing was said", alarm.late.is_set())


def command(part: str, cases: list[str], rounds: int) -> list[str]:
    """Returns the command of a part's process."""
    return [sys.executable, "-c", f"from routed.bench import gpu_parts; gpu_parts.run({part!r}, {cases!r}, {rounds})"]
