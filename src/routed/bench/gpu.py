"""One GPU in less than nine minutes: dispatches, the T5, a sweep and its batching, each beside its floor (`gpu_parts`).

Every part has a process and a share of the budget; later parts get the time that it leaves. A case that fails, dies or
has no time left is a record that says so, and the others go on. This process asks for no device, which would take its
memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from routed.bench.gpu_parts import PARTS

#: Seconds for everything.
BUDGET = 520.0
#: Beginning of a record among the lines of a process.
RECORD = '{"part":'


def bench(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a record {part, case, ...} of each case: measurements, or `failed` and `do`, or `left_out`; a summary."""
    started, failed, left_out = time.monotonic(), list[str](), list[str]()
    later = sum(part.seconds for part in PARTS.values())
    for name, part in PARTS.items():
        later -= part.seconds
        for record in part_records(name, rounds, started + BUDGET - later):
            case = f"{name}: {record['case']}"
            failed += [case] * ("failed" in record)
            left_out += [case] * ("left_out" in record)
            yield record
    used = round(time.monotonic() - started, 1)
    yield {"part": "all", "budget_seconds": BUDGET, "seconds": used, "failed": failed, "left_out": left_out}


class End(NamedTuple):
    """End of a process: exit code, last line of its errors, and True if its time was over."""

    code: int
    last: str
    late: bool


def part_records(part: str, rounds: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Yields the records of a part's cases, from processes that end at the deadline; a death costs its case alone."""
    waiting, alone = [*PARTS[part].cases], f"alone: python -m routed.bench.gpu_parts {part}"
    share = max(deadline - time.monotonic(), 0.0)
    while waiting and (left := deadline - time.monotonic()) > 1:
        before = len(waiting)
        end = yield from child(command(part, waiting, rounds), left, waiting)
        if end.late:
            break
        if waiting and (end.code or len(waiting) == before):
            reason, mend = f"its process ended with {end.code}: {end.last}", PARTS[part].memory or "see above"
            yield {"part": part, "case": waiting.pop(0), "failed": reason, "do": f"{mend}; {alone}"}
    for case in waiting:
        reason = f"the {share:.0f} s that the budget had for this part are over; {alone} {case!r}"
        yield {"part": part, "case": case, "left_out": reason}


def child(arguments: list[str], seconds: float, waiting: list[str]) -> Generator[dict[str, Any], None, End]:
    """Yields the records that a process prints and removes their cases from `waiting`; kills it after `seconds`."""
    late = threading.Event()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8", errors="replace"
        ) as process,
    ):

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                if line.startswith(RECORD):
                    record = json.loads(line)
                    waiting.remove(record["case"])
                    yield record
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if lines:
        print("\n".join(lines[-20:]), file=sys.stderr)
    return End(code, " ".join(lines[-1].split())[:300] if lines else "nothing was said", late.is_set())


def command(part: str, cases: list[str], rounds: int) -> list[str]:
    """Returns the command of a part's process."""
    return [sys.executable, "-c", f"from routed.bench import gpu_parts; gpu_parts.run({part!r}, {cases!r}, {rounds})"]
