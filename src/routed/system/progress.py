"""The progress of a command: a bar below the log in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

from absl import logging as log
from tqdm import tqdm

from routed.system import machine

#: Seconds between two lines, and between two pictures of the bar.
LINES, PICTURES = 10.0, 0.2


class Work(NamedTuple):
    """The work of a group of runs: steps of single runs, and their cost in a unit that all groups share.

    A step of a run has `tokens` tokens and `flops` model FLOPs; None where steps alone are shown.
    """

    name: str
    steps: int
    cost: float
    tokens: int = 0
    flops: float | None = None


class Progress:
    """Follows the batches of a command: shows the batch, its step, loss and speed, and the time left for all batches.

    With model FLOPs also tokens a second and the MFU, model FLOPs utilisation (Chowdhery et al. 2022).
    """

    def __init__(self, works: Iterable[Work], batches: int):
        self.works, self.batches = [*works], batches
        self.steps_done = [0] * len(self.works)
        self.compile_seconds: dict[int, float] = {}  # by group
        self.step_seconds: dict[int, float] = {}  # of a whole batch, by group
        self.batch, self.group = 0, 0  # number of the batch, from 1; index of its group
        self.cost_timed, self.seconds_timed = 0.0, 0.0  # of the steps in this process
        self.steps_unshown, self.seconds_unshown = 0, 0.0  # of the batch since its last line
        self.interval, self.last_shown, self.last_report = LINES, time.monotonic(), time.monotonic()
        self.handler = log.get_absl_handler().python_handler
        self.stream, self.bar = self.handler.stream, None
        if sys.stderr.isatty():
            form = "{percentage:3.0f} %|{bar:12}| {desc}"  # the speed comes last, where a narrow terminal cuts
            self.bar = tqdm(total=1.0, bar_format=form, dynamic_ncols=True, leave=False)
            self.interval, self.handler.stream = PICTURES, _AboveTheBar()

    def begin(self, group: int) -> None:
        """Begins the next batch, of this group, whose program may have to be compiled."""
        self.batch, self.group = self.batch + 1, group
        self.steps_unshown, self.seconds_unshown = 0, 0.0
        if group not in self.compile_seconds:
            self._show(f"compiling {self.works[group].name}")

    def compiled(self, seconds: float) -> None:
        """Notes the seconds in which the batch's program was compiled."""
        self.compile_seconds[self.group] = seconds
        self.last_report += seconds

    def resume(self, steps: int) -> None:
        """Notes steps of the batch's runs that an earlier process took."""
        self.steps_done[self.group] += steps

    def report(self, steps: int, step: int, loss: float) -> None:
        """Reports that the batch's runs took `steps` more steps and are at `step`; shows it now and then."""
        now, work = time.monotonic(), self.works[self.group]
        seconds, self.last_report = now - self.last_report, now
        self.resume(steps)
        self.cost_timed += steps * work.cost / work.steps
        self.seconds_timed += seconds
        self.steps_unshown += steps
        self.seconds_unshown += seconds
        finished = not self._unfinished()
        if now - self.last_shown >= self.interval or finished:
            loss_text = "" if math.isnan(loss) else f", train loss {loss:.4f}"
            self._show(f"{work.name}: step {step}{loss_text}{self._speed_text()}")
            self.steps_unshown, self.seconds_unshown, self.last_shown = 0, 0.0, now

    def measure_pace(self, steps: int, seconds: float) -> None:
        """Notes that the whole batch took `steps` steps in `seconds` seconds."""
        if steps:
            self.step_seconds[self.group] = seconds / steps

    def steps_within(self, seconds: float, most: int) -> int:
        """The steps, from 1 to `most`, that the batch takes in `seconds` seconds; 1 if its pace is unknown."""
        pace = self.step_seconds.get(self.group)
        return 1 if pace is None else int(min(max(seconds / pace, 1), most))

    def close(self) -> None:
        """Removes the bar, and gives the log its stream back."""
        self.handler.stream = self.stream
        if self.bar is not None:
            self.bar.close()

    def seconds_left(self) -> float | None:
        """Predicts the seconds until all groups are done, from the cost of the steps so far; None before any step.

        A program that is not compiled yet takes as long to compile as the others did.
        """
        if not self.cost_timed:
            return None
        to_compile = [i for i in self._unfinished() if i not in self.compile_seconds]
        compile_mean = sum(self.compile_seconds.values()) / max(len(self.compile_seconds), 1)
        return self.seconds_timed / self.cost_timed * self._cost_left() + compile_mean * len(to_compile)

    def fraction_done(self) -> float:
        """The fraction of all work that is done, by its cost; 1 at the end."""
        return 1 - self._cost_left() / sum(work.cost for work in self.works)

    def _unfinished(self) -> list[int]:
        return [i for i, work in enumerate(self.works) if self.steps_done[i] < work.steps]

    def _cost_left(self) -> float:
        return sum(self.works[i].cost * (1 - self.steps_done[i] / self.works[i].steps) for i in self._unfinished())

    def _show(self, text: str) -> None:
        left, done = self.seconds_left(), self.fraction_done()
        time_left = "" if left is None else f", about {tqdm.format_interval(left)} left"
        text = f"batch {self.batch} of {self.batches}{time_left}; {text}"
        if self.bar is None:
            log.info("%d %% done, %s", 100 * done, text)
        else:
            self.bar.n = done
            self.bar.set_description_str(text)

    def _speed_text(self) -> str:
        work, rate = self.works[self.group], self.steps_unshown / max(self.seconds_unshown, 1e-9)
        if not rate:
            return ""
        if work.flops is None:
            return f", {rate:.3g} steps/s"
        percent = 100 * rate * work.flops / machine.peak()
        mfu = (
            f"{percent:.2g} %" if percent <= 100 else "unknown: other work ran while the processor's rate was measured"
        )
        return f", {rate:.3g} steps/s, {rate * work.tokens:.3g} tokens/s, MFU {mfu}"


class _AboveTheBar:
    """A stream for the log, whose lines appear above the bar."""

    def write(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr, end="")

    def flush(self) -> None:
        sys.stderr.flush()
