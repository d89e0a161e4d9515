"""What a long run says of itself: a live bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time

from absl import logging as log
from tqdm import tqdm


class Progress:
    """Counts run-steps over the whole command; shows group, step, loss, steps/s and the time left."""

    def __init__(self, total: int, every_seconds: float = 10.0):
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.every, self.told = every_seconds, self.start
        self.bar = tqdm(total=total, unit="step", unit_scale=True, dynamic_ncols=True) if sys.stderr.isatty() else None

    def advance(self, run_steps: int, group: str, step: int, loss: float) -> None:
        """`run_steps` more steps of single runs are done."""
        self.done += run_steps
        text = f"{group}: step {step}" + ("" if math.isnan(loss) else f", train loss {loss:.4f}")
        if self.bar is not None:
            self.bar.set_description(text, refresh=False)
            self.bar.update(run_steps)
            return
        now = time.monotonic()
        if self.done and (now - self.told >= self.every or self.done >= self.total):
            rate = self.done / (now - self.start)
            left = (self.total - self.done) / rate
            log.info("%s, %.0f steps/s, %d %% done, %s left", text, rate, 100 * self.done / self.total, _clock(left))
            self.told = now

    def close(self) -> None:
        """Leaves the terminal tidy."""
        if self.bar is not None:
            self.bar.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
