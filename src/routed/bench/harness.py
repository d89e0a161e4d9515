"""Harness of the benches: cases timed in turn with a baseline, each beside the floor of its work."""

from __future__ import annotations

import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from routed.contracts import UserError
from routed.system.machine import floor, rates

T = TypeVar("T")

#: Units of times -> how many a second has.
UNITS = {"ms": 1e3, "seconds": 1.0}


class Work(NamedTuple):
    """Least work of a timed call: FLOPs of products of `dtype`, and bytes that the memory moves."""

    flops: float
    moved: float = 0.0
    dtype: str = "float32"


class Case(NamedTuple):
    """A case of a bench: columns that name it, and what is timed.

    `times` maps a column, which begins with its unit (ms or seconds), to a call that returns seconds. The last of them
    has the least `work`, and is compared with the baseline's lines of the label `peer`.
    """

    about: dict[str, Any]
    times: dict[str, Callable[[], float]]
    work: Work | None = None
    peer: str = ""


class Lines(NamedTuple):
    """Lines that a baseline prints: a pattern of a label and numbers, the form in words, and labels that must occur."""

    pattern: str
    form: str
    labels: tuple[str, ...] = ()


class Baseline:
    """A command of the user's that prints times, run in turn with the cases."""

    def __init__(self, command: str | None, lines: Lines):
        self.command, self.lines = command, lines
        self.rounds: dict[str, list[tuple[float, ...]]] = defaultdict(list)

    def run(self) -> dict[str, tuple[float, ...]]:
        """Runs the command; returns label -> numbers, the means where several lines have one label.

        Raises:
          UserError: the command fails, or a label is missing.
        """
        if not self.command:
            return {}
        done = subprocess.run(shlex.split(self.command), capture_output=True, encoding="utf-8")
        numbers = defaultdict(list)
        for label, *texts in re.findall(f"(?m)^{self.lines.pattern}", done.stdout):
            numbers[label].append([float(text) for text in texts])
        if done.returncode or not numbers:
            raise UserError(f"--baseline={self.command}: exit code {done.returncode}, expected lines {self.lines.form}")
        if {*self.lines.labels} - {*numbers}:
            raise UserError(
                f"--baseline={self.command}: expected lines {self.lines.form}, got only {', '.join(numbers)}"
            )
        means = {label: tuple(map(statistics.fmean, zip(*rows, strict=True))) for label, rows in numbers.items()}
        for label, values in means.items():
            self.rounds[label].append(values)
        return means

    def medians(self) -> dict[str, tuple[float, ...]]:
        """Returns label -> medians of the numbers over all rounds."""
        return {label: tuple(map(statistics.median, zip(*rows, strict=True))) for label, rows in self.rounds.items()}


def restricted(cases: Mapping[tuple[Any, ...], T], only: str) -> dict[tuple[Any, ...], T]:
    """Returns the cases whose names, joined by spaces, have a match of the regular expression `only`.

    Raises:
      UserError: none has.
    """
    chosen = {names: case for names, case in cases.items() if re.search(only, " ".join(map(str, names)))}
    if not chosen:
        raise UserError(f"--only={only}: no case; there are {', '.join(' '.join(map(str, names)) for names in cases)}")
    return chosen


def timed(cases: Sequence[Case], rounds: int, baseline: Baseline | None = None) -> list[dict[str, Any]]:
    """Times all cases and the baseline in turn; returns a record of each case, of medians over the rounds.

    A record has the columns `about`, each time, the shortest of the last time, and where they are known `floor_UNIT`,
    `bound` ("FLOPs" or "bytes"), `over_floor` (time over floor), `baseline_UNIT` and `speedup` (baseline over time).
    """
    if any(case.work for case in cases):
        rates()  # measured while nothing else runs
    values = [{column: list[float]() for column in case.times} for case in cases]
    for _ in range(rounds):
        for case, columns in zip(cases, values, strict=True):
            for column, seconds in case.times.items():
                columns[column].append(seconds())
        if baseline:
            baseline.run()
    peers = baseline.medians() if baseline else {}
    return [_record(case, columns, peers) for case, columns in zip(cases, values, strict=True)]


def _record(case: Case, values: dict[str, list[float]], peers: dict[str, tuple[float, ...]]) -> dict[str, Any]:
    record = dict(case.about)
    for column, seconds in values.items():
        unit = column.partition("_")[0]
        record[column] = UNITS[unit] * statistics.median(seconds)
    record[f"fastest_{column}"] = UNITS[unit] * min(seconds)
    if case.work:
        record |= beside_floor(record[column], case.work, unit)
    if case.peer in peers:
        theirs = peers[case.peer][0]
        record |= {f"baseline_{unit}": theirs, "speedup": theirs / record[column]}
    return record


def beside_floor(time: float, work: Work, unit: str) -> dict[str, Any]:
    """Returns the floor of some work, the larger of FLOPs and bytes at the machine's rates, and a time over it."""
    least, bound = floor(rates(), *work)
    return {f"floor_{unit}": UNITS[unit] * least, "bound": bound, "over_floor": time / (UNITS[unit] * least)}


def seconds_of(run: Callable[[], Any]) -> tuple[Any, float]:
    """Calls a function; returns its arrays when they are computed, and the seconds."""
    started = time.perf_counter()
    results = jax.block_until_ready(run())
    return results, time.perf_counter() - started


def in_new_process(code: str) -> float:
    """Runs Python code in a new process; returns the last number that it prints."""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return float(done.stdout.split()[-1])


def peak_bytes() -> int:
    """Returns the most memory that this process has used."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def as_line(record: dict[str, Any]) -> str:
    """Returns a record as a line of text."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in record.items()
    )
