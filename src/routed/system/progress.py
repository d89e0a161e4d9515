"""What a long run says of itself: a bar below the log in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable

from absl import logging as log
from tqdm import tqdm

from routed.system import machine
from routed.system.forecast import Course, Stretch, seconds_left, share_done

#: Stretches of a course that its pace is judged by: the last ones.
REMEMBERED = 100

#: Seconds between two lines, and between two pictures of the bar.
LINES, PICTURES = 10.0, 0.2


class Progress:
    """Follows the batches of a command: shows which one it is at, its step, loss and speed, and the time left for all of them.

    Where a course has model FLOPs, tokens and the share of the devices' peak are shown too (MFU: model FLOPs utilisation,
    Chowdhery et al. 2022).
    """

    def __init__(self, courses: Iterable[Course], batches: int):
        self.courses, self.batches = [*courses], batches
        self.number, self.at = 0, 0  # of the batch, from 1, and of its course
        self.pace: dict[int, float] = {}
        self.every, self.told, self.seen = LINES, time.monotonic(), time.monotonic()
        self.handler = log.get_absl_handler().python_handler
        self.stream, self.bar = self.handler.stream, None
        if sys.stderr.isatty():
            form = "{percentage:3.0f} %|{bar:12}| {desc}"  # the speed comes last, where a narrow terminal cuts
            self.bar = tqdm(total=1.0, bar_format=form, dynamic_ncols=True, leave=False)
            self.every, self.handler.stream = PICTURES, _AboveTheBar()

    def begin(self, course: int) -> None:
        """The next batch begins; it is of this course, whose program may have to be compiled."""
        self.number, self.at = self.number + 1, course
        if self.courses[course].compiling is None:
            self._tell(f"compiling {self.courses[course].name}")

    def compiled(self, seconds: float) -> None:
        """The program of the batch is compiled."""
        self.courses[self.at] = self.courses[self.at]._replace(compiling=seconds)
        self.seen += seconds

    def resume(self, steps: int, evaluations: int) -> None:
        """So many steps and evaluations of the batch's runs were done before this process."""
        course = self.courses[self.at]
        self.courses[self.at] = course._replace(
            steps_done=course.steps_done + steps, evaluations_done=course.evaluations_done + evaluations
        )

    def advance(self, steps: int, evaluations: int, step: int, loss: float) -> None:
        """So many more steps and evaluations of the batch's runs are done; it is at `step`."""
        now = time.monotonic()
        stretch, self.seen = Stretch(steps, evaluations, now - self.seen), now
        self.resume(steps, evaluations)
        course = self.courses[self.at]
        self.courses[self.at] = course._replace(stretches=(*course.stretches, stretch)[-REMEMBERED:])
        finished = all(one.steps_done >= one.steps for one in self.courses)
        if now - self.told >= self.every or finished:
            text = f"{course.name}: step {step}" + ("" if math.isnan(loss) else f", train loss {loss:.4f}")
            self._tell(text + self._speed())
            self.told = now

    def paced(self, steps: int, seconds: float) -> None:
        """The batch took `steps` steps in so many seconds."""
        if steps:
            self.pace[self.at] = seconds / steps

    def within(self, seconds: float, most: int) -> int:
        """Steps, from 1 to `most`, that the batch takes in so many seconds; 1 while nobody knows."""
        wanted = seconds / self.pace[self.at] if self.at in self.pace else 1
        return int(min(max(wanted, 1), most))

    def close(self) -> None:
        """Leaves the terminal tidy."""
        self.handler.stream = self.stream
        if self.bar is not None:
            self.bar.close()

    def _tell(self, text: str) -> None:
        left, done = seconds_left(self.courses), share_done(self.courses)
        time_left = "" if left is None else f", about {_clock(left)} left"
        text = f"batch {self.number} of {self.batches}{time_left}; {text}"
        if self.bar is None:
            log.info("%d %% done, %s", 100 * done, text)
        else:
            self.bar.n = done
            self.bar.set_description_str(text)

    def _speed(self) -> str:
        course = self.courses[self.at]
        rate = sum(one.steps for one in course.stretches) / max(sum(one.seconds for one in course.stretches), 1e-9)
        if not rate:
            return ""
        if course.flops is None:
            return f", {rate:.3g} steps/s"
        share = 100 * rate * course.flops / machine.peak()
        told = f"{share:.2g} %" if share <= 100 else "unknown: other work ran while the processor's rate was measured"
        return f", {rate:.3g} steps/s, {rate * course.tokens:.3g} tokens/s, MFU {told}"


class _AboveTheBar:
    """A stream for the log, whose lines appear above the bar."""

    def write(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr, end="")

    def flush(self) -> None:
        sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
