"""The peak rates of this machine, and the least time of some work at these rates."""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from routed.contracts import UserError
from routed.system.chips import CHIPS, chip_of
from routed.system.platform import platform


class Rates(NamedTuple):
    """Peak rates of the first device: FLOP/s by type of the factors, and bytes/s of its memory."""

    peak: dict[str, float]
    bandwidth: float


class Floor(NamedTuple):
    """The least seconds of some work, and their bound: FLOPs or bytes."""

    seconds: float
    bound: str


def matrix_rate() -> float:
    """FLOP/s of a large float32 product on all cores: the best of five."""
    a = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    return max(2 * 2048**3 / _time(lambda: product(a).block_until_ready()) for _ in range(5))


def memory_bandwidth() -> float:
    """Bytes/s of x += y on arrays far larger than the caches: the best of five."""
    x, y = np.zeros(2**26, np.float32), np.ones(2**26, np.float32)
    return max(3 * x.nbytes / _time(lambda: np.add(x, y, out=x)) for _ in range(5))


def _time(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@functools.cache
def peak() -> float:
    """FLOP/s of all devices: the number of their maker, or on a CPU the rate of a large product, measured once."""
    chip = chip_of(jax.devices()[0].device_kind)
    return chip.peak["bfloat16"] * jax.device_count() if chip else matrix_rate()


@functools.cache
def rates() -> Rates:
    """The rates that the device's maker states; those of a CPU are measured, once.

    Raises:
      UserError: an accelerator that `chips.CHIPS` does not have.
    """
    if platform() == "cpu":
        rate = matrix_rate()
        return Rates({"float32": rate, "bfloat16": rate}, memory_bandwidth())
    kind = jax.devices()[0].device_kind
    if (chip := chip_of(kind)) is None:
        raise UserError(f"no rates of {kind!r} are known ({', '.join(CHIPS)} are): add it to CHIPS in system/chips.py")
    return Rates(chip.peak, chip.bandwidth)


def floor(rates: Rates, flops: float, moved: float, dtype: str) -> Floor:
    """The larger of FLOPs at the peak and bytes at the bandwidth."""
    by_flops, by_bytes = flops / rates.peak[dtype], moved / rates.bandwidth
    return Floor(max(by_flops, by_bytes), "FLOPs" if by_flops > by_bytes else "bytes")
