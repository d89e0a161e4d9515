"""What this machine can do: the rates that floors are made of."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from routed.system.chips import chip_of


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
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


@functools.cache
def peak() -> float:
    """FLOP/s of all devices: their maker's number, or on a CPU the rate of a large product, measured once."""
    chip = chip_of(jax.devices()[0].device_kind)
    return chip.peak["bfloat16"] * jax.device_count() if chip else matrix_rate()
