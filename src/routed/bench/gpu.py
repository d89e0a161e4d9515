"""One GPU in less than nine minutes: dispatches, the T5, a sweep and its batching, each beside its floor (`gpu_parts`).

Every part has a process of its own and a share of the budget; what it leaves, later parts have too. A case that fails, dies or has no
time left is a record that says so, and the others go on. Nothing here asks for the device, or its memory would be gone.
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
from routed.contracts import UserError

#: Seconds for everything.
BUDGET = 520.0
#: How a record begins among the lines of a process.
RECORD = '{"part":'


def bench(rounds: int, baseline: str | None) -> Iterator[dict[str, Any]]:
    """A record {part, case, ...} of each case: what was measured, or `failed` and what to `do`, or `left_out`; at the end one of all.

    Raises:
      UserError: a baseline was asked for.
    """
    if baseline:
        raise UserError("--baseline: bench gpu compares with floors")
    begun, failed, left_out = time.monotonic(), list[str](), list[str]()
    for place, part in enumerate(PARTS):
        later = sum(one.seconds for one in [*PARTS.values()][place + 1 :])
        for record in part_records(part, rounds, begun + BUDGET - later):
            name = f"{part}: {record['case']}"
            failed += [name] * ("failed" in record)
            left_out += [name] * ("left_out" in record)
            yield _shown(record)
    used = round(time.monotonic() - begun, 1)
    yield _shown({"part": "all", "budget_seconds": BUDGET, "seconds": used, "failed": failed, "left_out": left_out})


class Ended(NamedTuple):
    """How a process ended: its exit code, the last line that it said, and whether it was out of time."""

    code: int
    last: str
    late: bool


def part_records(part: str, rounds: int, deadline: float) -> Iterator[dict[str, Any]]:
    """The records of a part's cases, in processes that end at the deadline; one that dies takes only its case with it."""
    waiting, alone = [*PARTS[part].cases], f"alone: python -m routed.bench.gpu_parts {part}"
    share = max(deadline - time.monotonic(), 0.0)
    while waiting and (left := deadline - time.monotonic()) > 1:
        before = len(waiting)
        ended = yield from child(command(part, waiting, rounds), left, waiting)
        if ended.late:
            break
        if waiting and (ended.code or len(waiting) == before):
            why = f"its process ended with {ended.code}: {ended.last}"
            yield {
                "part": part,
                "case": waiting.pop(0),
                "failed": why,
                "do": f"{PARTS[part].memory or 'see above'}; {alone}",
            }
    for case in waiting:
        why = f"the {share:.0f} s that the budget had for this part are over; {alone} {case!r}"
        yield {"part": part, "case": case, "left_out": why}


def child(words: list[str], seconds: float, waiting: list[str]) -> Generator[dict[str, Any], None, Ended]:
    """The records that a process prints, whose cases are then no longer `waiting`; it is killed after so many seconds."""
    late = threading.Event()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said, encoding="utf-8", errors="replace") as process,
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
        said.seek(0)
        lines = said.read().strip().splitlines()
    if lines:
        print("\n".join(lines[-20:]), file=sys.stderr)
    return Ended(code, " ".join(lines[-1].split())[:300] if lines else "nothing was said", late.is_set())


def command(part: str, cases: list[str], rounds: int) -> list[str]:
    """The process of a part."""
    return [sys.executable, "-c", f"from routed.bench import gpu_parts; gpu_parts.run({part!r}, {cases!r}, {rounds})"]


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()), flush=True)
    return record
