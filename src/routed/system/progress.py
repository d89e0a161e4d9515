"""What a long run says of itself: a live bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time

from absl import logging as log
from tqdm import tqdm

from routed.system import machine


class Progress:
    """Counts run-steps over the whole command; shows group, step, loss, speed and the time left.

    A step has `tokens` tokens; with its model FLOPs the share of the devices' peak is shown too (MFU: model FLOPs
    utilisation, Chowdhery et al. 2022).
    """

    def __init__(self, total: int, tokens: int = 0, flops: float | None = None, every_seconds: float = 10.0):
        self.total, self.done, self.here, self.start = total, 0, 0, time.monotonic()
        self.tokens, self.flops = tokens, flops
        self.every, self.told = every_seconds, self.start
        self.pace: dict[str, float] = {}
        self.bar = tqdm(total=total, unit="step", unit_scale=True, dynamic_ncols=True) if sys.stderr.isatty() else None

    def advance(self, run_steps: int, group: str, step: int, loss: float, *, resumed: bool = False) -> None:
        """`run_steps` more steps of single runs are done, here or, if `resumed`, before this process."""
        self.done += run_steps
        self.here += 0 if resumed else run_steps
        text = f"{group}: step {step}" + ("" if math.isnan(loss) else f", train loss {loss:.4f}")
        now = time.monotonic()
        rate = self.here / max(now - self.start, 1e-9)
        if self.bar is not None:
            self.bar.set_description(text, refresh=False)
            self.bar.set_postfix_str(self._speed(rate), refresh=False)
            self.bar.update(run_steps)
            return
        if self.here and (now - self.told >= self.every or self.done >= self.total):
            left, share = (self.total - self.done) / rate, 100 * self.done / self.total
            log.info("%s, %.4g steps/s%s, %d %% done, %s left", text, rate, self._speed(rate), share, _clock(left))
            self.told = now

    def paced(self, group: str, steps: int, seconds: float) -> None:
        """A batch of `group` took `steps` steps in so many seconds."""
        if steps:
            self.pace[group] = seconds / steps

    def within(self, seconds: float, group: str, most: int) -> int:
        """Steps, from 1 to `most`, that a batch of `group` takes in so many seconds; 1 while nobody knows."""
        wanted = seconds / self.pace[group] if group in self.pace else 1
        return int(min(max(wanted, 1), most))

    def _speed(self, rate: float) -> str:
        if self.flops is None:
            return ""
        return f", {rate * self.tokens:.3g} tokens/s, MFU {100 * rate * self.flops / machine.peak():.2g} %"

    def close(self) -> None:
        """Leaves the terminal tidy."""
        if self.bar is not None:
            self.bar.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
