"""Means and intervals as text, with as many digits as the interval is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable

#: Smallest half-width, as a share of the larger end; smaller ones are rounding errors.
ROUNDING = 1e-9
#: Range of sizes that are written without an exponent.
WRITTEN_OUT = 1e-4, 1e6


def with_interval(values: Iterable[float], sign: str = "") -> str:
    """Returns a mean and its interval with the same digits; three digits of the mean if the ends are NaN."""
    mean, *ends = parts(values, sign)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def parts(values: Iterable[float], sign: str = "") -> tuple[str, ...]:
    """Returns mean, low and high as texts; only the mean if the ends are NaN.

    The decimals are those of the half-width h of the interval, rounded as the Particle Data Group rounds (Review of
    Particle Physics, Introduction, 5.3): to two digits if the first three digits of h are at most 354, else to one. If
    an end would become 0 or both ends equal (an interval over orders of magnitude, or without a width), each number has
    three digits of its own.

    The sign "+" is shown for positive numbers if `sign` is "+".
    """
    mean, low, high = values
    if not (math.isfinite(low) and math.isfinite(high)):
        return (f"{mean:{sign}.3g}",)
    half, size = (high - low) / 2, max(abs(low), abs(high))
    if half > ROUNDING * size and WRITTEN_OUT[0] <= size < WRITTEN_OUT[1]:
        power = math.floor(math.log10(half))
        decimals = max(0, (1 if half / 10**power < 3.55 else 0) - power)
        texts = tuple(f"{value:{sign}z.{decimals}f}" for value in (mean, low, high))
        if texts[1] != texts[2] and all(
            bool(value) == bool(float(text)) for value, text in zip((low, high), texts[1:], strict=True)
        ):
            return texts
    return tuple(f"{value:{sign}.3g}" for value in (mean, low, high))
