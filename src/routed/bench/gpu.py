"""One GPU in less than eight minutes: a table of MoE layers (`gpu_layers`), then seeds, the T5 and a sweep.

Every part has a process and a share of the budget; later parts get the time that it leaves. A case that fails, dies,
hangs or has no time left is a record that says so, and the others go on: cells of the column of a case that died come
last. This process asks for no device, which would take its memory.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from typing import Any

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


def part_records(part: str, rounds: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Yields the records of a part's cases, from processes that end at the deadline; a death costs its case alone."""
    about = part_of(part)
    waiting, alone = [*about.cases], f"alone: python -m routed.bench.gpu_parts {part}"
    share = max(deadline - time.monotonic(), 0.0)
    while waiting and (left := deadline - time.monotonic()) > 1:
        before = len(waiting)
        arguments = command(part, waiting, rounds, deadline)
        code, last = yield from child(arguments, min(left, about.patience), waiting)
        late = code == -signal.SIGALRM
        if late and time.monotonic() >= deadline - 0.5:
            break
        if waiting and (code or len(waiting) == before):
            reason = f"nothing came for {about.patience:.0f} s" if late else f"its process ended with {code}"
            reason, dead = f"{reason}: {last}", waiting.pop(0)
            yield {"part": part, "case": dead, "failed": reason, "do": f"{about.memory or 'see above'}; {alone}"}
            waiting.sort(key=lambda case: column_of(case) == column_of(dead))
    for case in waiting:
        reason = f"the {share:.0f} s that the budget had for this part are over; {alone} {case!r}"
        yield {"part": part, "case": case, "left_out": reason}


def column_of(case: str) -> str:
    """Returns the column of a cell, or a case's name."""
    return case.rpartition(": ")[2]


def child(arguments: list[str], seconds: float, waiting: list[str]) -> Generator[dict[str, Any], None, tuple[int, str]]:
    """Yields the records that a process prints and removes their cases from `waiting`.

    The process dies after `seconds`, unless it sets its alarm anew. Returns its exit code and last line of errors.
    """
    timer = f"signal.setitimer(signal.ITIMER_REAL, {0 if math.isinf(seconds) else max(seconds, 0.01)})"
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            [*arguments[:-1], f"import signal; {timer}; {arguments[-1]}"],  # no fork: JAX has threads here
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                if line.startswith(RECORD):
                    record = json.loads(line)
                    waiting.remove(record["case"])
                    yield record
            code = process.wait()
        finally:
            process.kill()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if lines:
        print("\n".join(lines[-20:]), file=sys.stderr)
    return code, " ".join(lines[-1].split())[:300] if lines else "nothing was said"


def command(part: str, cases: list[str], rounds: int, deadline: float) -> list[str]:
    """Returns the command of a part's process."""
    run = f"gpu_parts.run({part!r}, {cases!r}, {rounds}, float('{deadline}'))"
    return [sys.executable, "-c", f"from routed.bench import gpu_parts; {run}"]
